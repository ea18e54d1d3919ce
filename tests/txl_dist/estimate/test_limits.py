"""Limits of the design, and the world sizes of a number of lanes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_pipeline.streams.lanes import LanePlan
from txl_dist.estimate.limits import Limit, even_world_sizes, limits_of_run


@given(slope=st.floats(0.01, 10), threshold=st.floats(0.1, 100))
def test_the_first_number_of_ranks_is_the_first_above_the_threshold(
    slope: float, threshold: float
) -> None:
    limit = Limit(
        name="x", unit="y", threshold=threshold, advice="", value=lambda ranks: slope * ranks
    )
    expected = next(ranks for ranks in range(1, 20_000) if slope * ranks > threshold)
    assert limit.first_ranks == expected


def test_a_limit_that_is_never_reached_has_no_first_number_of_ranks() -> None:
    limit = Limit(name="x", unit="y", threshold=1.0, advice="", value=lambda ranks: 0.5)
    assert limit.first_ranks is None


def test_lanes_are_a_limit_unless_they_grow_with_the_ranks() -> None:
    def names(num_lanes: int | None) -> dict[str, int | None]:
        limits = limits_of_run(
            num_lanes=num_lanes,
            manifest_bytes=float,
            save_share_of_interval=float,
            exposed_share=lambda ranks: 0.0,
            lines_per_second=lambda ranks: 0.0,
        )
        return {limit.name: limit.first_ranks for limit in limits}

    assert names(60)["lanes"] == 61
    assert "lanes" not in names(None)


@pytest.mark.parametrize("num_lanes", [1, 5, 12, 64])
def test_even_world_sizes_need_no_padding_rows(num_lanes: int) -> None:
    plan = LanePlan(num_tokens=10_000, num_lanes=num_lanes, tgt_len=8)
    even = [n for n in range(1, num_lanes + 1) if plan.rows_per_rank(n) * n == num_lanes]
    assert even_world_sizes(num_lanes) == even
