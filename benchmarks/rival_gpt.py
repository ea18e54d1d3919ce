"""A GPT without memory, to compare with: learned absolute positions, random windows, AdamW.

The architecture and the training of nanoGPT's small models: pre-norm LayerNorm, GELU, tied
weights, causal attention inside one window, each batch of windows at random places. Held-out tokens
are scored with at least half a window before them, from windows that overlap by half.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention

# Shapes: B windows, T tokens of a window, D width, H heads, K head size, N tokens of a text

WINDOW = 256


@dataclass(frozen=True)
class GptConfig:
    vocab_size: int
    n_layer: int = 4
    d_model: int = 128
    n_head: int = 4


class Block(nn.Module):
    def __init__(self, config: GptConfig) -> None:
        super().__init__()
        width = config.d_model
        self.n_head = config.n_head
        self.attention_norm, self.inner_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x_BTD: Tensor) -> Tensor:
        qkv = self.qkv(self.attention_norm(x_BTD)).unflatten(-1, (3, self.n_head, -1))
        q_BHTK, k_BHTK, v_BHTK = qkv.permute(2, 0, 3, 1, 4).unbind()
        mixed = scaled_dot_product_attention(q_BHTK, k_BHTK, v_BHTK, is_causal=True)
        x_BTD = x_BTD + self.out(mixed.transpose(1, 2).flatten(2))
        return x_BTD + self.down(gelu(self.up(self.inner_norm(x_BTD))))


class Gpt(nn.Module):
    """forward(token_BT) -> logits [B, T, V]."""

    def __init__(self, config: GptConfig, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.table = nn.Embedding(config.vocab_size, config.d_model)
        self.positions = nn.Embedding(WINDOW, config.d_model)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.norm = nn.LayerNorm(config.d_model)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                # Output projections are smaller by the number of residual sums.
                is_output = name.endswith(("out.weight", "down.weight"))
                std = 0.02 / (2 * config.n_layer) ** 0.5 if is_output else 0.02
                nn.init.normal_(parameter, std=std)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, token_BT: Tensor) -> Tensor:
        x_BTD = self.table(token_BT) + self.positions.weight[: token_BT.shape[1]]
        for block in self.blocks:
            x_BTD = block(x_BTD)
        return self.norm(x_BTD) @ self.table.weight.T


def random_windows(
    token_N: np.ndarray, num_windows: int, generator: torch.Generator, length: int = WINDOW
) -> Tensor:
    """Windows [B, T + 1] of T = `length` at random places."""
    starts = torch.randint(len(token_N) - length - 1, (num_windows,), generator=generator)
    rows = [token_N[start : start + length + 1].astype(np.int64) for start in starts.tolist()]
    return torch.from_numpy(np.stack(rows))


def nats(model: Gpt, window_BT: Tensor) -> Tensor:
    """Loss of each token after the first, [B, T]."""
    logits = model(window_BT[:, :-1])
    return cross_entropy(logits.transpose(1, 2), window_BT[:, 1:], reduction="none")


@torch.no_grad()
def held_out_nats(
    nats_of: Callable[[Tensor], Tensor], token_N: np.ndarray, length: int = WINDOW
) -> float:
    """Mean over all tokens after the first. nats_of: windows [B, T + 1] to losses [B, T]."""
    half = length // 2
    text = torch.from_numpy(token_N.astype(np.int64))
    window_NT = text.unfold(0, length + 1, half) if len(text) > length else text[:0, None]
    batches = list(window_NT.split(32)) if len(window_NT) else []
    rest = text[None, len(window_NT) * half :]
    if not batches or rest.shape[1] > half + 1:
        batches.append(rest)
    total, count = 0.0, 0
    for number, window_BT in enumerate(batches):
        loss_BT = nats_of(window_BT)
        first = loss_BT[0, :half] if number == 0 else loss_BT[0, :0]  # nothing is before it
        for scored in (first, loss_BT[:, half:]):
            total, count = total + float(scored.sum()), count + scored.numel()
    return total / count


def optimizer_of(model: Gpt, lr: float) -> torch.optim.Optimizer:
    """AdamW with weight decay 0.1 of the matrices, betas 0.9 and 0.99."""
    matrices = [p for p in model.parameters() if p.dim() == 2]
    rest = [p for p in model.parameters() if p.dim() != 2]
    groups = [
        {"params": matrices, "weight_decay": 0.1},
        {"params": rest, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.99), fused=True)
