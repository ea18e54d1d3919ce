"""Loss sums: added in any grouping, divided once."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from txl_dist.errors import DataError
from txl_dist.evaluation.scores import LossSums, finish

BYTE_COUNTS_V = torch.tensor([0, 1, 2, 3])


@settings(max_examples=50, deadline=None)
@given(
    targets=st.lists(st.lists(st.integers(-1, 3), min_size=5, max_size=5), min_size=1, max_size=6),
    data=st.data(),
)
def test_the_parts_of_a_batch_add_up_to_the_batch(
    targets: list[list[int]], data: st.DataObject
) -> None:
    target_BT = torch.tensor(targets)
    nats_BT = torch.arange(target_BT.numel()).view_as(target_BT) * (target_BT >= 0)
    whole = LossSums.of(nats_BT, target_BT, BYTE_COUNTS_V)
    scored = [target for row in targets for target in row if target >= 0]
    assert (whole.num_tokens, whole.num_bytes) == (len(scored), sum(scored))

    cut = data.draw(st.integers(0, len(targets)))
    parts = (
        LossSums.of(nats_BT[rows], target_BT[rows], BYTE_COUNTS_V)
        for rows in (slice(cut), slice(cut, None))
    )
    assert sum(parts, LossSums()) == whole


def test_nats_are_added_in_float64_without_their_graph() -> None:
    nats_BT = torch.full((300, 700), 0.1, requires_grad=True)
    target_BT = torch.ones(300, 700, dtype=torch.int64)
    sums = LossSums.of(nats_BT, target_BT, BYTE_COUNTS_V)
    assert sums.nats == pytest.approx(210_000 * float(torch.tensor(0.1)), rel=1e-12)


def test_every_score_divides_the_sums_once() -> None:
    sums = LossSums(nats=6.0, num_tokens=2, num_bytes=3) + LossSums(nats=1.0, num_tokens=1)
    assert (sums.nats_per_token, sums.perplexity) == (7 / 3, math.exp(7 / 3))
    scores = finish(sums.named)
    assert scores["bits_per_token"] == pytest.approx(7 / 3 / math.log(2))
    assert scores["bits_per_byte"] == pytest.approx(7 / 3 / math.log(2))
    uniform = LossSums(nats=10 * math.log(256), num_tokens=10, num_bytes=10)
    assert finish(uniform.named)["bits_per_byte"] == pytest.approx(8)
    assert uniform.perplexity == pytest.approx(256)


def test_what_is_not_known_or_beyond_a_float_is_no_error() -> None:
    assert LossSums(nats=800.0, num_tokens=1).perplexity == math.inf
    assert finish(LossSums(nats=1.0, num_tokens=1).named)["bits_per_byte"] is None
    for mean in ("nats_per_token", "perplexity"):
        with pytest.raises(DataError, match="no target was scored"):
            getattr(LossSums(), mean)
