"""Failures under Ray that count against the restarts, and those that are preemptions."""

from pathlib import Path

import pytest

from cluster.failure_counter import FailureCounter
from txl_dist.launch.supervision import RestartBudget
from txl_dist.training.run_directory import RunDirectory

NODES = frozenset({"a", "b"})


def counter(run: Path, *, max_restarts: int, wait_seconds: float = 0.0) -> FailureCounter:
    return FailureCounter(RestartBudget(max_restarts), RunDirectory(run), wait_seconds=wait_seconds)


def test_failures_without_a_checkpoint_between_end_the_launch(tmp_path: Path) -> None:
    failures = counter(tmp_path, max_restarts=1)
    failures.add("rank 0 died", node_ids=NODES)
    assert failures.check(NODES) is None
    failures.add("rank 1 died", node_ids=NODES)
    error = failures.check(NODES)
    assert "again after 1 restart " in str(error)
    assert "rank 1 died" in str(error)


def test_a_new_checkpoint_resets_the_count(tmp_path: Path) -> None:
    failures = counter(tmp_path, max_restarts=1)
    for step in range(1, 6):
        RunDirectory(tmp_path).checkpoints.at(step).mkdir(parents=True)
        failures.add("rank 0 died", node_ids=NODES)
        assert failures.check(NODES) is None


def test_the_loss_of_a_node_does_not_count(tmp_path: Path) -> None:
    failures = counter(tmp_path, max_restarts=0)
    failures.add("rank 1 died", node_ids=NODES)
    assert failures.check(frozenset({"a", "c"})) is None
    assert failures.check(NODES) is None  # decided


@pytest.mark.parametrize("live_node_ids", [NODES, None])
def test_a_failure_is_undecided_while_a_node_may_have_died(
    live_node_ids: frozenset[str] | None, tmp_path: Path
) -> None:
    failures = counter(tmp_path, max_restarts=0, wait_seconds=1000.0)
    failures.add("rank 1 died", node_ids=NODES)
    assert failures.check(live_node_ids) is None
