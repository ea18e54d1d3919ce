"""Which resources and nodes ranks get, whether the head responds, the interface for NCCL."""

import os
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import ray

from cluster import nodes as module
from cluster.connection import HEAD_SECONDS
from cluster.nodes import ClusterMonitor, ClusterState, choose_resource
from cluster.rank_group import (
    INTERFACE_VARIABLES,
    RankActor,
    RankLocation,
    interface_of,
    num_threads,
    use_interface_of,
)
from tests.support.training_runs import tiny_spec
from txl_dist.errors import ConfigError


def node(name: str, **resources: float) -> dict[str, Any]:
    return {"NodeID": name, "Resources": {"CPU": 8.0, **resources}}


HEAD_NODE = node("head")
GPU_NODES = [node("a", GPU=8.0), node("b", GPU=8.0)]


def test_by_default_a_rank_gets_a_gpu_if_there_are_some_else_a_cpu() -> None:
    assert choose_resource(None, [HEAD_NODE, *GPU_NODES], 16) == "GPU"
    assert choose_resource(None, [HEAD_NODE], 2) == "CPU"


def test_too_few_gpus_are_refused_unless_the_config_asks_for_them() -> None:
    with pytest.raises(ConfigError, match=r"17 ranks or workers need a GPU each, and Ray has 16"):
        choose_resource(None, GPU_NODES, 17)
    assert choose_resource(1, [HEAD_NODE], 17) == "GPU"
    assert choose_resource(0, GPU_NODES, 17) == "CPU"


def test_threads_share_the_cpus_that_the_node_offers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: range(96))
    assert num_threads(ranks_on_node=8, ray_cpus=96.0) == 12
    assert num_threads(ranks_on_node=2, ray_cpus=8.0) == 4  # a container
    assert num_threads(ranks_on_node=2, ray_cpus=0.0) == 48
    assert num_threads(ranks_on_node=128, ray_cpus=200.0) == 1


class Clock:
    """Replaces the module `time`."""

    now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def monitor(monkeypatch: pytest.MonkeyPatch) -> ClusterMonitor:
    """Its thread is not started: the head never responds."""
    context = SimpleNamespace(gcs_address="127.0.0.1:1", get_node_id=lambda: "node")
    monkeypatch.setattr(ray, "get_runtime_context", lambda: context)
    return ClusterMonitor("CPU")


def state(*, total: float, free: int) -> ClusterState:
    return ClusterState(node_ids=frozenset("ab"), total=total, free=free, num_free_slots=free)


def test_the_resources_that_ranks_wait_for_are_named(monitor: ClusterMonitor) -> None:
    monitor.state = state(total=3, free=1)
    text = "CPUs: 2 ranks need one each, the cluster has 3, of which 1 are free"
    assert monitor.describe_wait(2, "rank") == text


def test_a_suspension_of_the_launcher_is_not_a_silence_of_the_head(
    monitor: ClusterMonitor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "time", clock := Clock())
    monitor._last_question = monitor._last_response = clock.now
    for second in range(1, 60):
        clock.now += 1
        assert monitor.is_head_lost == (second > HEAD_SECONDS)
    clock.now += 3600  # with Ctrl-Z, for example
    assert not monitor.is_head_lost
    for second in range(1, 60):
        clock.now += 1
        assert monitor.is_head_lost == (second > HEAD_SECONDS)


def test_the_interface_of_an_address_has_that_address() -> None:
    for addresses in psutil.net_if_addrs().values():
        for entry in addresses:
            if entry.family == socket.AF_INET:
                interface = interface_of(entry.address)
                assert interface is not None  # one of them, if several have the address
                assert entry.address in {e.address for e in psutil.net_if_addrs()[interface]}
    assert interface_of("192.0.2.254") is None  # reserved for documentation (RFC 5737)


def test_an_interface_that_the_user_has_set_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    gloo, nccl = INTERFACE_VARIABLES
    loopback = interface_of("127.0.0.1")
    assert loopback is not None
    monkeypatch.setenv(gloo, "eth7")
    monkeypatch.delenv(nccl, raising=False)
    use_interface_of("127.0.0.1")
    assert (os.environ[gloo], os.environ[nccl]) == ("eth7", f"={loopback}")
    monkeypatch.delenv(nccl)


def test_an_address_without_an_interface_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in INTERFACE_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    use_interface_of("192.0.2.254")
    assert not set(INTERFACE_VARIABLES) & set(os.environ)


def prepare_rank(spec_json: str, *, directory: str, environment: dict[str, str]) -> RankActor:
    """An actor as Ray would have it, in this process."""
    own = RankLocation("node", "192.0.2.254", os.getpid(), (), 2.0)
    settings = {
        "spec": spec_json,
        "working_directory": directory,
        "use_gpu": False,
        "environment": environment,
        "nccl_log": "run/logs/nccl-%h-%p.log",
    }
    actor = RankActor()
    actor.prepare(settings, 0, [own])
    return actor


def test_a_host_without_the_directory_of_the_command_is_named(
    dataset: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.setattr("cluster.rank_group.free_port", lambda address: 1)
    spec = tiny_spec(dataset, Path("runs/relative"))
    actor = prepare_rank(spec.to_json(), directory="/absent/project", environment={})
    error = actor.run(1, 1)
    assert isinstance(error, ConfigError)
    assert "192.0.2.254 has no directory /absent/project" in str(error)
    assert "directory=runs/relative is relative" in str(error)


def test_variables_of_the_launcher_reach_ranks_whose_node_has_no_others(
    dataset: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    variables = {"NCCL_DEBUG": "INFO", "NCCL_IB_HCA": "mlx5"}
    monkeypatch.setattr(os, "environ", {**os.environ, "NCCL_IB_HCA": "mlx5_2"})
    monkeypatch.setattr("cluster.rank_group.free_port", lambda address: 1)
    spec = tiny_spec(dataset, Path("runs/relative"))
    prepare_rank(spec.to_json(), directory="/absent", environment=variables)
    assert os.environ["NCCL_DEBUG"] == "INFO"
    assert os.environ["NCCL_IB_HCA"] == "mlx5_2"
    assert os.environ["NCCL_DEBUG_FILE"] == "run/logs/nccl-%h-%p.log"
