"""Whether the head of a cluster responds, as the launcher sees it."""

from types import SimpleNamespace

import pytest
import ray

from cluster import cluster_monitor as module
from cluster.cluster_monitor import LONG_START_SECONDS, ClusterMonitor, ClusterState


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
