"""Differences between the nodes of a cluster, and the links between them.

Values that must be equal, clocks, files that must be shared; connections between all nodes on any
port; and the speed of the links: all-reduce over all of them, and every pair alone.

gloo and NCCL connect all ranks through ports that the kernel chooses. A firewall that lets only
Ray's own ports through makes the ranks wait for each other until a time limit, without a name.

For the speed, one process per node joins a process group of the backend that training would use.
Messages double in size until one takes MEASURE_SECONDS, so fast and slow links both get a result in
about a second. The bandwidth of all-reduce is the "bus bandwidth" of nccl-tests, bytes / seconds *
2 (n - 1) / n, which can be compared with the speed of one link. Pairs are measured in rounds of
disjoint pairs.
"""

import socket
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import timedelta
from statistics import median

import torch
import torch.distributed as dist

from txl_dist.doctor.finding import Finding, note, ok, problem
from txl_dist.doctor.storage import UNSEEN, ProbeResult

MEASURE_SECONDS = 0.2
MAX_ROUNDS = 31
"""With more than 32 nodes, each node is measured with only this many others."""
_LATENCY_REPEATS = 20
_MIN_BYTES, _MAX_BYTES = 2**18, 2**26
_SLOW_BANDWIDTH_RATIO = 0.5
_SLOW_LATENCY_RATIO, _SLOW_LATENCY_SECONDS = 3.0, 0.0005


@dataclass(frozen=True, slots=True)
class LinkSpeed:
    """Speed of all-reduce over all ranks, or of messages between two."""

    latency_seconds: float
    """Latency of the smallest message."""
    bytes_per_second: float

    def __str__(self) -> str:
        return f"{self.bytes_per_second / 1e6:,.0f} MB/s, {self.latency_seconds * 1e3:.2f} ms"


@dataclass(frozen=True, slots=True)
class NetworkSpeed:
    """What one rank measured."""

    backend: str
    all_reduce: LinkSpeed
    pairs: Mapping[tuple[int, int], LinkSpeed]
    """Speed of each pair in which this rank is the lower one."""


def open_store(host: str, num_ranks: int, *, limit_seconds: float) -> dist.TCPStore:
    """Called by rank 0 first. The other ranks need the address and the store's `port`."""
    limit = timedelta(seconds=limit_seconds)
    return dist.TCPStore(host, 0, num_ranks, is_master=True, timeout=limit, wait_for_workers=False)


def measure_network(
    rank: int, num_ranks: int, store: dist.Store, *, backend: str, limit_seconds: float
) -> NetworkSpeed:
    """Called by all ranks at the same time, with stores of the same address."""
    device = torch.device("cuda", 0) if backend == "nccl" else torch.device("cpu")
    dist.init_process_group(
        backend,
        store=store,
        rank=rank,
        world_size=num_ranks,
        timeout=timedelta(seconds=limit_seconds),
    )
    try:
        return _measure(rank, num_ranks, device, backend)
    finally:
        dist.destroy_process_group()


def connect_store(host: str, port: int, num_ranks: int, *, limit_seconds: float) -> dist.TCPStore:
    """The store that rank 0 has opened."""
    limit = timedelta(seconds=limit_seconds)
    return dist.TCPStore(host, port, num_ranks, is_master=False, timeout=limit)


def pair_rounds(num_ranks: int) -> list[list[tuple[int, int]]]:
    """All pairs of ranks in rounds in which no rank has two partners (the circle method)."""
    players: list[int | None] = [*range(num_ranks), *([None] if num_ranks % 2 else [])]
    rounds = []
    for _ in range(len(players) - 1):
        half = len(players) // 2
        pairs = zip(players[:half], reversed(players[half:]), strict=True)
        rounds.append([(min(a, b), max(a, b)) for a, b in pairs if a is not None and b is not None])
        players = [players[0], players[-1], *players[1:-1]]
    return rounds[:MAX_ROUNDS]


def judge_network(nodes: Sequence[str], speeds: Sequence[NetworkSpeed]) -> list[Finding]:
    """Name the slowest pair; a problem if it is much slower than others."""
    pairs = {pair: speed for one in speeds for pair, speed in one.pairs.items()}
    summary = f"{len(nodes)} nodes, {speeds[0].backend}: all-reduce {speeds[0].all_reduce}"
    if not pairs:
        return [replace(ok(summary), node=ALL_NODES)]
    names = {pair: f"{nodes[pair[0]]} - {nodes[pair[1]]}" for pair in pairs}
    slowest = min(pairs, key=lambda pair: pairs[pair].bytes_per_second)
    # The upper quartile: with three hosts, one bad host makes two of three pairs slow.
    quarter = len(pairs) // 4
    good = LinkSpeed(
        sorted(speed.latency_seconds for speed in pairs.values())[quarter],
        sorted((speed.bytes_per_second for speed in pairs.values()), reverse=True)[quarter],
    )
    slow = [pair for pair, speed in pairs.items() if _is_slow(speed, good)]
    fine = ok(f"{summary}; slowest pair {names[slowest]}: {pairs[slowest]}")
    if not slow:
        return [replace(fine, node=ALL_NODES)]
    worst = min(slow, key=lambda pair: pairs[pair].bytes_per_second)
    in_all = set.intersection(*(set(pair) for pair in slow)) if len(slow) > 1 else set()
    found = f"slowest pair {names[worst]}: {pairs[worst]}; {len(slow)} of {len(pairs)} pairs slow"
    return [
        replace(ok(summary), node=ALL_NODES),
        replace(
            problem(
                found,
                expected=f"about the speed of the upper quartile of pairs: {good}",
                advice="check the cable, the port and the network interface of that node"
                if in_all
                else "check the link between the two nodes; exclude one of them until then",
            ),
            node=nodes[min(in_all)] if in_all else names[worst],
        ),
    ]


def _is_slow(speed: LinkSpeed, good: LinkSpeed) -> bool:
    longest_seconds = _SLOW_LATENCY_RATIO * good.latency_seconds + _SLOW_LATENCY_SECONDS
    return (
        speed.bytes_per_second < _SLOW_BANDWIDTH_RATIO * good.bytes_per_second
        or speed.latency_seconds > longest_seconds
    )


def _measure(rank: int, num_ranks: int, device: torch.device, backend: str) -> NetworkSpeed:
    all_reduce = _measure_all_reduce(num_ranks, device)
    pairs = {}
    for pairs_of_round in pair_rounds(num_ranks):
        dist.barrier()
        for low, high in pairs_of_round:
            if rank == low:
                pairs[low, high] = _measure_pair(high, device)
            elif rank == high:
                _answer_pair(low, device)
    dist.barrier()
    return NetworkSpeed(backend, all_reduce, pairs)


def _measure_all_reduce(num_ranks: int, device: torch.device) -> LinkSpeed:
    small = torch.zeros(1, device=device)
    latency = median(_all_reduce_seconds(small) for _ in range(_LATENCY_REPEATS))
    num_bytes = _MIN_BYTES
    while True:
        buffer = torch.zeros(num_bytes // 4, device=device)
        _all_reduce_seconds(buffer)  # the first one allocates
        # The slowest rank decides, so that all ranks make the same number of rounds.
        slowest = torch.tensor([_all_reduce_seconds(buffer)], device=device)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        seconds = float(slowest)
        if seconds > MEASURE_SECONDS or num_bytes >= _MAX_BYTES:
            return LinkSpeed(latency, num_bytes / seconds * 2 * (num_ranks - 1) / num_ranks)
        num_bytes *= 2


def _all_reduce_seconds(tensor: torch.Tensor) -> float:
    begin = time.perf_counter()
    dist.all_reduce(tensor)
    _wait(tensor)
    return time.perf_counter() - begin


def _measure_pair(partner: int, device: torch.device) -> LinkSpeed:
    """The lower rank: send messages that the partner returns."""
    latency = _round_trip_seconds(1, _LATENCY_REPEATS, partner, device) / 2
    num_bytes = _MIN_BYTES
    while True:
        seconds = _round_trip_seconds(num_bytes, 1, partner, device) / 2
        if seconds > MEASURE_SECONDS / 2 or num_bytes >= _MAX_BYTES:
            dist.send(torch.zeros(2, dtype=torch.int64, device=device), partner)
            return LinkSpeed(latency, num_bytes / seconds)
        num_bytes *= 2


def _round_trip_seconds(num_bytes: int, repeats: int, partner: int, device: torch.device) -> float:
    """Median time of a message to the partner and back."""
    dist.send(torch.tensor([num_bytes, repeats], device=device), partner)
    message = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    times = []
    for _ in range(1 + repeats):
        _wait(message)
        begin = time.perf_counter()
        dist.send(message, partner)
        dist.recv(message, partner)
        _wait(message)
        times.append(time.perf_counter() - begin)
    return median(times[1:])  # before the first one, the partner allocates its message


def _answer_pair(partner: int, device: torch.device) -> None:
    """The higher rank: return messages of the announced size, until a size of 0."""
    header = torch.zeros(2, dtype=torch.int64, device=device)
    while True:
        dist.recv(header, partner)
        num_bytes, repeats = header.tolist()
        if not num_bytes:
            return
        message = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        for _ in range(1 + repeats):
            dist.recv(message, partner)
            dist.send(message, partner)


def _wait(tensor: torch.Tensor) -> None:
    """NCCL's calls return before the GPU has finished."""
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)


CONNECT_SECONDS = 3.0
_PARALLEL_CONNECTIONS = 16


class ConnectionServer:
    """Accepts and closes connections at a free port of `host`, until `close`."""

    def __init__(self, host: str) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family)
        self.address = host, int(self._listener.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                self._listener.accept()[0].close()
            except OSError:
                return

    def close(self) -> None:
        self._listener.close()


def unreachable(addresses: Mapping[str, tuple[str, int]]) -> dict[str, str]:
    """Node -> error, of the nodes whose address does not accept a connection from here."""

    def error_of(address: tuple[str, int]) -> str:
        try:
            socket.create_connection(address, CONNECT_SECONDS).close()
        except OSError as error:
            return error.strerror or str(error)
        return ""

    with ThreadPoolExecutor(_PARALLEL_CONNECTIONS) as pool:
        errors = dict(zip(addresses, pool.map(error_of, addresses.values()), strict=True))
    return {node: error for node, error in errors.items() if error}


def judge_connections(failures: Mapping[str, Mapping[str, str]]) -> list[Finding]:
    """A problem for every node that cannot reach another; `failures` is node -> other -> error."""
    return [
        replace(
            problem(
                f"cannot connect to {other}: {error}",
                expected="connections between all nodes, on all TCP ports",
                advice="open the ports between the nodes (security group, firewall, network "
                "policy): ranks use ports that the kernel chooses",
            ),
            node=node,
        )
        for node, others in failures.items()
        for other, error in others.items()
    ]


ALL_NODES = "all nodes"
MAX_CLOCK_DIFFERENCE_SECONDS = 1.0


def compare_values(findings: Sequence[Finding]) -> list[Finding]:
    """A problem for every node whose `equal_on_all_nodes` is not that of most nodes."""
    problems = []
    for check in {finding.check: None for finding in findings if finding.equal_on_all_nodes}:
        reported = [one for one in findings if one.check == check and one.equal_on_all_nodes]
        counts = Counter(finding.equal_on_all_nodes for finding in reported)
        most, _ = counts.most_common(1)[0]
        example = next(one for one in reported if one.equal_on_all_nodes == most)
        problems += [
            replace(
                problem(
                    finding.found,
                    expected=f"as on node {example.node}: {example.found}",
                    advice="make both nodes see the same directory, or copy the newer one there",
                ),
                check=check,
                node=finding.node,
            )
            for finding in reported
            if finding.equal_on_all_nodes != most
        ]
    return problems


@dataclass(frozen=True, slots=True)
class ClockReading:
    """The clock of a node minus that of the machine of the command."""

    difference_seconds: float
    uncertainty_seconds: float
    """Half of the shortest round trip."""


def compare_clocks(readings: Mapping[str, ClockReading]) -> list[Finding]:
    """A problem for every clock that differs from the median clock."""
    in_order = sorted(readings.values(), key=lambda reading: reading.difference_seconds)
    middle = in_order[(len(in_order) - 1) // 2]
    findings = []
    largest = 0.0
    for node, reading in readings.items():
        difference = reading.difference_seconds - middle.difference_seconds
        largest = max(largest, abs(difference))
        uncertainty = reading.uncertainty_seconds + middle.uncertainty_seconds
        if abs(difference) - uncertainty > MAX_CLOCK_DIFFERENCE_SECONDS:
            direction = "ahead of" if difference > 0 else "behind"
            findings.append(
                replace(
                    problem(
                        f"the clock is {abs(difference):.1f} s {direction} the median of all nodes",
                        expected=f"at most {MAX_CLOCK_DIFFERENCE_SECONDS:g} s",
                        advice="start chrony or systemd-timesyncd on that node (timedatectl)",
                    ),
                    node=node,
                )
            )
    error = max(reading.uncertainty_seconds for reading in readings.values())
    fine = ok(f"the clocks differ by at most {largest:.3f} s (+- {error:.3f} s)")
    return findings or [replace(fine, node=ALL_NODES)]


def compare_probes(
    directory: str, results: Mapping[str, Mapping[str, ProbeResult]]
) -> list[Finding]:
    """Whether the nodes see one directory; `results` is node -> node that wrote -> what it saw."""
    unseen = {
        node: [writer for writer, result in seen.items() if result in UNSEEN]
        for node, seen in results.items()
    }
    findings = [
        replace(
            problem(
                f"{directory}: files that {_listed(writers)} wrote are not seen",
                expected="one directory that all nodes share",
                advice="mount the same file system at this path on all nodes, and choose a run "
                "directory on it",
            ),
            node=node,
        )
        for node, writers in unseen.items()
        if writers
    ]
    if findings:
        return findings
    if any(result == "lock not seen" for seen in results.values() for result in seen.values()):
        lockless = note(
            f"{directory}: a lock of one node is not seen by others",
            expected="locks that are valid on all nodes, which refuse a second run",
            advice="mount with locks (NFS: without nolock or local_lock; Lustre: flock), or make "
            "sure that no directory is used by two runs",
        )
        return [replace(lockless, node=ALL_NODES)]
    if len(results) < 2:
        return []
    return [replace(ok(f"{directory}: every node sees the files of the others"), node=ALL_NODES)]


def _listed(nodes: Sequence[str]) -> str:
    shown = ", ".join(nodes[:3])
    return shown if len(nodes) <= 3 else f"{shown} and {len(nodes) - 3} more"
