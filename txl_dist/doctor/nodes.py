"""Differences between the nodes of a cluster, and the links between them.

Values that must be equal, files that must be shared, and connections between all nodes on
any port. The functions run in a process of each node.

gloo and NCCL connect all ranks through ports that the kernel chooses. A firewall that lets only
Ray's own ports through makes the ranks wait for each other until a time limit, without a name.
"""

import os
import socket
import threading
import time
import uuid
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO, Literal

from data_pipeline.system.files import try_lock, write_file
from txl_dist.doctor.checks import PROBE_PREFIX
from txl_dist.doctor.finding import Finding, note, ok, problem

ALL_NODES = "all nodes"
SHARED_WAIT_SECONDS = 10.0
"""NFS clients cache attributes for some seconds, so a new file may appear late on other nodes."""
_POLL_SECONDS = 0.2
CONNECT_SECONDS = 3.0
_PARALLEL_CONNECTIONS = 16

ProbeResult = Literal["seen", "missing", "other content", "lock not seen"]
"""How one node sees the probe of another."""
UNSEEN: frozenset[ProbeResult] = frozenset({"missing", "other content"})

_held: dict[Path, BinaryIO] = {}
"""The locked files of this process, from `place_probe` to `remove_probes`."""


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


def place_probe(directory: str) -> str:
    """Write a file and lock it until `remove_probes`; returns its name, which is the content."""
    name = f"{PROBE_PREFIX}{socket.gethostname()}-{uuid.uuid4().hex}.tmp"
    path = Path(directory) / name
    write_file(path, name.encode())
    file = path.open("rb+")
    _held[path] = file
    try_lock(file.fileno())
    return name


def read_probes(directory: str, names: Mapping[str, str]) -> dict[str, ProbeResult]:
    """Node -> how this node sees the file of that node; `names` are those of the files."""
    deadline = time.monotonic() + SHARED_WAIT_SECONDS
    while True:
        results = {node: _read_probe(Path(directory) / name) for node, name in names.items()}
        if not UNSEEN & set(results.values()) or time.monotonic() > deadline:
            return results
        time.sleep(_POLL_SECONDS)
        os.scandir(directory).close()  # makes an NFS client read the directory again


def _read_probe(path: Path) -> ProbeResult:
    try:
        with path.open("rb+") as file:
            if file.read() != path.name.encode():
                return "other content"
            # The other process holds the lock, so it must not be free here.
            return "lock not seen" if try_lock(file.fileno()) else "seen"
    except OSError:
        return "missing"


def remove_probes() -> None:
    """Release and remove the files of `place_probe`."""
    for path, file in _held.items():
        file.close()
        path.unlink(missing_ok=True)
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


# --- connections ----------------------------------------------------------------------------------


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
    connected = ok(f"each of {len(failures)} nodes can connect to the others")
    return findings or [replace(connected, node=ALL_NODES)]
