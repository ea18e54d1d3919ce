"""The spans of a rank add up to its time, and its first step belongs to the start-up."""

import time

import pytest

from txl_dist.runtime.activity import STEP_SPANS, Activity, Span


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The monotonic clock of this process, as a list of one value."""
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


def do(activity: Activity, clock: list[float], *spans: tuple[Span, float]) -> None:
    for span, seconds in spans:
        activity.enter(span)
        clock[0] += seconds


def test_nested_spans_are_counted_once(clock: list[float]) -> None:
    activity = Activity()
    activity.reset()
    do(activity, clock, (Span.EVALUATION, 5))
    outer = activity.enter(Span.SAVE_WAIT)
    clock[0] += 3
    activity.enter(outer)
    clock[0] += 2
    seconds = activity.seconds()
    assert (seconds[Span.EVALUATION], seconds[Span.SAVE_WAIT]) == (7, 3)
    assert sum(seconds.values()) == 10


def test_only_the_first_step_is_a_part_of_the_start_up(clock: list[float]) -> None:
    activity = Activity()
    activity.reset()
    clock[0] += 4
    for number, forward_seconds in ((1, 50), (2, 3), (3, 3)):
        do(activity, clock, (Span.DATA_WAIT, 1), (Span.FORWARD, forward_seconds), (Span.REDUCE, 2))
        activity.end_step()
        assert activity.num_steps == number
    seconds = activity.seconds()
    assert seconds[Span.START_UP] == 4 + 50 + 2
    assert sum(seconds[span] for span in STEP_SPANS) == 2 * (3 + 2)
    assert seconds[Span.DATA_WAIT] == 3
    assert sum(seconds.values()) == clock[0] - 100

    activity.reset()
    assert (activity.num_steps, sum(activity.seconds().values())) == (0, 0)
