"""`txl doctor --on ADDRESS`: the checks of every node of a Ray cluster, and between nodes.

    check_cluster_nodes -> NodeProbe (one actor per node) -> findings of each node
                        -> comparisons of all nodes: dataset, shared files, connections

An actor reserves no CPU and no GPU, so a busy cluster can be checked. Every call has a time limit;
a node that does not answer is named, and left out of the comparisons.

gloo and NCCL connect all ranks through ports that the kernel chooses. A firewall that lets only
Ray's own ports through makes the ranks wait for each other until a time limit, without a name.
"""

import os
import socket
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, Literal, TypeVar

from cluster.connection import ray_connection
from data_pipeline.system.files import try_lock, write_file
from txl_dist.doctor.checks import (
    PROBE_PREFIX,
    DoctorRequest,
    check_this_machine,
    installed_versions,
)
from txl_dist.doctor.finding import (
    LIMIT_SECONDS,
    Finding,
    failed_check,
    no_result,
    note,
    ok,
    problem,
)
from txl_dist.doctor.services import check_token, existing_parent

ALL_NODES = "all nodes"
DRIVER = "this machine"
"""The node of findings about the machine of the command, in its role as the driver."""
START_SECONDS = 60.0
"""Time limit for the start of a process on a node, imports included."""
SHARED_WAIT_SECONDS = 10.0
"""NFS clients cache attributes for some seconds, so a new file may appear late on other nodes."""
_POLL_SECONDS = 0.2
CONNECT_SECONDS = 3.0
_PARALLEL_CONNECTIONS = 16

ProbeResult = Literal["seen", "missing", "other content", "lock not seen"]
"""How one node sees the file of another."""
UNSEEN: frozenset[ProbeResult] = frozenset({"missing", "other content"})

R = TypeVar("R")


class NodeProbe:
    """An actor on one node: calls functions there."""

    def call(self, function: Callable[..., R], *arguments: Any) -> R:
        return function(*arguments)


@dataclass(frozen=True, slots=True)
class _Node:
    """A live node and its actor."""

    name: str
    """For findings: its address, and its id where nodes share an address."""
    host: str
    actor: Any


class _Nodes:
    """The actors, and the findings about calls that failed."""

    def __init__(self, nodes: Iterable[_Node]) -> None:
        self.nodes = list(nodes)
        self.findings: list[Finding] = []

    def call(
        self,
        check: str,
        function: Callable[..., R],
        arguments: Callable[[_Node], tuple[Any, ...]] = lambda node: (),
        *,
        limit_seconds: float = LIMIT_SECONDS,
    ) -> dict[str, R]:
        """Node name -> result of the function there. Failed nodes are reported and left out."""
        import ray

        calls = {node.actor.call.remote(function, *arguments(node)): node for node in self.nodes}
        ready, _ = ray.wait(list(calls), num_returns=len(calls), timeout=limit_seconds)
        results = {}
        for reference, node in calls.items():
            if reference not in ready:
                self.add(check, [no_result(limit_seconds)], node=node.name)
                continue
            try:
                results[node.name] = ray.get(reference)
            except ray.exceptions.RayError as error:
                self.add(check, [failed_check(getattr(error, "cause", None) or error)], node.name)
        self.nodes = [node for node in self.nodes if node.name in results]
        return results

    def add(self, check: str, findings: Iterable[Finding], node: str | None = None) -> None:
        """Add findings, of `node` or of their own nodes."""
        self.findings += [
            replace(finding, check=check, node=node or finding.node) for finding in findings
        ]


def check_cluster_nodes(request: DoctorRequest, *, address: str | None) -> list[Finding]:
    """All findings about a cluster. `address` None: a private Ray on this machine.

    Raises ConfigError if there is no cluster at `address`.
    """
    with ray_connection(address, num_cpus=os.cpu_count() or 1):
        import ray

        request = replace(
            request,
            expected_versions=installed_versions(),
            versions_of=DRIVER,
            dashboard_ports=_dashboard_ports(request.dashboard_ports),
        )
        nodes = _start_probes()
        actors = [node.actor for node in nodes.nodes]
        try:
            _check_driver(nodes, request)
            _check_each(nodes, request)
            if "storage" not in request.skip:
                _check_shared_files(nodes, request)
            if "network" not in request.skip:
                _check_links(nodes)
        finally:
            for actor in actors:
                ray.kill(actor)
    return nodes.findings


def _dashboard_ports(ports: Iterable[int]) -> tuple[int, ...]:
    """`ports` and the port of the connected cluster's dashboard."""
    import ray

    url = ray._private.worker.get_dashboard_url() or ""
    number = url.rpartition(":")[2]
    return tuple(dict.fromkeys([*ports, *([int(number)] if number.isdigit() else [])]))


def _start_probes() -> _Nodes:
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    alive = sorted(
        (node for node in ray.nodes() if node["Alive"]),
        key=lambda node: (node["NodeManagerAddress"], node["NodeID"]),
    )
    hosts = [node["NodeManagerAddress"] for node in alive]
    remote = ray.remote(num_cpus=0, max_restarts=0)(NodeProbe)
    return _Nodes(
        _Node(
            name=host if hosts.count(host) == 1 else f"{host} (node {node['NodeID'][:8]})",
            host=host,
            actor=remote.options(
                scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
            ).remote(),
        )
        for node, host in zip(alive, hosts, strict=True)
    )


def _check_driver(nodes: _Nodes, request: DoctorRequest) -> None:
    """The machine of the command: its versions, and whether Ray requires a token."""
    own = replace(
        request,
        run=None,
        data=None,
        expected_versions={},
        versions_of="constraints.txt",
        skip=request.skip | {"devices", "tracking", "exposure"},
    )
    nodes.findings += check_this_machine(own, DRIVER)
    if "exposure" not in request.skip:
        import ray

        nodes.add("exposure", [check_token(ray.get_runtime_context().gcs_address)], ALL_NODES)


def _check_each(nodes: _Nodes, request: DoctorRequest) -> None:
    results = nodes.call(
        "versions",
        check_this_machine,
        lambda node: (request, node.name),
        limit_seconds=START_SECONDS + LIMIT_SECONDS,
    )
    findings = [finding for found in results.values() for finding in found]
    nodes.findings += [*findings, *compare_datasets(findings)]


def compare_datasets(findings: Sequence[Finding]) -> list[Finding]:
    """A problem for every node whose `dataset` is not that of most nodes."""
    reported = [finding for finding in findings if finding.dataset]
    counts = Counter(finding.dataset for finding in reported)
    problems = []
    for finding in reported:
        most, _ = counts.most_common(1)[0]
        if finding.dataset != most:
            example = next(one for one in reported if one.dataset == most)
            different = problem(
                finding.found,
                expected=f"as on node {example.node}: {example.found}",
                advice="make both nodes see the same directory, or copy the newer one there",
            )
            problems.append(replace(different, check=finding.check, node=finding.node))
    return problems


# --- shared files ---------------------------------------------------------------------------------

_held: dict[Path, BinaryIO] = {}
"""The locked files of this process, from `place_probe` to `remove_probes`."""


def _check_shared_files(nodes: _Nodes, request: DoctorRequest) -> None:
    """Each node writes a file in the run directory, and reads those of the others."""
    blocked = {
        finding.node
        for finding in nodes.findings
        if finding.check == "storage" and finding.status == "problem"
    }
    able = _Nodes(node for node in nodes.nodes if node.name not in blocked)
    if request.run is None or len(able.nodes) < 2:
        return
    run = request.run
    # A node that cannot write there is reported by the call, and left out.
    paths = able.call("storage", place_probe, lambda _: (run,))
    writers = able.nodes
    results = able.call("storage", read_probes, lambda _: (paths,))
    able.nodes = writers
    able.call("storage", remove_probes)
    able.add("storage", compare_probes(run, results))
    nodes.findings += able.findings


def place_probe(run: str) -> str:
    """Write a file with its name as content in `run`, or where it will be created; returns its
    path. It is locked until `remove_probes`.
    """
    name = f"{PROBE_PREFIX}{socket.gethostname()}-{uuid.uuid4().hex}.tmp"
    path = existing_parent(Path(run)) / name
    write_file(path, name.encode())
    file = path.open("rb+")
    _held[path] = file
    try_lock(file.fileno())
    return str(path)


def read_probes(paths: Mapping[str, str]) -> dict[str, ProbeResult]:
    """Node -> how this node sees the file of that node; `paths` are those of the files."""
    deadline = time.monotonic() + SHARED_WAIT_SECONDS
    while True:
        results = {node: _read_probe(Path(path)) for node, path in paths.items()}
        if not UNSEEN & set(results.values()) or time.monotonic() > deadline:
            return results
        time.sleep(_POLL_SECONDS)
        for directory in {Path(path).parent for path in paths.values()}:
            with suppress(OSError):
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


def compare_probes(run: str, results: Mapping[str, Mapping[str, ProbeResult]]) -> list[Finding]:
    """Whether the nodes see one directory; `results` is node -> node that wrote -> what it saw."""
    findings = []
    for node, seen in results.items():
        unseen = [writer for writer, result in seen.items() if result in UNSEEN]
        if unseen:
            more = f" and {len(unseen) - 3} more" if len(unseen) > 3 else ""
            hidden = problem(
                f"{run}: files that {', '.join(unseen[:3])}{more} wrote are not seen",
                expected="one directory that all nodes share",
                advice="mount the same file system at this path on all nodes, and choose a run "
                "directory on it",
            )
            findings.append(replace(hidden, node=node))
    if findings or len(results) < 2:
        return findings
    together = ok(f"{run}: every node sees the files of the others")
    if any(result == "lock not seen" for seen in results.values() for result in seen.values()):
        together = note(
            f"{run}: a lock of one node is not seen by others",
            expected="locks that are valid on all nodes, which refuse a second run",
            advice="mount with locks (NFS: without nolock or local_lock; Lustre: flock), or make "
            "sure that no directory is used by two runs",
        )
    return [replace(together, node=ALL_NODES)]


# --- connections ----------------------------------------------------------------------------------


def _check_links(nodes: _Nodes) -> None:
    """Connections between all nodes."""
    if len(nodes.nodes) < 2:
        return
    addresses = nodes.call("network", listen, lambda node: (node.host,))
    failures = nodes.call("network", unreachable, lambda _: (addresses,))
    nodes.add("network", judge_connections(failures))


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
