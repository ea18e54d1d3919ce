"""The lane plan: targets, ranks and refusals. What lanes read: properties/test_contiguity.py."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_pipeline.errors import ConfigError, DataError
from data_pipeline.streams.lanes import LanePlan


@st.composite
def plans(draw: st.DrawFn) -> LanePlan:
    num_lanes = draw(st.integers(1, 40))
    num_tokens = draw(st.integers(2 * num_lanes, 3000))
    return LanePlan(num_tokens=num_tokens, num_lanes=num_lanes, tgt_len=draw(st.integers(1, 50)))


@pytest.mark.fault_row(39)
@given(plan=plans(), data=st.data())
def test_lanes_are_divided_among_ranks_with_equal_rows(plan: LanePlan, data: st.DataObject) -> None:
    num_ranks = data.draw(st.integers(1, plan.num_lanes))
    lanes = [plan.lanes_of_rank(rank, num_ranks) for rank in range(num_ranks)]
    assert [lane for part in lanes for lane in part] == list(range(plan.num_lanes))
    sizes = {len(part) for part in lanes}
    assert max(sizes) == plan.rows_per_rank(num_ranks)
    assert max(sizes) - min(sizes) <= 1
    assert min(sizes) >= 1


def test_more_ranks_than_lanes_is_a_config_error_with_advice() -> None:
    plan = LanePlan(num_tokens=100, num_lanes=4, tgt_len=2)
    for refused in (lambda: plan.lanes_of_rank(0, 5), lambda: plan.rows_per_rank(5)):
        with pytest.raises(ConfigError, match=r"5 ranks for data.num_lanes=4.*at most 4 ranks"):
            refused()


@pytest.mark.parametrize(
    ("counts", "error", "message"),
    [
        (
            {"num_tokens": 15},
            DataError,
            r"15 tokens, num_lanes=8 needs at least 16 .* to 7 or less",
        ),
        ({"num_tokens": 1}, DataError, r"holds 1 tokens, and a lane needs at least 2"),
        ({"num_lanes": 0}, ValueError, "at least 1"),
        ({"tgt_len": 0}, ValueError, "at least 1"),
    ],
)
def test_too_little_data_is_refused_with_both_numbers_and_a_plan_without_lanes_or_tokens(
    counts: dict[str, int], error: type[Exception], message: str
) -> None:
    smallest = {"num_tokens": 16, "num_lanes": 8, "tgt_len": 2}
    LanePlan(**smallest)
    with pytest.raises(error, match=message):
        LanePlan(**smallest | counts)
