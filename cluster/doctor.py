"""`txl doctor --on ADDRESS`: the checks of every node of a Ray cluster, and between nodes.

    check_cluster_nodes -> NodeProbe (one actor per node) -> findings of each node
                        -> comparisons of all nodes: versions, dataset, files of the run directory

An actor reserves no CPU and no GPU, so a busy cluster can be checked. Every call has a time limit;
a node that does not answer is named, and left out of the comparisons.
"""

import os
import socket
import time
import uuid
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from cluster.connection import ray_connection
from data_pipeline.system.files import try_lock, write_file
from txl_dist.doctor.checks import (
    LOCKS,
    MOUNT_LOCKS,
    PROBE_PREFIX,
    SAME_SOURCES,
    DoctorRequest,
    check_this_machine,
    existing_parent,
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

DRIVER = "this machine"
"""The node of findings about the machine of the command."""
START_SECONDS = 60.0
"""Time limit for the start of a process on a node, imports included."""
SHARED_WAIT_SECONDS = 10.0
"""NFS clients cache attributes for some seconds, so a new file may appear late on other nodes."""
_POLL_SECONDS = 0.2

View = Literal["seen", "not seen", "lock not seen"]
"""How one node sees the file of another."""


class NodeProbe:
    """An actor on one node."""

    def check(self, request: DoctorRequest, node: str) -> list[Finding]:
        """Run the checks of one node."""
        return check_this_machine(request, node)

    def write(self, run: str) -> str:
        """Write and lock a file where `run` is or will be created; return its path."""
        name = f"{PROBE_PREFIX}{socket.gethostname()}-{uuid.uuid4().hex}.tmp"
        self._path = existing_parent(Path(run)) / name
        write_file(self._path, name.encode())
        self._file = self._path.open("rb+")
        try_lock(self._file.fileno())
        return str(self._path)

    def view(self, path: str) -> View:
        """Say how this node sees the file that another node has written."""
        deadline = time.monotonic() + SHARED_WAIT_SECONDS
        while (view := _view(Path(path))) == "not seen" and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
            with suppress(OSError):
                os.scandir(Path(path).parent).close()  # an NFS client reads the directory again
        return view

    def remove(self) -> None:
        """Release and remove the file of `write`."""
        self._file.close()
        self._path.unlink(missing_ok=True)


def _view(path: Path) -> View:
    try:
        with path.open("rb+") as file:
            if file.read() != path.name.encode():
                return "not seen"  # a file of another file system
            # The other process holds the lock, so it must not be free here.
            return "lock not seen" if try_lock(file.fileno()) else "seen"
    except OSError:
        return "not seen"


class _Nodes:
    """The actors of the nodes that answer, and the findings about calls that failed."""

    def __init__(self) -> None:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        alive = [
            (node["NodeManagerAddress"], node["NodeID"]) for node in ray.nodes() if node["Alive"]
        ]
        hosts = [host for host, _ in alive]
        remote = ray.remote(num_cpus=0, max_restarts=0)(NodeProbe)
        self.hosts: dict[str, str] = {}
        """By the name for findings: the address, and the id where nodes share an address."""
        self.actors: dict[str, Any] = {}
        for host, node_id in sorted(alive):
            name = host if hosts.count(host) == 1 else f"{host} (node {node_id[:8]})"
            strategy = NodeAffinitySchedulingStrategy(node_id, soft=False)
            self.hosts[name] = host
            self.actors[name] = remote.options(scheduling_strategy=strategy).remote()
        self.findings: list[Finding] = []

    def call(
        self,
        check: str,
        method: str,
        arguments: Mapping[str, tuple[Any, ...]],
        *,
        limit_seconds: float = LIMIT_SECONDS,
    ) -> dict[str, Any]:
        """Node -> result of the method there. `arguments` has the nodes; failed ones are named."""
        import ray

        calls = {
            getattr(self.actors[name], method).remote(*words): name
            for name, words in arguments.items()
        }
        ready, _ = ray.wait(list(calls), num_returns=len(calls), timeout=limit_seconds)
        results = {}
        for reference, name in calls.items():
            try:
                if reference in ready:
                    results[name] = ray.get(reference)
                    continue
                finding = no_result(limit_seconds)
            except ray.exceptions.RayError as error:
                finding = failed_check(getattr(error, "cause", None) or error)
            self.findings.append(replace(finding, check=check, node=name))
        return results


def check_cluster_nodes(request: DoctorRequest, *, address: str | None) -> list[Finding]:
    """Return all findings about a cluster. `address` None: a private Ray on this machine.

    Raises ConfigError if there is no cluster at `address`.
    """
    with ray_connection(address, num_cpus=os.cpu_count() or 1):
        import ray

        url = ray._private.worker.get_dashboard_url() or ""
        if (port := url.rpartition(":")[2]).isdigit():
            ports = dict.fromkeys([*request.dashboard_ports, int(port)])
            request = replace(request, dashboard_ports=tuple(ports))
        nodes = _Nodes()
        try:
            return _check(nodes, request)
        finally:
            for actor in nodes.actors.values():
                ray.kill(actor)


def _check(nodes: _Nodes, request: DoctorRequest) -> list[Finding]:
    # The driver first: in a comparison of two, it is the reference.
    others = frozenset({"devices", "tracking", "exposure"})
    driver = replace(request, run=None, data=None, skip=request.skip | others)
    checked = nodes.call(
        "versions",
        "check",
        {name: (request, name) for name in nodes.actors},
        limit_seconds=START_SECONDS + LIMIT_SECONDS,
    )
    findings = check_this_machine(driver, DRIVER)
    findings += [finding for found in checked.values() for finding in found]
    findings += compare_nodes(findings)
    bad = {each.node for each in findings if (each.check, each.status) == ("storage", "problem")}
    able = [name for name in checked if name not in bad]
    if request.run is not None and "storage" not in request.skip and len(able) > 1:
        writer, *readers = able
        written = nodes.call("storage", "write", {writer: (request.run,)})
        for path in written.values():
            views = nodes.call("storage", "view", dict.fromkeys(readers, (path,)))
            findings += compare_views(request.run, writer, views)
        nodes.call("storage", "remove", dict.fromkeys(written, ()))
    return [*findings, *nodes.findings]


def compare_nodes(findings: Sequence[Finding]) -> Iterator[Finding]:
    """Yield a problem for every node that differs from most nodes in what must be the same."""
    for check in dict.fromkeys(finding.check for finding in findings if finding.same_on_all):
        reports = [each for each in findings if each.check == check and each.same_on_all]
        most, _ = Counter(each.same_on_all for each in reports).most_common(1)[0]
        example = next(each for each in reports if each.same_on_all == most)
        for report in reports:
            if report.same_on_all != most:
                own, expected = set(report.same_on_all), set(most)
                different = problem(
                    ", ".join(fact for fact in report.same_on_all if fact not in expected),
                    expected=f"as on node {example.node}: "
                    + ", ".join(fact for fact in most if fact not in own),
                    advice=SAME_SOURCES
                    if check == "versions"
                    else "make both nodes see the same directory, or copy the newer one there",
                )
                yield replace(different, check=check, node=report.node)


def compare_views(run: str, writer: str, views: Mapping[str, View]) -> Iterator[Finding]:
    """Say whether the nodes share a directory; `views` are those of a file that `writer` wrote."""
    findings: dict[View, Finding] = {
        "not seen": problem(
            f"{run}: a file that {writer} wrote is not seen",
            expected="one directory that all nodes share",
            advice="mount the same file system at this path on all nodes, and choose a run "
            "directory on it",
        ),
        "lock not seen": note(
            f"{run}: a lock of {writer} is not seen", expected=LOCKS, advice=MOUNT_LOCKS
        ),
        "seen": ok(f"{run}: files and locks of {writer} are seen"),
    }
    for node, view in views.items():
        yield replace(findings[view], check="storage", node=node)
