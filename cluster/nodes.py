"""Nodes of a Ray cluster: what ranks reserve there, what is free and alive, and `txl doctor`.

    check_cluster_nodes -> check_this_machine (a task on each node) -> findings of each node
                        -> comparisons of all nodes: versions, files of the run directory

A task of the doctor reserves no CPU and no GPU, so a busy cluster can be checked. Every call has a
time limit; a node that does not answer is named, and left out of the comparisons.
"""

import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Self, TypeVar

from cluster.connection import HEAD_SECONDS, ray_connection, responds
from data_pipeline.errors import counted
from data_pipeline.system.files import write_file
from txl_dist.errors import ConfigError, TxlError
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
from txl_dist.runtime.process import usable_cores

Node = Mapping[str, Any]
"""An entry of `ray.nodes()`."""
Resource = Literal["GPU", "CPU"]


def live_nodes() -> list[Node]:
    import ray

    return [node for node in ray.nodes() if node["Alive"]]


def choose_resource(gpus_per_rank: int | None, nodes: Sequence[Node], num_ranks: int) -> Resource:
    """What each rank or worker reserves: a GPU if `nodes` have any, or a CPU.

    `gpus_per_rank` is that of `RayConfig`. If it is 1, Ray waits for nodes that have GPUs; if it is
    None, raises ConfigError if `nodes` have some GPUs, but too few.
    """
    if gpus_per_rank is not None:
        return "GPU" if gpus_per_rank else "CPU"
    num_gpus = int(sum(node["Resources"].get("GPU", 0) for node in nodes))
    if 0 < num_gpus < num_ranks:
        raise ConfigError(
            f"{num_ranks} ranks or workers need a GPU each, and Ray has {num_gpus}. Start at most "
            f"{num_gpus}, or use CPUs: ray.gpus_per_rank=0, or CUDA_VISIBLE_DEVICES= before the "
            "command. If more nodes of a cluster are about to start: ray.gpus_per_rank=1"
        )
    return "GPU" if num_gpus else "CPU"


POLL_SECONDS = 2.0
SUSPENDED_SECONDS = 10.0
"""A caller that has not asked for this long was suspended (Ctrl-Z, or the whole machine)."""


@dataclass(frozen=True)
class ClusterState:
    """The state of a cluster at one time."""

    node_ids: frozenset[str]
    """Nodes that are alive."""
    total: float
    """CPUs of the cluster, or GPUs if the ranks use GPUs."""
    free: float
    num_free_slots: int = 0
    """How many more ranks could start now, on nodes that are not draining."""
    deadlines: Mapping[str, float | None] = field(default_factory=dict)
    """Nodes that are draining, because they are preempted or shut down: seconds that were left
    when this state was read; None if the time is not known."""


class ClusterMonitor:
    """Polls the cluster while the context is open. Open it while connected to Ray.

    A thread asks Ray, because the calls may never return. The main thread reads the newest result
    and stays free to handle signals.
    """

    def __init__(self, resource: Resource) -> None:
        """`resource`: what each rank or worker reserves one of."""
        import ray

        self.resource = resource
        self.state: ClusterState | None = None
        self.head = str(ray.get_runtime_context().gcs_address)
        self._last_response = self._last_question = time.monotonic()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._poll, name="cluster-monitor", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(5.0)

    @property
    def is_head_lost(self) -> bool:
        """Whether the head node has not responded for HEAD_SECONDS. For callers that poll: time for
        which the whole process was suspended does not count.
        """
        now = time.monotonic()
        if now - self._last_question > SUSPENDED_SECONDS:
            self._last_response = now
        self._last_question = now
        return now - self._last_response > HEAD_SECONDS

    def lost_head_error(self, advice: str) -> TxlError:
        """The error for a head node that does not respond; `advice` says how to continue."""
        return TxlError(
            f"the head of the Ray cluster at {self.head} does not respond: its node or network "
            f"failed, which ends the processes of all nodes. Start the cluster again. {advice}"
        )

    def describe_wait(self, num: int, name: str) -> str:
        """`CPUs: 2 ranks need one each, the cluster has 1, of which 0 are free`.

        `num`: how many more of `name` (`rank`, `worker`) have to start.
        """
        if self.state is None:
            return "Ray's list of nodes"
        needs = "needs one" if num == 1 else "need one each"
        return (
            f"{self.resource}s: {counted(num, name)} {needs}, the cluster has "
            f"{self.state.total:g}, of which {self.state.free:g} are free"
        )

    def _poll(self) -> None:
        import ray

        while True:
            if responds(self.head):
                self._last_response = time.monotonic()
                # If the head died after it responded, the state stays.
                with suppress(ray.exceptions.RayError, RuntimeError):
                    self.state = _read_state(self.resource)
            if self._stop.wait(POLL_SECONDS):
                return


def _read_state(resource: Resource) -> ClusterState:
    import ray

    # Ray 2.60 has no public function for this one and `get_draining_nodes`. Ray Train's preemption
    # watcher uses the second.
    free_by_node = ray._private.state.available_resources_per_node()
    deadlines_ms: dict[str, int] = ray._private.state.state.get_draining_nodes()
    nodes, now = live_nodes(), time.time()
    # A node that is listed, but has no free resources yet, has just joined.
    free = {
        node["NodeID"]: free_by_node.get(node["NodeID"], {}).get(resource, 0.0) for node in nodes
    }
    return ClusterState(
        node_ids=frozenset(free),
        total=sum(node["Resources"].get(resource, 0.0) for node in nodes),
        free=sum(free.values()),
        num_free_slots=sum(int(free[node_id]) for node_id in free.keys() - deadlines_ms.keys()),
        deadlines={
            node_id: max(0.0, deadline_ms / 1000 - now) if deadline_ms else None
            for node_id, deadline_ms in deadlines_ms.items()
        },
    )


# --- txl doctor -----------------------------------------------------------------------------------

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
    Path(path).unlink(missing_ok=True)


class _Nodes:
    """The live nodes of the connected cluster, and the findings about calls that failed."""

    def __init__(self) -> None:
        import ray

        # That of this process first, as in the comparison of versions: Ray's order is any.
        own = ray.get_runtime_context().get_node_id()
        nodes = sorted(live_nodes(), key=lambda node: node["NodeID"] != own)
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
    with ray_connection(address, num_cpus=usable_cores()):
        import ray

        url = ray._private.worker.get_dashboard_url() or ""
        if (port := url.rpartition(":")[2]).isdigit():
            request = replace(request, dashboard_port=int(port))
        nodes = _Nodes()
        # This machine first: in a comparison of two, it is the reference.
        versions = {} if "versions" in request.skip else {"versions": check_versions}
        findings = run_checks(versions, node="this machine")
        # The ranks use the addresses by which Ray has connected the nodes (rank_group.py).
        request = replace(request, skip=request.skip | {"network"})
        checked = nodes.call("versions", check_this_machine, request, on=nodes.ids)
        findings += [replace(each, node=node) for node, found in checked.items() for each in found]
        findings += compare_nodes(findings)
        bad = {
            each.node for each in findings if (each.check, each.status) == ("storage", "problem")
        }
        able = [name for name in checked if name not in bad]
        if request.run is not None and "storage" not in request.skip and len(able) > 1:
            findings += _shared_findings(nodes, request.run, able)
        return [*findings, *nodes.failures]


def _shared_findings(nodes: _Nodes, run: str, names: Sequence[str]) -> Iterator[Finding]:
    """Yield whether the other nodes see a file that the first one writes where the run will be."""
    writer, *readers = names
    for path in nodes.call("storage", write_probe, run, on=[writer]).values():
        views = nodes.call("storage", sees_probe, path, on=readers)
        for node, is_seen in views.items():
            if is_seen:
                found = f"a file that {writer} wrote is seen"
                yield Finding("ok", found, check="storage", node=node)
            else:
                yield Finding(
                    "problem",
                    f"a file that {writer} wrote is not seen",
                    "one directory that all nodes share",
                    "mount the same file system at this path on all nodes, and choose a run "
                    "directory on it",
                    "storage",
                    node,
                )
        nodes.call("storage", remove_probe, path, on=[writer])


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
