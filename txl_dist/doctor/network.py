"""Speed of the links between nodes: all-reduce over all of them, and every pair alone.

One process per node joins a process group of the backend that training would use. Messages double
in size until one takes MEASURE_SECONDS, so fast and slow links both get a result in about a second.

The bandwidth of all-reduce is the "bus bandwidth" of nccl-tests, bytes / seconds * 2 (n - 1) / n,
which can be compared with the speed of one link. Pairs are measured in rounds of disjoint pairs.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from statistics import median

import torch
import torch.distributed as dist

from txl_dist.doctor.comparison import ALL_NODES
from txl_dist.doctor.finding import Finding, ok, problem

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
