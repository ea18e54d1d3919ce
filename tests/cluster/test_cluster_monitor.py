"""Whether the head of a cluster responds, as the launcher sees it."""

from types import SimpleNamespace

import pytest
import ray

from cluster import cluster_monitor as module
from cluster.cluster_monitor import ClusterMonitor


class Clock:
    """Replaces the module `time`."""

    now = 1000.0

    def monotonic(self) -> float:
        return self.now


def test_a_suspension_of_the_launcher_is_not_a_silence_of_the_head(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    context = SimpleNamespace(gcs_address="127.0.0.1:1", get_node_id=lambda: "node")
    monkeypatch.setattr(ray, "get_runtime_context", lambda: context)
    monkeypatch.setattr(module, "time", clock := Clock())
    monitor = ClusterMonitor(use_gpu=False)  # its thread is not started: the head never responds
    for second in range(1, 60):
        clock.now += 1
        assert monitor.silent_seconds == second
    clock.now += 3600  # with Ctrl-Z, for example
    assert monitor.silent_seconds == 0
    for second in range(1, 60):
        clock.now += 1
        assert monitor.silent_seconds == second
