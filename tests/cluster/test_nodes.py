"""Which resources and nodes ranks get, whether the head responds, the interface for NCCL."""

import json
import os
import socket
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import ray

from cluster import nodes as module
from cluster.nodes import (
    INTERFACE_VARIABLES,
    LONG_START_SECONDS,
    ClusterMonitor,
    ClusterState,
    choose_placement,
    interface_of,
    num_threads,
    use_interface_of,
)
from tests.support.commands import start_txl, wait_until
from tests.support.nodes import RayNode, ray_node, token_environment
from tests.support.training_runs import NO_EVALUATION, TINY
from txl_dist.config.training_config import RayConfig
from txl_dist.errors import ConfigError

GIB = 2**30
HEAD = {"node:__internal_head__": 1.0}


def node(name: str, **resources: float) -> dict[str, Any]:
    labels = {"ray.io/node-id": name, "market": "spot" if name == "c" else "on-demand"}
    resources = {"CPU": 8.0, "memory": 64.0 * GIB, **resources}
    return {"NodeID": name, "Resources": resources, "Labels": labels}


HEAD_NODE = node("head", **HEAD)
GPU_NODES = [node("a", GPU=8.0), node("b", GPU=8.0)]


def test_by_default_a_rank_gets_a_gpu_if_there_are_some_else_a_cpu() -> None:
    on_gpus = choose_placement(RayConfig(), [HEAD_NODE, *GPU_NODES], 16)
    assert (on_gpus.use_gpu, on_gpus.resources, on_gpus.labels) == (True, {"GPU": 1}, {})
    on_cpus = choose_placement(RayConfig(), [HEAD_NODE], 2)
    assert (on_cpus.use_gpu, on_cpus.resources) == (False, {"CPU": 1})


def test_too_few_gpus_are_refused_unless_the_config_asks_for_them() -> None:
    with pytest.raises(ConfigError, match=r"17 ranks need one GPU each, and Ray has 16"):
        choose_placement(RayConfig(), GPU_NODES, 17)
    assert choose_placement(RayConfig(gpus_per_rank=1), [], 17).use_gpu
    cpus = choose_placement(RayConfig(gpus_per_rank=0, cpus_per_rank=4), GPU_NODES, 17)
    assert (cpus.use_gpu, cpus.resources) == (False, {"CPU": 4})


def test_the_head_is_kept_free_and_its_gpus_do_not_count() -> None:
    head = node("head", GPU=1.0, **HEAD)
    config = RayConfig(ranks_on_head=False, node_labels={"market": "!spot"})
    placement = choose_placement(config, [head, *GPU_NODES], 16)
    assert placement.labels == {"market": "!spot", "ray.io/node-id": "!head"}
    assert placement.restrictions == "ray.ranks_on_head=False, ray.node_labels={'market': '!spot'}"
    with pytest.raises(ConfigError, match="Ray has 16 where ranks may run"):
        choose_placement(config, [head, *GPU_NODES], 17)


@pytest.mark.parametrize("ranks_per_node", [1, 2, 3, 7, 1000])
def test_a_node_cannot_hold_more_than_ranks_per_node(ranks_per_node: int) -> None:
    nodes = [node("a", memory=64.0 * GIB), node("b", memory=64.0 * GIB + 12345678)]
    config = RayConfig(ranks_per_node=ranks_per_node)
    for each in nodes:
        each["Resources"]["CPU"] = 10_000.0
    placement = choose_placement(config, nodes, 4)
    assert [placement.max_ranks(each) for each in nodes] == [ranks_per_node] * 2


def test_memory_is_not_reserved_where_gpus_limit_the_ranks_of_a_node() -> None:
    placement = choose_placement(RayConfig(ranks_per_node=8), GPU_NODES, 16)
    assert placement.resources == {"GPU": 1}
    assert choose_placement(RayConfig(ranks_per_node=7), GPU_NODES, 14).resources.keys() == {
        "GPU",
        "memory",
    }


@pytest.mark.parametrize(
    ("selector", "fits"),
    [
        ({}, [8, 8, 8]),
        ({"market": "spot"}, [0, 0, 8]),
        ({"market": "!spot"}, [8, 8, 0]),
        ({"market": "in(spot,reserved)"}, [0, 0, 8]),
        ({"market": "!in(spot,on-demand)"}, [0, 0, 0]),
        ({"zone": "a"}, [0, 0, 0]),
        ({"zone": "!a"}, [8, 8, 8]),
    ],
)
def test_ranks_fit_on_nodes_with_the_labels_and_free_resources(
    selector: dict[str, str], fits: list[int]
) -> None:
    nodes = [*GPU_NODES, node("c", GPU=8.0)]
    placement = choose_placement(RayConfig(node_labels=selector, gpus_per_rank=1), nodes, 2)
    assert [placement.num_slots(each, each["Resources"]) for each in nodes] == fits
    assert placement.num_slots(nodes[0], {}) == 0


def test_nodes_that_differ_too_much_or_are_unknown_are_refused() -> None:
    nodes = [node("a", memory=64.0 * GIB), node("b", memory=256.0 * GIB)]
    with pytest.raises(ConfigError, match=r"64.0 to 256.0 GiB"):
        choose_placement(RayConfig(ranks_per_node=2), nodes, 4)
    with pytest.raises(ConfigError, match="no node for ranks yet"):
        choose_placement(RayConfig(ranks_per_node=2), [], 4)


def test_threads_share_the_cpus_that_the_node_offers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 96)
    assert num_threads(ranks_on_node=8, cpus_per_rank=None, ray_cpus=96.0) == 12
    assert num_threads(ranks_on_node=2, cpus_per_rank=None, ray_cpus=8.0) == 4  # a container
    assert num_threads(ranks_on_node=2, cpus_per_rank=None, ray_cpus=0.0) == 48
    assert num_threads(ranks_on_node=128, cpus_per_rank=None, ray_cpus=200.0) == 1
    assert num_threads(ranks_on_node=8, cpus_per_rank=3, ray_cpus=96.0) == 3


@pytest.mark.cluster
def test_ray_places_ranks_where_the_config_says(dataset: Path, tmp_path: Path) -> None:
    label = ("--labels=disk=nvme",)
    with (
        ray_node(tmp_path, num_cpus=2) as head,
        ray_node(tmp_path, join=head.address, num_cpus=2, words=label) as joined,
    ):
        nodes = {"head": head, "joined": joined}
        for settings, expected in (
            (["ray.ranks_on_head=false"], {"joined": 2}),
            (["ray.ranks_per_node=1"], {"head": 1, "joined": 1}),
            (["ray.node_labels={disk: nvme}", "ray.ranks_per_node=2"], {"joined": 2}),
        ):
            run = tmp_path / f"run-{settings[0].partition('=')[0]}"
            overrides = (f"data.path={dataset}", f"directory={run}", NO_EVALUATION, *settings)
            with start_txl(
                *("train", TINY, *overrides, "training.num_steps=200"),
                *("--on", head.address, "--ranks", 2),
                environment=token_environment(tmp_path),
            ) as launcher:
                wait_until(lambda run=run: len(rank_pids(run)) == 2)
                assert placed(rank_pids(run), nodes) == expected
                launcher.terminate()
                output, _ = launcher.communicate(timeout=120)
            assert launcher.returncode in (0, 75), output


def rank_pids(run: Path) -> list[int]:
    """Pids of the ranks that have started, from their heartbeats."""
    return [json.loads(path.read_text())["pid"] for path in run.glob(".heartbeats/rank-*.json")]


def placed(pids: list[int], nodes: dict[str, RayNode]) -> Counter[str]:
    """Node -> number of the processes that it has started."""
    return Counter(
        name
        for name, node in nodes.items()
        for pid in pids
        if node.process.pid in {parent.pid for parent in psutil.Process(pid).parents()}
    )


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
    return ClusterMonitor(use_gpu=False)


def state(*, total: float, free: int) -> ClusterState:
    return ClusterState(node_ids=frozenset("ab"), total=total, free=free, num_free_slots=free)


def test_resources_that_the_ranks_have_taken_themselves_are_not_missing(
    monitor: ClusterMonitor,
) -> None:
    monitor._see(state(total=2, free=2))
    assert monitor.describe_wait(2) == "the ranks to start"
    monitor._see(state(total=2, free=0))  # they import their libraries
    assert monitor.describe_wait(2) == "the ranks to start"
    late = monitor.describe_wait(2, waited_seconds=LONG_START_SECONDS)
    assert "2 ranks need a CPU each, and 0 of the 2" in late


def test_resources_that_others_have_are_named(monitor: ClusterMonitor) -> None:
    monitor._see(state(total=3, free=1))
    assert "2 ranks need a CPU each, and 1 of the 3" in monitor.describe_wait(2)
    monitor._see(state(total=1, free=1))
    assert "the cluster has 1 on 2 live nodes" in monitor.describe_wait(2)


def test_a_suspension_of_the_launcher_is_not_a_silence_of_the_head(
    monitor: ClusterMonitor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "time", clock := Clock())
    monitor._last_question = monitor._last_response = clock.now
    for second in range(1, 60):
        clock.now += 1
        assert monitor.silent_seconds == second
    clock.now += 3600  # with Ctrl-Z, for example
    assert monitor.silent_seconds == 0
    for second in range(1, 60):
        clock.now += 1
        assert monitor.silent_seconds == second


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
