"""How many ranks start, and when more are worth a restart. Without Ray."""

import time

import pytest

from cluster.nodes import ClusterState
from cluster.rank_plan import SETTLE_SECONDS, STABLE_SECONDS, RankPlan
from txl_dist.launch.rank_range import RankRange

INTERVAL_SECONDS = 100.0


class Clock:
    now = 500.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(time, "monotonic", lambda: clock.now)
    return clock


def free(num_slots: int) -> ClusterState:
    return ClusterState(node_ids=frozenset("ab"), total=8, free=num_slots, num_free_slots=num_slots)


def plan(low: int, high: int) -> RankPlan:
    return RankPlan(RankRange(low, high), growth_interval_seconds=INTERVAL_SECONDS)


def test_a_fixed_number_starts_at_once_whatever_is_free(clock: Clock) -> None:
    for state in (None, free(0), free(9)):
        assert plan(3, 3).choose(state) == 3


def test_a_range_starts_with_as_many_as_fit_and_never_with_fewer_than_the_least(
    clock: Clock,
) -> None:
    elastic = plan(2, 4)
    assert elastic.choose(None) is None
    assert elastic.choose(free(9)) == 4
    assert elastic.choose(free(3)) is None, "resources of the last ranks may still be freed"
    clock.now += SETTLE_SECONDS
    assert elastic.choose(free(3)) == 3
    assert elastic.choose(free(1)) is None
    elastic.end()
    assert elastic.choose(free(3)) is None


def test_growth_waits_until_room_is_stable_and_the_interval_has_passed(clock: Clock) -> None:
    elastic = plan(1, 3)
    elastic.begin(1)
    assert elastic.growth(free(1)) is None
    clock.now += STABLE_SECONDS
    assert elastic.growth(free(1)) is None, "the interval has not passed"
    clock.now += INTERVAL_SECONDS
    assert elastic.growth(free(0)) is None
    assert elastic.growth(free(1)) is None, "not stable"
    clock.now += STABLE_SECONDS
    assert elastic.growth(free(1)) == "there is room for 2 ranks instead of 1"
    assert elastic.growth(free(9)) == "there is room for 3 ranks instead of 1"
    elastic.begin(3)
    clock.now += 2 * INTERVAL_SECONDS
    assert elastic.growth(free(9)) is None


def test_a_fixed_number_never_grows(clock: Clock) -> None:
    fixed = plan(2, 2)
    fixed.begin(2)
    clock.now += 2 * INTERVAL_SECONDS
    assert fixed.growth(free(9)) is None
    clock.now += STABLE_SECONDS
    assert fixed.growth(free(9)) is None
