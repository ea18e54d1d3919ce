"""Models whose attention is computed for one token after another, from the rows that it sees."""

from typing import Any

import torch
from torch import Tensor

from txl_dist.model.transformer_xl import TransformerXL

# Shapes: S rows that a token sees, its own included, D d_model


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
