"""The loss after exactly c tokens: equal to a plain loop, and older tokens have no influence."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from tests.support.small_models import VOCAB_SIZE, random_text, read_stream, small_model
from tests.support.token_sources import TextSource
from txl_dist.context.losses import measure_losses
from txl_dist.context.positions import Positions
from txl_dist.context.windows import WindowScorer
from txl_dist.errors import CheckpointError
from txl_dist.model.transformer_xl import TransformerXL

MEMORY_MODELS: list[dict[str, Any]] = [
    {"mem_len": 5},
    {"mem_len": 2, "pre_lnorm": True, "untie_r": True},
    {"mem_len": 4, "same_length": True},
    {"mem_len": 7, "distance_encoding": "rotary"},
    {"mem_len": 3, "distance_encoding": "shaw", "clamp_len": 4},
    {"mem_len": 0},
]


def brute_force_nats(model: TransformerXL, window: Tensor, *, tgt_len: int) -> Tensor:
    """Loss of the last token of `window`, whose last segment ends before that token."""
    num_inputs = len(window) - 1
    nats = None
    memory = model.empty_memory(1)
    start = 0
    while start < num_inputs:
        size = tgt_len if start or num_inputs % tgt_len == 0 else num_inputs % tgt_len
        stop = start + size
        nats, memory = model(
            window[None, start:stop],
            window[None, start + 1 : stop + 1],
            torch.arange(start, stop)[None],
            memory,
        )
        start = stop
    assert nats is not None
    return nats[0, -1]


@pytest.mark.parametrize("options", MEMORY_MODELS, ids=str)
@pytest.mark.parametrize("context", [1, 3, 8, 17])
def test_a_window_equals_a_plain_loop_over_its_segments(
    options: dict[str, Any], context: int
) -> None:
    model, tgt_len = small_model(seed=3, **options), 3
    scorer = WindowScorer(model=model, tgt_len=tgt_len)
    text_BN = random_text(2, context + 1, seed=5)
    nats_B1 = scorer.last_nats(text_BN)
    for row, text in enumerate(text_BN):
        window = text[-scorer.max_context - 1 :]
        expected = brute_force_nats(model, window, tgt_len=tgt_len)
        assert_close(nats_B1[row, 0], expected)


@pytest.mark.parametrize("options", MEMORY_MODELS, ids=str)
def test_more_than_the_longest_useful_context_changes_nothing(options: dict[str, Any]) -> None:
    model, tgt_len = small_model(seed=3, **options), 3
    limit = WindowScorer(model=model, tgt_len=tgt_len).max_context
    window = random_text(1, limit + 2 * tgt_len + 1, seed=6)[0]
    if options["mem_len"]:
        expected = brute_force_nats(model, window, tgt_len=tgt_len)
        assert_close(brute_force_nats(model, window[-limit - 1 :], tgt_len=tgt_len), expected)
    assert limit == tgt_len * (1 + 2 * -(-options["mem_len"] // tgt_len))


def test_older_tokens_do_influence_a_model_that_reads_on() -> None:
    """What the windows exclude: with mem_len = c, more than c tokens act through depth."""
    model, context = small_model(seed=3, mem_len=4), 6
    text = random_text(1, 13, seed=7)
    other = text.clone()
    other[0, : -context - 1] = (other[0, : -context - 1] + 1) % VOCAB_SIZE
    read_on = [read_stream(model, each, tgt_len=2)[0][0, -1] for each in (text, other)]
    assert abs(read_on[0] - read_on[1]) > 1e-6
    scorer = WindowScorer(model=model, tgt_len=2)
    source = [TextSource([[each[0].tolist()]]) for each in (text, other)]
    positions = Positions(np.array([12]), np.array([0]))
    # The longer context makes older tokens available to the shorter one.
    losses = [
        measure_losses(scorer, each, positions, [context, 12], batch_windows=1) for each in source
    ]
    assert losses[0][0] == losses[1][0]
    assert losses[0][1] != losses[1][1]


@pytest.mark.parametrize("context", [1, 3, 4])
def test_absolute_positions_are_those_of_training(context: int) -> None:
    """After c tokens, the model is at position c of a segment, as in training."""
    model = small_model(seed=2, mem_len=0, distance_encoding="absolute")
    text_BN = random_text(2, 5, seed=8)
    in_training = model(
        text_BN[:, :4], text_BN[:, 1:], torch.arange(4).expand(2, 4), model.empty_memory(2)
    )[0]
    scorer = WindowScorer(model=model, tgt_len=4)
    assert scorer.max_context == 4
    nats_B1 = scorer.last_nats(text_BN[:, : context + 1])
    assert_close(nats_B1[:, 0], in_training[:, context - 1])
    longer_BN = torch.cat([random_text(2, 3), text_BN], dim=1)
    assert_close(scorer.last_nats(longer_BN), scorer.last_nats(text_BN))


def test_several_last_targets_are_those_of_one_reading() -> None:
    model = small_model(seed=3, mem_len=20)
    text_BN = random_text(2, 12, seed=9)
    expected, _ = read_stream(model, text_BN, tgt_len=11)
    nats_BX = WindowScorer(model=model, tgt_len=3).last_nats(text_BN, num_scored=7)
    assert_close(nats_BX, expected[:, -7:])


@pytest.mark.parametrize("mem_len", [0, 2])
def test_more_scored_tokens_than_a_segment_have_their_whole_context(mem_len: int) -> None:
    model = small_model(seed=3, mem_len=mem_len)
    text_BN = random_text(2, 31, seed=9)  # whole segments, and longer than the useful context
    expected, _ = read_stream(model, text_BN, tgt_len=2)
    nats_BX = WindowScorer(model=model, tgt_len=2).last_nats(text_BN, num_scored=5)
    assert_close(nats_BX, expected[:, -5:])


def test_losses_do_not_depend_on_the_batch_and_stop_at_the_useful_context() -> None:
    model = small_model(seed=3, mem_len=2)
    source = TextSource([[random_text(1, 40, seed=1)[0].tolist()]])
    positions = Positions(np.array([21, 30, 35, 39]), np.zeros(4, np.int64))
    scorer = WindowScorer(model=model, tgt_len=2)
    assert scorer.max_context == 6
    contexts = [2, 4, 7, 9, 20]
    losses = [
        measure_losses(scorer, source, positions, contexts, batch_windows=batch) for batch in (1, 3)
    ]
    np.testing.assert_allclose(losses[0], losses[1], atol=1e-12)
    assert (losses[0][2:] == losses[0][2]).all()
    assert (losses[0][1] != losses[0][2]).all()


def test_damaged_weights_are_named() -> None:
    model = small_model(mem_len=2)
    with torch.no_grad():
        model.layers[0].feed_forward.up.weight[0, 0] = torch.nan
    source = TextSource([[random_text(1, 9)[0].tolist()]])
    positions = Positions(np.array([8]), np.array([0]))
    scorer = WindowScorer(model=model, tgt_len=2)
    with pytest.raises(CheckpointError, match="after 3 tokens is not finite"):
        measure_losses(scorer, source, positions, [3], batch_windows=1)
