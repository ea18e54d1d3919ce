"""Which failure ended a run, whether a restart can repair it, and how many restarts there are."""

import signal
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.conftest import Clock
from txl_dist.errors import (
    ConfigError,
    DivergedError,
    LostRankError,
    PreemptedError,
    StoreError,
    TxlError,
    UnreadableError,
)
from txl_dist.launch.rank_group import RankEnded, RankRange
from txl_dist.launch.restarts import (
    MAX_DELAY_SECONDS,
    MAX_NODE_LOSSES,
    SETTLE_SECONDS,
    STABLE_SECONDS,
    ElasticPlan,
    RestartBudget,
    RunFailure,
    failure_of,
)
from txl_dist.training.spec import RunDirectory

LOST = LostRankError("rank 0 lost the connection")


def end(rank: int, code: int, error: TxlError | None = None, *, hung: bool = False) -> RankEnded:
    return RankEnded(rank, code, error, hung=hung)


def failure(
    ends: list[RankEnded], run: Path, *, stop_requested: bool = False, has_saved: bool = True
) -> RunFailure | None:
    return failure_of(
        ends, stop_requested=stop_requested, has_saved=has_saved, directory=RunDirectory(run)
    )


@pytest.mark.fault_row(1)
@pytest.mark.parametrize(
    ("ends", "error", "message", "can_restart"),
    [
        ([end(0, 1, LOST), end(1, 75, PreemptedError("saved"))], PreemptedError, "saved", False),
        ([end(0, 1, LOST), end(1, 75)], PreemptedError, "stopped on request", False),
        ([end(0, 1, LOST), end(1, -signal.SIGTERM)], PreemptedError, "stopped on request", False),
        ([end(0, 1, LOST), end(1, -signal.SIGKILL)], TxlError, "rank 1 was killed by SIGK", True),
        ([end(0, 1, LOST), end(1, -signal.SIGSEGV)], TxlError, "rank 1 was killed by SIGS", True),
        (
            [end(0, 1, LOST), end(1, -signal.SIGABRT)],
            TxlError,
            "rank 1 was killed by SIGABRT",
            True,
        ),
        ([end(0, -signal.SIGABRT), end(1, 2, ConfigError("bad"))], ConfigError, "bad", False),
        ([end(0, 1, LOST), end(1, 5, DivergedError("nan"))], DivergedError, "nan", False),
        ([end(0, 1, LOST), end(1, 2, ConfigError("bad"))], ConfigError, "bad", False),
        (
            [end(0, 1, LOST), end(1, -signal.SIGKILL, hung=True)],
            TxlError,
            "rank 1 hung and was killed. rank 0 lost the connection",
            True,
        ),
        ([end(0, 1, LOST), end(1, 0)], TxlError, "rank 0 ended with code 1. rank 0 lost", True),
        ([end(0, 0), end(1, 1)], TxlError, "rank 1 ended with code 1", True),
        (
            [end(0, -signal.SIGKILL, hung=True), end(1, 1)],
            TxlError,
            "rank 1 ended with code 1. ",
            True,
        ),
    ],
)
def test_the_cause_is_found_in_any_order(
    ends: list[RankEnded], error: type[TxlError], message: str, can_restart: bool, tmp_path: Path
) -> None:
    for order in (ends, ends[::-1]):
        cause = failure(order, tmp_path)
        assert cause is not None
        assert type(cause.error) is error
        assert str(cause.error).startswith(message)
        assert cause.can_restart == can_restart


@pytest.mark.parametrize("outage", [UnreadableError("s3"), StoreError("s3")])
def test_an_outage_of_storage_is_restarted_if_the_launch_has_trained(
    outage: TxlError, tmp_path: Path
) -> None:
    for has_saved in (False, True):
        cause = failure([end(0, 1, LOST), end(1, 3, outage)], tmp_path, has_saved=has_saved)
        assert cause is not None
        assert (cause.error, cause.can_restart) == (outage, has_saved)
    cause = failure([end(0, 3, outage), end(1, 2, ConfigError("bad"))], tmp_path)
    assert cause is not None
    assert (str(cause.error), cause.can_restart) == ("bad", False)


def test_a_stop_in_which_nccl_aborts_a_rank_is_a_stop(tmp_path: Path) -> None:
    ended = failure([end(0, 1, LOST), end(1, -signal.SIGABRT)], tmp_path, stop_requested=True)
    assert ended is not None
    assert isinstance(ended.error, PreemptedError)


def test_nothing_failed_if_all_ranks_succeeded(tmp_path: Path) -> None:
    assert failure([end(0, 0), end(1, 0)], tmp_path, stop_requested=True) is None


def allows_restart(budget: RestartBudget, newest_step: int | None) -> bool:
    budget.count(newest_step=newest_step)
    return not budget.is_exhausted


def test_a_failure_a_day_with_checkpoints_between_never_exhausts_the_budget() -> None:
    budget = RestartBudget(1)
    assert all(allows_restart(budget, day) for day in range(100))


@pytest.mark.parametrize("newest_step", [None, 0, 7])
def test_failures_without_a_new_checkpoint_exhaust_it(newest_step: int | None) -> None:
    budget = RestartBudget(2)
    assert [allows_restart(budget, newest_step) for _ in range(3)] == [True, True, False]


@given(steps=st.lists(st.none() | st.integers(0, 3), max_size=40), max_restarts=st.integers(0, 3))
def test_a_loop_between_old_checkpoints_ends(steps: list[int | None], max_restarts: int) -> None:
    """Falling back to an older checkpoint and saving the same step again is no progress."""
    budget = RestartBudget(max_restarts)
    allowed = [allows_restart(budget, step) for step in steps]
    # None counts like a run without progress; the newest step can grow at most 4 times, 0 to 3.
    assert sum(allowed) <= max_restarts * 5


def test_only_repeated_failures_delay_a_restart_and_the_delay_is_bounded() -> None:
    budget, delays = RestartBudget(100), []
    for _ in range(50):
        budget.count(newest_step=None)
        delays.append(budget.delay_seconds)
    assert delays[:5] == [0, 1, 2, 4, 8]
    assert delays[-1] == MAX_DELAY_SECONDS
    assert budget.forgive_lost_node()
    assert budget.delay_seconds == MAX_DELAY_SECONDS, "lost nodes delay too"
    budget.count(newest_step=5)
    assert budget.delay_seconds == 0


def test_lost_nodes_do_not_use_up_restarts_until_a_checkpoint_but_have_a_limit() -> None:
    budget = RestartBudget(0)
    for step in (None, 5):
        for _ in range(MAX_NODE_LOSSES):
            budget.count(newest_step=step)
            assert budget.forgive_lost_node()
            assert not budget.is_exhausted
    budget.count(newest_step=5)
    assert not budget.forgive_lost_node()
    assert budget.is_exhausted


# --- how many start -------------------------------------------------------------------------------

INTERVAL_SECONDS = 100.0


def plan(low: int, high: int) -> ElasticPlan:
    return ElasticPlan(RankRange(low, high), growth_interval_seconds=INTERVAL_SECONDS)


def test_a_fixed_number_starts_immediately_whatever_is_free(clock: Clock) -> None:
    for room in (None, 0, 9):
        assert plan(3, 3).choose(room) == 3


def test_a_range_starts_with_as_many_as_fit_and_never_with_fewer_than_the_least(
    clock: Clock,
) -> None:
    elastic = plan(2, 4)
    assert elastic.choose(None) is None
    assert elastic.choose(9) == 4
    assert elastic.choose(3) is None, "resources of the last ranks may still be freed"
    clock.now += SETTLE_SECONDS
    assert elastic.choose(3) == 3
    assert elastic.choose(1) is None
    elastic.end()
    assert elastic.choose(3) is None


def test_growth_waits_until_room_is_stable_and_the_interval_has_passed(clock: Clock) -> None:
    elastic = plan(1, 3)
    elastic.begin(1)
    assert elastic.growth(1) is None
    clock.now += STABLE_SECONDS
    assert elastic.growth(1) is None, "the interval has not passed"
    clock.now += INTERVAL_SECONDS
    assert elastic.growth(0) is None
    assert elastic.growth(1) is None, "not stable"
    clock.now += STABLE_SECONDS
    assert elastic.growth(1) == "there is room for 2 ranks instead of 1"
    assert elastic.growth(9) == "there is room for 3 ranks instead of 1"
    for full in (elastic, plan(3, 3)):
        full.begin(3)
        clock.now += 2 * INTERVAL_SECONDS
        assert full.growth(9) is None
        clock.now += STABLE_SECONDS
        assert full.growth(9) is None
