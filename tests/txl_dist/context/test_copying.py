"""RECL of a model trained to copy at a fixed distance is that distance, within one step."""

import numpy as np
import pytest
import torch

from tests.support.token_sources import TextSource
from txl_dist.context.losses import measure_losses
from txl_dist.context.positions import sample_positions
from txl_dist.context.recl import relative_effective_context_length
from txl_dist.context.windows import WindowScorer
from txl_dist.model.config import ModelConfig
from txl_dist.model.transformer_xl import TransformerXL

DISTANCE, VOCAB_SIZE, TGT_LEN = 12, 7, 5


def copied_text(num_lanes: int, num_tokens: int, *, seed: int) -> np.ndarray:
    """Texts [B, N] of random tokens, where token t + DISTANCE equals token t."""
    period = np.random.default_rng(seed).integers(0, VOCAB_SIZE, (num_lanes, DISTANCE))
    return np.tile(period, (1, -(-num_tokens // DISTANCE)))[:, :num_tokens]


def trained_copier() -> TransformerXL:
    """Trained on single segments; the encoded distances are the same with a memory."""
    model = copier(mem_len=0)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for step in range(60):
        text_BN = torch.from_numpy(copied_text(32, 3 * DISTANCE + 1, seed=step))
        age_BT = torch.arange(3 * DISTANCE).expand(32, -1)
        nats_BT, _ = model(text_BN[:, :-1], text_BN[:, 1:], age_BT, model.empty_memory(32))
        nats_BT[:, DISTANCE:].mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def copier(*, mem_len: int) -> TransformerXL:
    config = ModelConfig(
        vocab_size=VOCAB_SIZE,
        n_layer=1,
        d_model=32,
        n_head=2,
        d_head=16,
        d_inner=32,
        mem_len=mem_len,
        tie_weight=False,
        init_std=0.1,
    )
    return TransformerXL(config, seed=1)


@pytest.mark.slow
def test_the_copying_distance_is_found() -> None:
    documents = [text.tolist() for text in copied_text(40, 60, seed=10**6)]
    source = TextSource([documents])
    contexts = list(range(2, 31, 2))
    positions = sample_positions(source, context=30, num_positions=120, seed=0, reset="document")
    with_memory, without_memory = copier(mem_len=15), trained_copier()
    with_memory.load_state_dict(without_memory.state_dict())
    losses = np.stack(
        [
            measure_losses(
                WindowScorer(model=model, tgt_len=TGT_LEN),
                source,
                positions,
                contexts,
                batch_windows=50,
            )
            for model in (with_memory, without_memory)
        ]
    )
    copies = losses[0].mean(axis=-1)
    assert copies[contexts.index(DISTANCE) :].max() < 0.1
    assert copies[: contexts.index(DISTANCE)].min() > 1.5
    reaching, short = relative_effective_context_length(
        losses, contexts, r=0.5, max_contexts=[30, TGT_LEN]
    )
    assert abs(reaching.last_gain_ends - DISTANCE) <= 2
    assert not reaching.is_lower_bound
    # Without memory, the same weights see only tgt_len tokens.
    assert short.last_gain_ends <= TGT_LEN
    # The procedure of the appendix stops at the first step without gain, so there the first step
    # must cross the distance.
    coarse = [contexts.index(context) for context in (8, 16, 24)]
    length, _ = relative_effective_context_length(losses[:, coarse], [8, 16, 24], r=0.5)
    assert length.recl == 16
