"""Differences between the nodes of a cluster, and the links between them.

Values that must be equal, files that must be shared, connections between all nodes on any port,
and the speed of an all-reduce over all nodes. The functions run in a process of each node.

gloo and NCCL connect all ranks through ports that the kernel chooses. A firewall that lets only
Ray's own ports through makes the ranks wait for each other until a time limit, without a name.
"""

import contextlib
import os
import socket
import threading
import time
import uuid
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any, Literal

import torch
import torch.distributed as dist

from data_pipeline.system.files import try_lock, write_file
from txl_dist.doctor.checks import PROBE_PREFIX
from txl_dist.doctor.finding import Finding, note, ok, problem

ALL_NODES = "all nodes"
SHARED_WAIT_SECONDS = 10.0
"""NFS clients cache attributes for some seconds, so a new file may appear late on other nodes."""
_POLL_SECONDS = 0.2
NETWORK_SECONDS = 60.0
"""Time limit for the rendezvous of the nodes, and for one collective."""
CONNECT_SECONDS = 3.0
MEASURE_SECONDS = 0.2
"""Messages double in size until one takes this long, so fast and slow links both get a result in
about a second."""
_MIN_BYTES, _MAX_BYTES = 2**18, 2**26
_REPEATS = 20
_PARALLEL_CONNECTIONS = 16

ProbeResult = Literal["seen", "missing", "other content", "lock not seen"]
"""How one node sees the probe of another."""
UNSEEN: frozenset[ProbeResult] = frozenset({"missing", "other content"})

_held: list[Any] = []
"""What has to stay open in the process of a probe, between two calls."""


def compare_values(findings: Sequence[Finding]) -> list[Finding]:
    """A problem for every node whose `equal_on_all_nodes` is not that of most nodes."""
    problems = []
    for check in {finding.check: None for finding in findings if finding.equal_on_all_nodes}:
        reported = [one for one in findings if one.check == check and one.equal_on_all_nodes]
        counts = Counter(finding.equal_on_all_nodes for finding in reported)
        most, _ = counts.most_common(1)[0]
        example = next(one for one in reported if one.equal_on_all_nodes == most)
        for finding in reported:
            if finding.equal_on_all_nodes != most:
                different = problem(
                    finding.found,
                    expected=f"as on node {example.node}: {example.found}",
                    advice="make both nodes see the same directory, or copy the newer one there",
                )
                problems.append(replace(different, check=check, node=finding.node))
    return problems


# --- shared files ---------------------------------------------------------------------------------


class SharedProbe:
    """A file of this node in a shared directory, locked until `remove`."""

    def __init__(self, directory: str) -> None:
        self.directory = Path(directory)
        self.name = f"{PROBE_PREFIX}{socket.gethostname()}-{uuid.uuid4().hex}.tmp"

    def place(self) -> str:
        """Create the file; returns its name, which is its content as well."""
        path = self.directory / self.name
        write_file(path, self.name.encode())
        self._file = path.open("rb+")
        try_lock(self._file.fileno())
        return self.name

    def read(self, names: Mapping[str, str]) -> dict[str, ProbeResult]:
        """Node -> how this node sees the file of that node; `names` are those of the files."""
        deadline = time.monotonic() + SHARED_WAIT_SECONDS
        while True:
            results = {node: self._read_one(name) for node, name in names.items()}
            if not UNSEEN & set(results.values()) or time.monotonic() > deadline:
                return results
            time.sleep(_POLL_SECONDS)
            os.scandir(self.directory).close()  # makes an NFS client read the directory again

    def _read_one(self, name: str) -> ProbeResult:
        try:
            with (self.directory / name).open("rb+") as file:
                if file.read() != name.encode():
                    return "other content"
                # The other process holds the lock, so it must not be free here.
                return "lock not seen" if try_lock(file.fileno()) else "seen"
        except OSError:
            return "missing"

    def remove(self) -> None:
        """Release the lock and remove the file."""
        with contextlib.suppress(OSError, AttributeError):
            self._file.close()
        with contextlib.suppress(OSError):
            (self.directory / self.name).unlink()


def place_probe(directory: str) -> str:
    """Write and lock a file; returns its name."""
    probe = SharedProbe(directory)
    _held.append(probe)
    return probe.place()


def read_probes(directory: str, names: Mapping[str, str]) -> dict[str, ProbeResult]:
    """See `SharedProbe.read`."""
    return SharedProbe(directory).read(names)


def remove_probes() -> None:
    """Remove what `place_probe` wrote."""
    for probe in _held:
        probe.remove()
    _held.clear()


def compare_probes(
    directory: str, results: Mapping[str, Mapping[str, ProbeResult]]
) -> list[Finding]:
    """Whether the nodes see one directory; `results` is node -> node that wrote -> what it saw."""
    findings = []
    for node, seen in results.items():
        unseen = [writer for writer, result in seen.items() if result in UNSEEN]
        if unseen:
            more = f" and {len(unseen) - 3} more" if len(unseen) > 3 else ""
            hidden = problem(
                f"{directory}: files that {', '.join(unseen[:3])}{more} wrote are not seen",
                expected="one directory that all nodes share",
                advice="mount the same file system at this path on all nodes, and choose a run "
                "directory on it",
            )
            findings.append(replace(hidden, node=node))
    if findings or len(results) < 2:
        return findings
    together = ok(f"{directory}: every node sees the files of the others")
    if any(result == "lock not seen" for seen in results.values() for result in seen.values()):
        together = note(
            f"{directory}: a lock of one node is not seen by others",
            expected="locks that are valid on all nodes, which refuse a second run",
            advice="mount with locks (NFS: without nolock or local_lock; Lustre: flock), or make "
            "sure that no directory is used by two runs",
        )
    return [replace(together, node=ALL_NODES)]


# --- connections, and the speed of the network ----------------------------------------------------


def listen(host: str) -> tuple[str, int]:
    """Accept connections at a free port until this process ends; returns the address."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, 0), family=family)

    def accept() -> None:
        while True:
            listener.accept()[0].close()

    threading.Thread(target=accept, daemon=True).start()
    return host, int(listener.getsockname()[1])


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
    findings = []
    for node, others in failures.items():
        for other, error in others.items():
            closed = problem(
                f"cannot connect to {other}: {error}",
                expected="connections between all nodes, on all TCP ports",
                advice="open the ports between the nodes (security group, firewall, network "
                "policy): ranks use ports that the kernel chooses",
            )
            findings.append(replace(closed, node=node))
    return findings


def open_store(host: str, port: int, num_nodes: int) -> int:
    """Open the store of the process group on this node (`port` 0: a free one); returns its port."""
    store = _store(host, port, num_nodes, is_first=True)
    _held.append(store)
    return int(store.port)


def _store(host: str, port: int, num_nodes: int, *, is_first: bool) -> dist.TCPStore:
    limit = timedelta(seconds=NETWORK_SECONDS)
    return dist.TCPStore(host, port, num_nodes, is_first, limit, wait_for_workers=False)


def measure_network(
    rank: int, num_nodes: int, store: tuple[str, int], backend: str
) -> tuple[float, float]:
    """Seconds of the smallest all-reduce, and bytes per second of a large one.

    Called by one process per node at the same time, with the backend that training would use. The
    rate is the "bus bandwidth" of nccl-tests, bytes / seconds * 2 (n - 1) / n, which can be
    compared with the speed of one link.
    """
    device = torch.device("cuda", 0) if backend == "nccl" else torch.device("cpu")
    group = _held[-1] if rank == 0 else _store(*store, num_nodes, is_first=False)
    limit = timedelta(seconds=NETWORK_SECONDS)
    dist.init_process_group(backend, store=group, rank=rank, world_size=num_nodes, timeout=limit)
    try:
        small = torch.zeros(1, device=device)
        latency = median(_all_reduce_seconds(small) for _ in range(_REPEATS))
        num_bytes = _MIN_BYTES
        while True:
            buffer = torch.zeros(num_bytes // 4, device=device)
            _all_reduce_seconds(buffer)  # the first one allocates
            # The slowest node decides, so that all make the same number of rounds.
            slowest = torch.tensor([_all_reduce_seconds(buffer)], device=device)
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            seconds = float(slowest)
            if seconds > MEASURE_SECONDS or num_bytes >= _MAX_BYTES:
                return latency, num_bytes / seconds * 2 * (num_nodes - 1) / num_nodes
            num_bytes *= 2
    finally:
        dist.destroy_process_group()


def _all_reduce_seconds(tensor: torch.Tensor) -> float:
    begin = time.perf_counter()
    dist.all_reduce(tensor)
    if tensor.is_cuda:  # NCCL's calls return before the GPU has finished
        torch.cuda.synchronize(tensor.device)
    return time.perf_counter() - begin
