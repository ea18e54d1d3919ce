"""`txl doctor --on ADDRESS`: the checks of every node of a Ray cluster, and between nodes.

    check_cluster_nodes -> NodeProbe (one actor per node) -> findings of each node
                        -> comparisons of all nodes: shared files, dataset, network

An actor reserves no CPU and no GPU, so a busy cluster can be checked. Every call has a time limit;
a node that does not answer is named, and left out of the comparisons.
"""

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from cluster.connection import ray_connection
from txl_dist.doctor.checks import DoctorRequest, check_this_machine, installed_versions
from txl_dist.doctor.finding import Finding, failed_check, no_result
from txl_dist.doctor.nodes import (
    ALL_NODES,
    compare_probes,
    compare_values,
    judge_connections,
    listen,
    place_probe,
    read_probes,
    remove_probes,
    unreachable,
)
from txl_dist.doctor.services import check_token, existing_parent

DRIVER = "this machine"
"""The node of findings about the machine of the command, in its role as the driver."""
START_SECONDS = 60.0
"""Time limit for the start of a process on a node, imports included."""

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
        limit_seconds: float,
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
            expected_versions=tuple(installed_versions().items()),
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
                _check_links(nodes, request)
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
        expected_versions=(),
        versions_of="constraints.txt",
        skip=request.skip | {"devices", "tracking", "exposure"},
    )
    nodes.findings += check_this_machine(own, node=DRIVER)
    if "exposure" not in request.skip:
        import ray

        nodes.add("exposure", [check_token(ray.get_runtime_context().gcs_address)], ALL_NODES)


def _check_each(nodes: _Nodes, request: DoctorRequest) -> None:
    limit_seconds = START_SECONDS + request.limit_seconds
    results = nodes.call(
        "versions",
        _check_node,
        lambda node: (request, node.name),
        limit_seconds=limit_seconds,
    )
    findings = [finding for found in results.values() for finding in found]
    nodes.findings += [*findings, *compare_values(findings)]


def _check_node(request: DoctorRequest, node: str) -> list[Finding]:
    return check_this_machine(request, node=node)


# --- shared files ---------------------------------------------------------------------------------


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
    run, limit_seconds = request.run, request.limit_seconds
    first = _Nodes(able.nodes[:1])
    parents = first.call("storage", _existing_parent, lambda _: (run,), limit_seconds=limit_seconds)
    nodes.findings += first.findings
    if not parents:
        return
    # A node on which it does not exist is reported by the call, and left out.
    (directory,) = parents.values()
    names = able.call("storage", place_probe, lambda _: (directory,), limit_seconds=limit_seconds)
    writers = list(able.nodes)
    results = able.call(
        "storage", read_probes, lambda _: (directory, names), limit_seconds=limit_seconds
    )
    able.nodes = writers
    able.call("storage", remove_probes, limit_seconds=limit_seconds)
    able.add("storage", compare_probes(directory, results))
    nodes.findings += able.findings


def _existing_parent(run: str) -> str:
    return str(existing_parent(Path(run)))


# --- connections ----------------------------------------------------------------------------------


def _check_links(nodes: _Nodes, request: DoctorRequest) -> None:
    """Connections between all nodes."""
    if len(nodes.nodes) < 2:
        return
    limit = request.limit_seconds
    addresses = nodes.call("network", listen, lambda node: (node.host,), limit_seconds=limit)
    failures = nodes.call("network", unreachable, lambda _: (addresses,), limit_seconds=limit)
    nodes.add("network", judge_connections(failures))
