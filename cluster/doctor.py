"""`txl doctor --on ADDRESS`: the checks of every node of a Ray cluster, and between nodes.

    check_cluster_nodes -> NodeProbe (one actor per node) -> findings of each node
                        -> comparisons of all nodes: shared files, dataset, clock, network

An actor reserves no CPU and no GPU, so a busy cluster can be checked. Every call has a time limit;
a node that does not answer is named, and left out of the comparisons.
"""

import os
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from cluster.connection import ray_connection
from cluster.nodes import use_interface_of
from txl_dist.doctor.checks import DoctorRequest, check_this_machine, installed_versions
from txl_dist.doctor.finding import Finding, failed_check, no_result, problem
from txl_dist.doctor.nodes import (
    ALL_NODES,
    ClockReading,
    ConnectionServer,
    NetworkSpeed,
    compare_clocks,
    compare_probes,
    compare_values,
    describe_network,
    judge_connections,
    measure_network,
    open_store,
    unreachable,
)
from txl_dist.doctor.services import check_token
from txl_dist.doctor.storage import ProbeResult, SharedProbe, existing_parent

DRIVER = "this machine"
"""The node of findings about the machine of the command, in its role as the driver."""
START_SECONDS = 60.0
"""Time limit for the start of a process on a node, imports included."""
NETWORK_SECONDS = 60.0
"""Time limit for the rendezvous of the nodes, and for one collective."""
_CLOCK_READINGS = 5

R = TypeVar("R")


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
        self, check: str, call: Callable[[_Node], Any], *, limit_seconds: float
    ) -> dict[str, Any]:
        """Node name -> result of `call(node)`, an object reference. Failed nodes are reported."""
        import ray

        calls = {call(node): node for node in self.nodes}
        ready, _ = ray.wait(list(calls), num_returns=len(calls), timeout=limit_seconds)
        results = {}
        for reference, node in calls.items():
            if reference not in ready:
                self.report(check, node.name, no_result(limit_seconds))
                continue
            try:
                results[node.name] = ray.get(reference)
            except ray.exceptions.RayError as error:
                cause = getattr(error, "cause", None) or error
                self.report(check, node.name, failed_check(cause))
        return results

    def keep(self, names: Iterable[str]) -> None:
        """Leave out all other nodes from now on."""
        kept = set(names)
        self.nodes = [node for node in self.nodes if node.name in kept]

    def report(self, check: str, node: str, finding: Finding) -> None:
        self.findings.append(replace(finding, check=check, node=node))

    def add(self, check: str, findings: Iterable[Finding]) -> None:
        self.findings += [replace(finding, check=check) for finding in findings]


def check_cluster_nodes(request: DoctorRequest, *, address: str | None) -> list[Finding]:
    """All findings about a cluster. `address` None: a private Ray on this machine.

    Raises ConfigError if there is no cluster at `address`.
    """
    with ray_connection(address, num_cpus=os.cpu_count() or 1):
        import ray

        request = replace(
            request,
            expected_versions=tuple(installed_versions().items()),
            versions_of=DRIVER,
            dashboard_ports=_dashboard_ports(request.dashboard_ports),
        )
        nodes = _start_probes()
        actors = [node.actor for node in nodes.nodes]
        try:
            _check_driver(nodes, request)
            _check_each(nodes, request)
            checks = {
                "storage": _check_shared_files,
                "clock": _check_clocks,
                "network": _check_links,
            }
            for name, check in checks.items():
                if nodes.nodes and name not in request.skip:
                    check(nodes, request)
        finally:
            for actor in actors:
                ray.kill(actor)
    return nodes.findings


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
        expected_versions=(),
        versions_of="constraints.txt",
        skip=request.skip | {"devices", "tracking", "exposure"},
    )
    nodes.findings += check_this_machine(own, node=DRIVER)
    if "exposure" not in request.skip:
        import ray

        head = ray.get_runtime_context().gcs_address
        nodes.add("exposure", (replace(one, node=ALL_NODES) for one in check_token(head)))


def _check_each(nodes: _Nodes, request: DoctorRequest) -> None:
    results = nodes.call(
        "versions",
        lambda node: node.actor.call.remote(_check_node, request, node.name),
        limit_seconds=START_SECONDS + request.limit_seconds,
    )
    findings = [finding for found in results.values() for finding in found]
    nodes.findings += [*findings, *compare_values(findings)]
    nodes.keep(results)


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
    run, limit = request.run, {"limit_seconds": request.limit_seconds}
    first = able.nodes[0]
    directories = able.call(
        "storage", lambda node: node.actor.call.remote(_existing_parent, run), **limit
    )
    directory = directories.get(first.name, run)
    for name, other in directories.items():
        if other != directory:
            able.report("storage", name, _other_directory(run, first.name, directory, other))
            able.keep({one.name for one in able.nodes} - {name})
    writers = list(able.nodes)
    names = able.call("storage", lambda node: node.actor.place_file.remote(directory), **limit)
    able.keep(names)
    results = able.call(
        "storage", lambda node: node.actor.call.remote(_read_probes, directory, names), **limit
    )
    able.nodes = writers
    able.call("storage", lambda node: node.actor.remove_file.remote(), **limit)
    able.add("storage", compare_probes(directory, results))
    nodes.findings += able.findings


def _other_directory(run: str, first: str, directory: str, other: str) -> Finding:
    return problem(
        f"{run}: its nearest existing parent is {other}",
        expected=f"{directory}, as on {first}",
        advice="mount the file system of the run directory on this node",
    )


def _check_clocks(nodes: _Nodes, request: DoctorRequest) -> None:
    import ray

    readings = {DRIVER: ClockReading(0.0, 0.0)}
    for node in nodes.nodes:
        measured = []
        for _ in range(_CLOCK_READINGS):
            begin = time.time()
            try:
                seconds = ray.get(node.actor.call.remote(time.time), timeout=request.limit_seconds)
            except ray.exceptions.RayError as error:
                nodes.report("clock", node.name, failed_check(error))
                break
            half = (time.time() - begin) / 2
            measured.append(ClockReading(seconds - begin - half, half))
        if measured:
            readings[node.name] = min(measured, key=lambda one: one.uncertainty_seconds)
    nodes.add("clock", compare_clocks(readings))


def _check_links(nodes: _Nodes, request: DoctorRequest) -> None:
    """Connections between all nodes; if all work, bandwidth and latency."""
    import ray

    if len(nodes.nodes) < 2:
        return
    limit = request.limit_seconds
    addresses = nodes.call(
        "network", lambda node: node.actor.listen.remote(node.host), limit_seconds=limit
    )
    nodes.keep(addresses)
    failures = nodes.call(
        "network", lambda node: node.actor.call.remote(unreachable, addresses), limit_seconds=limit
    )
    nodes.add("network", judge_connections(failures))
    if any(failures.values()) or len(failures) < len(nodes.nodes):
        return
    gpus = nodes.call("network", lambda node: node.actor.call.remote(_has_gpu), limit_seconds=limit)
    backend = "nccl" if all(gpus.values()) else "gloo"
    first, num_nodes = nodes.nodes[0], len(nodes.nodes)
    try:
        port = ray.get(first.actor.open_store.remote(first.host, num_nodes), timeout=limit)
    except ray.exceptions.RayError as error:
        nodes.report("network", first.name, failed_check(error))
        return
    ranks = {node.name: rank for rank, node in enumerate(nodes.nodes)}
    speeds = nodes.call(
        "network",
        lambda node: node.actor.measure.remote(
            ranks[node.name], num_nodes, node.host, (first.host, port), backend
        ),
        limit_seconds=2 * NETWORK_SECONDS,
    )
    if len(speeds) == num_nodes:
        nodes.add("network", [describe_network(num_nodes, speeds[first.name])])


class NodeProbe:
    """An actor on one node: calls functions there, and keeps what has to stay open."""

    def call(self, function: Callable[..., R], *arguments: Any) -> R:
        return function(*arguments)

    def place_file(self, directory: str) -> str:
        """Write and lock a file; returns its name."""
        self._probe = SharedProbe(directory)
        return self._probe.place()

    def remove_file(self) -> None:
        """Remove what `place_file` wrote."""
        self._probe.remove()

    def listen(self, host: str) -> tuple[str, int]:
        """Accept connections; returns the address."""
        self._server = ConnectionServer(host)
        return self._server.address

    def open_store(self, host: str, num_nodes: int) -> int:
        """Of the first node: open the store of the process group; returns its port."""
        self._store = open_store(host, 0, num_nodes, is_first=True, limit_seconds=NETWORK_SECONDS)
        return int(self._store.port)

    def measure(
        self, rank: int, num_nodes: int, own_host: str, store: tuple[str, int], backend: str
    ) -> NetworkSpeed:
        """Measure the network together with the other nodes."""
        use_interface_of(own_host)
        if rank:
            self._store = open_store(
                *store, num_nodes, is_first=False, limit_seconds=NETWORK_SECONDS
            )
        return measure_network(
            rank, num_nodes, self._store, backend=backend, limit_seconds=NETWORK_SECONDS
        )


def _check_node(request: DoctorRequest, node: str) -> list[Finding]:
    return check_this_machine(request, node=node)


def _existing_parent(run: str) -> str:
    return str(existing_parent(Path(run)))


def _read_probes(directory: str, names: Mapping[str, str]) -> dict[str, ProbeResult]:
    return SharedProbe(directory).read(names)


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def _dashboard_ports(ports: Iterable[int]) -> tuple[int, ...]:
    """`ports` and the port of the connected cluster's dashboard."""
    import ray

    url = ray._private.worker.get_dashboard_url() or ""
    number = url.rpartition(":")[2]
    return tuple(dict.fromkeys([*ports, *([int(number)] if number.isdigit() else [])]))
