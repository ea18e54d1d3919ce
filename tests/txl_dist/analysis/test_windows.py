"""The loss after exactly c tokens: equal to a plain loop, and older tokens have no influence.

Sampled targets have their whole context, in their document, and differ from each other.
"""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from tests.support.small_models import MODERN, VOCAB_SIZE, random_text, read_stream, small_model
from tests.support.token_sources import TextSource, random_corpus
from txl_dist.analysis.windows import Positions, WindowScorer, measure_losses, sample_positions
from txl_dist.errors import CheckpointError, DataError
from txl_dist.evaluation.breakdown import plan_resampling, resamples
from txl_dist.model.transformer_xl import TransformerXL

MEMORY_MODELS: list[dict[str, Any]] = [
    {"mem_len": 5},
    {"mem_len": 2, "pre_lnorm": True, "untie_r": True},
    {"mem_len": 4, "same_length": True},
    {"mem_len": 7, "distance_encoding": "rotary"},
    {"mem_len": 3, "distance_encoding": "shaw", "clamp_len": 4},
    {"mem_len": 0},
    MODERN["modern"] | {"mem_len": 3},
    {"mem_len": 5, "mem_shares": (0.4, 1.0)},
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
    assert limit == tgt_len * (1 + sum(-(-mem_len // tgt_len) for mem_len in model.config.mem_lens))


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


@pytest.mark.parametrize(
    ("mem_len", "tgt_len", "num_tokens", "num_scored"),
    [(20, 3, 12, 7), (0, 2, 31, 5), (2, 2, 31, 5)],  # the last two: longer than useful
)
def test_several_last_targets_are_those_of_one_reading(
    mem_len: int, tgt_len: int, num_tokens: int, num_scored: int
) -> None:
    """Also more of them than a segment has: each has its whole context."""
    model, text_BN = small_model(seed=3, mem_len=mem_len), random_text(2, num_tokens, seed=9)
    read_len = num_tokens - 1 if mem_len == 20 else tgt_len  # a memory of all tokens, or segments
    expected, _ = read_stream(model, text_BN, tgt_len=read_len)
    nats_BX = WindowScorer(model=model, tgt_len=tgt_len).last_nats(text_BN, num_scored=num_scored)
    assert_close(nats_BX, expected[:, -num_scored:])


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
    with pytest.raises(CheckpointError, match="after 3 tokens is NaN or Inf"):
        measure_losses(scorer, source, positions, [3], batch_windows=1)


LENGTHS = st.lists(st.lists(st.integers(1, 12), min_size=1, max_size=4), min_size=1, max_size=4)


@given(lengths=LENGTHS, context=st.integers(1, 8), num_positions=st.integers(1, 9))
def test_targets_have_their_context_in_their_document(
    lengths: list[list[int]], context: int, num_positions: int
) -> None:
    source = random_corpus(lengths, vocab_size=11, seed=1)
    flat = [length for block in lengths for length in block]
    starts = np.cumsum([0, *flat[:-1]])
    eligible = {
        (int(start) + offset, number)
        for number, (start, length) in enumerate(zip(starts, flat, strict=True))
        for offset in range(context, length)
    }
    how: dict[str, Any] = {"context": context, "num_positions": num_positions, "seed": 3}
    if not eligible:
        with pytest.raises(DataError, match="--max-context"):
            sample_positions(source, **how, reset="document")
        return
    positions = sample_positions(source, **how, reset="document")
    sampled = list(zip(positions.target_N.tolist(), positions.document_N.tolist(), strict=True))
    assert set(sampled) <= eligible
    assert sorted(set(sampled)) == sampled
    assert len(sampled) == min(num_positions, len(eligible))


def test_reset_stream_looks_past_documents_and_the_seed_changes_the_sample() -> None:
    source = random_corpus([[5, 5], [5, 5]], vocab_size=11, seed=1)
    every = sample_positions(source, context=9, num_positions=100, seed=0, reset="stream")
    assert every.target_N.tolist() == list(range(9, 20))
    assert every.document_N.tolist() == [1, *[2] * 5, *[3] * 5]
    first, again, other = (
        sample_positions(source, context=1, num_positions=5, seed=seed, reset="stream")
        for seed in (0, 0, 1)
    )
    assert first.target_N.tolist() == again.target_N.tolist() != other.target_N.tolist()


def test_resamples_draw_whole_documents() -> None:
    document_N = np.repeat(np.arange(12), [1, 2, 3] * 4)
    resampling = plan_resampling(document_N, num_resamples=50, seed=0)
    assert (resampling.unit, resampling.num_units) == ("document", 12)
    sizes = np.bincount(document_N)
    for indices in resamples(document_N, resampling):
        counts = np.bincount(document_N[indices], minlength=12)
        assert (counts % sizes == 0).all()
        assert (counts // sizes).sum() == 12
    by_position = plan_resampling(document_N[:9], num_resamples=50, seed=0)
    assert (by_position.unit, by_position.num_units) == ("position", 9)
    drawn = [*resamples(document_N[:9], by_position)]
    assert {len(indices) for indices in drawn} == {9}
    assert set(np.concatenate(drawn).tolist()) == set(range(9))
