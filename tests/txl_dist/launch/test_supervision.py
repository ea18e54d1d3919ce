"""Which failure ended a run, whether a restart can repair it, and how many restarts there are."""

import signal
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from txl_dist.errors import (
    ConfigError,
    DivergedError,
    LostRankError,
    PreemptedError,
    StoreError,
    TxlError,
    UnreadableError,
)
from txl_dist.launch.restarts import (
    MAX_DELAY_SECONDS,
    RankEnd,
    RestartBudget,
    RunFailure,
    failure_of,
    restart_delay_seconds,
    restart_line,
)
from txl_dist.training.run_directory import RunDirectory

LOST = LostRankError("rank 0 lost the connection")


def end(rank: int, code: int, error: TxlError | None = None, *, hung: bool = False) -> RankEnd:
    return RankEnd(rank, code, error, hung)


LOG = """rank 1 is up
Traceback (most recent call last):
OSError: of an earlier start
12:00:00 rank 1 is up
this rank failed
Traceback (most recent call last):
  File "x.py", line 1, in <module>
    import x
ImportError: no x
frame #1: start

"""


def failure(
    ends: list[RankEnd], run: Path, *, stop_requested: bool = False, has_saved: bool = True
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
            "rank 1 ended with code 1 (its log: ImportError: no x). ",
            True,
        ),
    ],
)
def test_the_cause_is_found_in_any_order(
    ends: list[RankEnd], error: type[TxlError], message: str, can_restart: bool, tmp_path: Path
) -> None:
    if "ImportError" in message:
        (tmp_path / "logs").mkdir()
        (tmp_path / "logs" / "rank-1.log").write_text(LOG)
    for order in (ends, ends[::-1]):
        cause = failure(order, tmp_path)
        assert cause is not None
        assert type(cause.error) is error
        assert str(cause.error).startswith(message)
        assert cause.can_restart == can_restart


def test_a_rank_that_does_not_end_after_a_stop_request_is_part_of_the_stop(tmp_path: Path) -> None:
    ends = [end(0, 1, LOST), end(1, -signal.SIGKILL, hung=True)]
    cause = failure(ends, tmp_path, stop_requested=True)
    assert cause is not None
    assert isinstance(cause.error, PreemptedError)
    assert "; rank 1 was killed after not ending within training.grace_seconds" in str(cause.error)


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


def test_nothing_failed_if_all_ranks_succeeded(tmp_path: Path) -> None:
    assert failure([end(0, 0), end(1, 0)], tmp_path, stop_requested=True) is None


def test_a_failure_a_day_with_checkpoints_between_never_exhausts_the_budget() -> None:
    budget = RestartBudget(1)
    assert all(budget.allows_restart(newest_step=day) for day in range(100))


@pytest.mark.parametrize("newest_step", [None, 0, 7])
def test_failures_without_a_new_checkpoint_exhaust_it(newest_step: int | None) -> None:
    budget = RestartBudget(2)
    allowed = [budget.allows_restart(newest_step=newest_step) for _ in range(3)]
    assert allowed == [True, True, False]


@given(steps=st.lists(st.none() | st.integers(0, 3), max_size=40), max_restarts=st.integers(0, 3))
def test_a_loop_between_old_checkpoints_ends(steps: list[int | None], max_restarts: int) -> None:
    """Falling back to an older checkpoint and saving the same step again is no progress."""
    budget = RestartBudget(max_restarts)
    allowed = [budget.allows_restart(newest_step=step) for step in steps]
    # None counts like a run without progress; the newest step can grow at most 4 times, 0 to 3.
    assert sum(allowed) <= max_restarts * 5


def test_only_repeated_failures_delay_a_restart_and_the_delay_is_bounded() -> None:
    delays = [restart_delay_seconds(num_failures) for num_failures in (1, 2, 3, 4, 5, 50)]
    assert delays == [0, 1, 2, 4, 8, MAX_DELAY_SECONDS]


def test_the_error_after_the_last_restart_names_limit_failure_and_option(tmp_path: Path) -> None:
    budget = RestartBudget(1)
    for _ in range(2):
        budget.allows_restart(newest_step=None)
    message = str(budget.exhausted_error("rank 1 died", RunDirectory(tmp_path)))
    for part in ("rank 1 died", "again after 1 restart", "--max-restarts", "ray.max_restarts"):
        assert part in message


@pytest.mark.parametrize(
    ("newest_step", "resume", "start"),
    [
        (40, "auto", "from step 40"),
        (None, "auto", "from the beginning"),
        (None, "never", "from the beginning"),
        (
            40,
            "runs/a/checkpoints/step-20",
            "from runs/a/checkpoints/step-20, or the newest checkpoint since",
        ),
    ],
)
def test_the_line_of_a_restart_has_the_cause_the_count_and_the_step(
    newest_step: int | None, resume: str, start: str
) -> None:
    budget = RestartBudget(3)
    budget.allows_restart(newest_step=newest_step)
    cause = RunFailure(TxlError(), "rank 1 was killed by SIGKILL", can_restart=True)
    line = restart_line(cause, budget, newest_step=newest_step, resume=resume)
    assert line.startswith("rank 1 was killed by SIGKILL; restart 1 of at most 3 ")
    assert line.endswith(start)
