"""Models whose attention is computed for one token after another, from the rows that it sees."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.testing import assert_close

from tests.support.small_models import random_text
from txl_dist.model.transformer_xl import TransformerXL

# Shapes: B lanes, N tokens of a lane, S rows that a token sees, its own included, D d_model

BEGINNINGS = [(0,), (0, 6), (0, 5, 8, 11)]
"""Of the documents of three lanes."""


def ages(beginnings: tuple[int, ...], num_tokens: int) -> list[int]:
    """Of the tokens of a lane whose documents begin at these positions."""
    return [
        position - max(b for b in beginnings if b <= position) for position in range(num_tokens)
    ]


def attend(model: TransformerXL, layer: Any, rows_SD: Tensor) -> Tensor:
    """The layer's output [D] for the last of these inputs, which sees all of them."""
    age_BT = torch.tensor([[len(rows_SD) - 1]])
    context = model._segment_context(rows_SD[None, -1:], age_BT, len(rows_SD) - 1, None, None)
    return layer(rows_SD[None, -1:], rows_SD[None, :-1], context)[0, 0]


def assert_losses(
    model: TransformerXL,
    by_hand: Callable[[Tensor, list[int]], Tensor],
    *,
    tgt_len: int,
    num_segments: int,
) -> None:
    """The losses are those [N] that `by_hand` has of the text [N + 1] and the ages of a lane."""
    num_tokens = tgt_len * num_segments
    text_BN = random_text(len(BEGINNINGS), num_tokens + 1)
    age_BN = torch.tensor([ages(each, num_tokens) for each in BEGINNINGS])
    memory = model.empty_memory(len(BEGINNINGS))
    nats_BN, _ = model(text_BN[:, :-1], text_BN[:, 1:], age_BN, memory, None, num_segments)
    for text_N, nats_N, age_N in zip(text_BN, nats_BN, age_BN, strict=True):
        assert_close(nats_N, by_hand(text_N, age_N.tolist()))
