"""Failures under Ray that count against the restarts, and those that are preemptions."""

from pathlib import Path

import pytest

from cluster.failure_counter import MAX_NODE_LOSSES, FailureCounter
from txl_dist.errors import TxlError
from txl_dist.launch.restarts import RestartBudget
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


def test_the_first_failure_after_a_checkpoint_is_restarted_without_a_wait(tmp_path: Path) -> None:
    """Also while it is not decided whether a node has died."""
    failures = counter(tmp_path, max_restarts=9)
    for _ in range(6):
        failures.add("rank 0 died", node_ids=NODES)
        assert failures.check(NODES) is None
    assert failures.delay_seconds > 10
    RunDirectory(tmp_path).checkpoints.at(5).mkdir(parents=True)
    failures.add("rank 0 died", node_ids=NODES)
    assert failures.delay_seconds == 0


def test_the_loss_of_a_node_does_not_count(tmp_path: Path) -> None:
    failures = counter(tmp_path, max_restarts=0)
    failures.add("rank 1 died", node_ids=NODES)
    assert failures.check(frozenset({"a", "c"})) is None
    assert failures.check(NODES) is None  # decided


def test_a_run_that_loses_node_after_node_without_a_checkpoint_ends(tmp_path: Path) -> None:
    failures = counter(tmp_path, max_restarts=0)

    def lose_nodes(number: int) -> TxlError | None:
        for _ in range(number):
            failures.add("rank 1 died", node_ids=NODES)
            if error := failures.check(frozenset({"a"})):
                return error
        return None

    assert lose_nodes(MAX_NODE_LOSSES) is None
    assert failures.delay_seconds > 1
    RunDirectory(tmp_path).checkpoints.at(5).mkdir(parents=True)
    assert lose_nodes(MAX_NODE_LOSSES) is None
    assert "11 nodes were lost since the last checkpoint" in str(lose_nodes(1))


@pytest.mark.parametrize("live_node_ids", [NODES, None])
def test_a_failure_is_undecided_while_a_node_may_have_died(
    live_node_ids: frozenset[str] | None, tmp_path: Path
) -> None:
    failures = counter(tmp_path, max_restarts=0, wait_seconds=1000.0)
    failures.add("rank 1 died", node_ids=NODES)
    assert failures.check(live_node_ids) is None
