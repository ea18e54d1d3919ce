"""`txl doctor --on ADDRESS`: the checks of every node of a Ray cluster, and between nodes.

    check_cluster_nodes -> check_this_machine (a task on each node) -> findings of each node
                        -> comparisons of all nodes: versions, files of the run directory

A task reserves no CPU and no GPU, so a busy cluster can be checked. Every call has a time limit;
a node that does not answer is named, and left out of the comparisons.
"""

import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from cluster.connection import ray_connection
from cluster.nodes import live_nodes
from data_pipeline.system.files import write_file
from txl_dist.launch.doctor import (
    LIMIT_SECONDS,
    SAME_SOURCES,
    DoctorRequest,
    Finding,
    check_this_machine,
    check_versions,
    failed_check,
    new_probe,
    run_checks,
    without_builds,
)

R = TypeVar("R")
START_SECONDS = 60.0
"""Time limit for the start of a process on a node, imports included."""
SHARED_WAIT_SECONDS = 10.0
"""NFS clients cache attributes for some seconds, so a new file may appear late on other nodes."""


def write_probe(run: str) -> str:
    """Write a file where `run` is or will be created; return its path."""
    path = new_probe(run)
    write_file(path, path.name.encode())
    return str(path)


def sees_probe(path: str) -> bool:
    """Say whether this node sees the file that another node has written."""
    deadline = time.monotonic() + SHARED_WAIT_SECONDS
    while time.monotonic() <= deadline:
        with suppress(OSError):
            if Path(path).read_bytes() == Path(path).name.encode():
                return True  # else a file of another file system
        time.sleep(0.2)
        with suppress(OSError):
            os.scandir(Path(path).parent).close()  # an NFS client reads the directory again
    return False


def remove_probe(path: str) -> None:
    """Remove the file of `write_probe`."""
    Path(path).unlink(missing_ok=True)


class _Nodes:
    """The live nodes of the connected cluster, and the findings about calls that failed."""

    def __init__(self) -> None:
        nodes = live_nodes()
        hosts = Counter(node["NodeManagerAddress"] for node in nodes)
        self.ids: dict[str, str] = {}
        """By name: the address, unless several nodes have it."""
        for node in nodes:
            host, node_id = node["NodeManagerAddress"], node["NodeID"]
            self.ids[host if hosts[host] == 1 else f"{host} (node {node_id[:8]})"] = node_id
        self.failures: list[Finding] = []

    def call(
        self, check: str, function: Callable[..., R], *arguments: Any, on: Iterable[str]
    ) -> dict[str, R]:
        """Node -> result of the function there, for those of the nodes `on` that have one."""
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        remote = ray.remote(num_cpus=0, max_retries=0)(function)
        calls = {}
        for name in on:
            strategy = NodeAffinitySchedulingStrategy(self.ids[name], soft=False)
            calls[name] = remote.options(scheduling_strategy=strategy).remote(*arguments)
        deadline = time.monotonic() + START_SECONDS + LIMIT_SECONDS
        results = {}
        for name, call in calls.items():
            try:
                results[name] = ray.get(call, timeout=max(0.1, deadline - time.monotonic()))
            except ray.exceptions.RayError as error:
                failure = failed_check(getattr(error, "cause", None) or error)
                self.failures.append(replace(failure, check=check, node=name))
        return results


def check_cluster_nodes(request: DoctorRequest, *, address: str | None) -> list[Finding]:
    """Return all findings about a cluster. `address` None: a private Ray on this machine.

    Raises ConfigError if there is no cluster at `address`.
    """
    with ray_connection(address, num_cpus=os.cpu_count() or 1):
        import ray

        url = ray._private.worker.get_dashboard_url() or ""
        if (port := url.rpartition(":")[2]).isdigit():
            request = replace(request, dashboard_port=int(port))
        nodes = _Nodes()
        return [*_check(nodes, request), *nodes.failures]


def _check(nodes: _Nodes, request: DoctorRequest) -> list[Finding]:
    # This machine first: in a comparison of two, it is the reference.
    versions = {} if "versions" in request.skip else {"versions": check_versions}
    findings = run_checks(versions, node="this machine")
    # The ranks use the addresses by which Ray has connected the nodes (cluster/nodes.py).
    request = replace(request, skip=request.skip | {"network"})
    checked = nodes.call("versions", check_this_machine, request, on=nodes.ids)
    findings += [replace(each, node=node) for node, found in checked.items() for each in found]
    findings += compare_nodes(findings)
    bad = {each.node for each in findings if (each.check, each.status) == ("storage", "problem")}
    able = [name for name in checked if name not in bad]
    if request.run is not None and "storage" not in request.skip and len(able) > 1:
        writer, *readers = able
        for path in nodes.call("storage", write_probe, request.run, on=[writer]).values():
            views = nodes.call("storage", sees_probe, path, on=readers)
            findings += [replace(of_view(writer, seen), node=node) for node, seen in views.items()]
            nodes.call("storage", remove_probe, path, on=[writer])
    return findings


def compare_nodes(findings: Sequence[Finding]) -> Iterator[Finding]:
    """Yield a problem for every node whose versions differ from those of most nodes."""
    facts = {
        each.node: tuple(without_builds(each.found).split(", "))
        for each in findings
        if (each.check, each.status) == ("versions", "ok")
    }
    for node, own in facts.items():
        ((expected, _),) = Counter(facts.values()).most_common(1)  # of several, the first
        if own != expected:
            example = next(node for node, known in facts.items() if known == expected)
            yield Finding(
                "problem",
                ", ".join(fact for fact in own if fact not in expected),
                f"as on {example}: " + ", ".join(fact for fact in expected if fact not in own),
                SAME_SOURCES,
                "versions",
                node,
            )


def of_view(writer: str, is_seen: bool) -> Finding:
    """Say whether a node shares the run directory with the node `writer`."""
    if is_seen:
        return Finding("ok", f"a file that {writer} wrote is seen", check="storage")
    return Finding(
        "problem",
        f"a file that {writer} wrote is not seen",
        expected="one directory that all nodes share",
        advice="mount the same file system at this path on all nodes, and choose a run directory "
        "on it",
        check="storage",
    )
