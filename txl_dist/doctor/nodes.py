"""Differences between the nodes of a cluster, and the links between them.

Values that must be equal, clocks, files that must be shared; connections between all nodes on any
port; and the speed of an all-reduce over all nodes.

gloo and NCCL connect all ranks through ports that the kernel chooses. A firewall that lets only
Ray's own ports through makes the ranks wait for each other until a time limit, without a name.
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


# --- connections ----------------------------------------------------------------------------------

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


# --- the speed of the network ---------------------------------------------------------------------

MEASURE_SECONDS = 0.2
"""Messages double in size until one takes this long, so fast and slow links both get a result in
about a second."""
_LATENCY_REPEATS = 20
_MIN_BYTES, _MAX_BYTES = 2**18, 2**26


@dataclass(frozen=True, slots=True)
class NetworkSpeed:
    """Of an all-reduce over all nodes."""

    backend: str
    latency_seconds: float
    """Of the smallest message."""
    bytes_per_second: float
    """The "bus bandwidth" of nccl-tests, bytes / seconds * 2 (n - 1) / n, which can be compared
    with the speed of one link."""


def open_store(
    host: str, port: int, num_nodes: int, *, is_first: bool, limit_seconds: float
) -> dist.TCPStore:
    """Where the nodes meet. The first node opens it, with port 0 for a free one."""
    limit = timedelta(seconds=limit_seconds)
    return dist.TCPStore(host, port, num_nodes, is_first, limit, wait_for_workers=False)


def measure_network(
    rank: int, num_nodes: int, store: dist.Store, *, backend: str, limit_seconds: float
) -> NetworkSpeed:
    """Called by one process per node at the same time, with the backend that training would use."""
    device = torch.device("cuda", 0) if backend == "nccl" else torch.device("cpu")
    limit = timedelta(seconds=limit_seconds)
    dist.init_process_group(backend, store=store, rank=rank, world_size=num_nodes, timeout=limit)
    try:
        small = torch.zeros(1, device=device)
        latency = median(_all_reduce_seconds(small) for _ in range(_LATENCY_REPEATS))
        num_bytes = _MIN_BYTES
        while True:
            buffer = torch.zeros(num_bytes // 4, device=device)
            _all_reduce_seconds(buffer)  # the first one allocates
            # The slowest node decides, so that all make the same number of rounds.
            slowest = torch.tensor([_all_reduce_seconds(buffer)], device=device)
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            seconds = float(slowest)
            if seconds > MEASURE_SECONDS or num_bytes >= _MAX_BYTES:
                bandwidth = num_bytes / seconds * 2 * (num_nodes - 1) / num_nodes
                return NetworkSpeed(backend, latency, bandwidth)
            num_bytes *= 2
    finally:
        dist.destroy_process_group()


def describe_network(num_nodes: int, speed: NetworkSpeed) -> Finding:
    """For people, who know which speed their network should have."""
    fine = ok(
        f"{num_nodes} nodes, {speed.backend}: all-reduce {speed.bytes_per_second / 1e6:,.0f} MB/s, "
        f"{speed.latency_seconds * 1e3:.2f} ms"
    )
    return replace(fine, node=ALL_NODES)


def _all_reduce_seconds(tensor: torch.Tensor) -> float:
    begin = time.perf_counter()
    dist.all_reduce(tensor)
    if tensor.is_cuda:  # NCCL's calls return before the GPU has finished
        torch.cuda.synchronize(tensor.device)
    return time.perf_counter() - begin
