"""Which error a launcher raises if several ranks failed: the cause, not its consequences."""

import signal
from pathlib import Path

import pytest

from txl_dist.errors import DivergedError, LostRankError, PreemptedError, TxlError
from txl_dist.launch.processes import _raise_cause, _RankEnd
from txl_dist.training.run_directory import RunDirectory

LOST = LostRankError("rank 0 lost the connection")


def end(rank: int, code: int, error: TxlError | None = None, *, hung: bool = False) -> _RankEnd:
    return _RankEnd(rank, code, error, hung)


@pytest.mark.fault_row(1)
@pytest.mark.parametrize(
    ("ends", "error", "message"),
    [
        ([end(0, 1, LOST), end(1, 75, PreemptedError("saved"))], PreemptedError, "^saved$"),
        ([end(0, 1, LOST), end(1, 75)], PreemptedError, "^stopped on request"),
        ([end(0, 1, LOST), end(1, -signal.SIGKILL)], TxlError, "^rank 1 was killed by SIGKILL"),
        ([end(0, 1, LOST), end(1, 5, DivergedError("nan"))], DivergedError, "^nan$"),
        (
            [end(0, 1, LOST), end(1, -signal.SIGKILL, hung=True)],
            TxlError,
            "^rank 1 hung and was killed. rank 0 lost the connection",
        ),
        ([end(0, 1, LOST), end(1, 0)], TxlError, "^rank 0 ended with code 1. rank 0 lost"),
    ],
)
def test_the_cause_is_raised(
    ends: list[_RankEnd], error: type[TxlError], message: str, tmp_path: Path
) -> None:
    for order in (ends, ends[::-1]):
        with pytest.raises(error, match=message):
            _raise_cause(order, stop_requested=False, directory=RunDirectory(tmp_path))


def test_a_rank_that_the_stop_signal_killed_was_stopped_on_request(tmp_path: Path) -> None:
    ends = [end(0, -signal.SIGTERM)]
    with pytest.raises(PreemptedError):
        _raise_cause(ends, stop_requested=True, directory=RunDirectory(tmp_path))
    with pytest.raises(TxlError, match="killed by SIGTERM"):
        _raise_cause(ends, stop_requested=False, directory=RunDirectory(tmp_path))


def test_nothing_is_raised_if_all_ranks_succeeded(tmp_path: Path) -> None:
    _raise_cause([end(0, 0), end(1, 0)], stop_requested=True, directory=RunDirectory(tmp_path))
