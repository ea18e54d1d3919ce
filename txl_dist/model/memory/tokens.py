"""`model.memory: tokens` and `recurrent+tokens`: vectors that are read and written as tokens.

    segment'  = [read, m tokens | segment, T tokens | write, m tokens]
    read      = norm(state)        of the segment before; norm only in pre-norm models
    write     = read               or a parameter, if the document of the last token is new
    state'    = the last layer's output at the write tokens

The layers compute the added tokens like any others; there is no loss at them. They are computed at
distances as if they were text. Documents are kept apart by ages, at any place of a segment:

    a token sees the read tokens if its document began before the segment,
    a write token sees the last document only, and the read tokens by the same rule.

`recurrent+tokens` also keeps the layers' inputs of the last `mem_len` tokens (recurrent.py), but
not those of added tokens: they come before the read tokens.

A gradient reaches what is written only from the losses of later segments of the same step, so this
needs `training.backprop_segments`. Source: Bulatov et al. 2022, arXiv:2207.06881, section 3.
Deviation: a document does not read the parameter at its start. It is the input of its first write
tokens, so a document computes the same wherever in a segment it begins.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from txl_dist.model.config import ModelConfig
from txl_dist.model.layer_parts import new_norm
from txl_dist.model.memory import MemoryKind, SequenceState, stored_like
from txl_dist.model.memory.recurrent import Recurrent, RecurrentMemory

# Shapes: B lanes, T segment tokens, m memory tokens, D d_model


class MemoryTokens(MemoryKind):
    """With a recurrent memory, which has no tokens for `model.memory: tokens`."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.recurrent = Recurrent(replace(config, mem_len=config.tokens_kept))

    def receptive_tokens(self, tgt_len: int) -> None:
        return None

    def empty(
        self,
        num_lanes: int,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> "TokensState":
        """The tokens are never narrower than fp32."""
        shape = num_lanes, self.config.memory_tokens, self.config.d_model
        wide = torch.promote_types(dtype, torch.float32)
        return TokensState(
            torch.zeros(shape, dtype=wide, device=device),
            self.recurrent.empty(num_lanes, dtype=dtype, device=device),
        )

    def added_tokens(self) -> "ReadAndWriteTokens":
        return ReadAndWriteTokens(self.config)

    def fits(self, saved: ModelConfig) -> bool:
        return self.recurrent.fits(saved) and saved.memory_tokens == self.config.memory_tokens


@dataclass(frozen=True)
class TokensState(SequenceState):
    tokens_BmD: Tensor
    """The last layer's output at the write tokens."""
    recurrent: RecurrentMemory

    @property
    def num_pasts(self) -> tuple[int, ...]:
        return self.recurrent.num_pasts

    @property
    def residual_dtype(self) -> torch.dtype:
        return self.recurrent.residual_dtype

    def past(self, number: int, x_BTD: Tensor) -> Tensor:
        return self.recurrent.past(number, x_BTD)

    def after(self, hidden_BTD: Sequence[Tensor], age_BT: Tensor) -> "TokensState":
        m, tgt_len = self.tokens_BmD.shape[1], age_BT.shape[1]
        own = [x_BTD[:, m : m + tgt_len] for x_BTD in hidden_BTD]
        written_BmD = stored_like(self.tokens_BmD, hidden_BTD[-1][:, -m:])
        return TokensState(written_BmD, self.recurrent.after(own, age_BT))

    def tensors(self) -> dict[str, Tensor]:
        recurrent = self.recurrent.tensors().items()
        return {"tokens": self.tokens_BmD} | {name: x for name, x in recurrent if x.shape[1]}

    def load_row(self, lane: int, saved: Mapping[str, Tensor]) -> None:
        """If `saved` has more tokens of a recurrent memory, the newest ones."""
        self.tokens_BmD[lane].copy_(saved["tokens"])
        layers = self.recurrent.row(lane)
        kept = {name: saved.get(name, row) for name, row in layers.items()}
        self.recurrent.load_row(lane, kept)

    def check(self, config: ModelConfig, num_lanes: int) -> None:
        super().check(config, num_lanes)
        if len(self.recurrent.layers) != config.n_layer:  # layers without tokens have no name
            raise ValueError(
                f"the memory is that of {len(self.recurrent.layers)} layers: expected "
                f"{config.n_layer}"
            )

    def select(self, lanes: Sequence[int], num_removed: Sequence[int]) -> "TokensState":
        recurrent: Any = self.recurrent.select(lanes, num_removed)
        return TokensState(self.tokens_BmD[list(lanes)], recurrent)


class ReadAndWriteTokens(nn.Module):
    """m tokens before and m after a segment, which the layers compute like its own.

    forward(x_BTD, age_BT, state) -> the segment with them, the input of the first layer, and its
    ages, which say which keys a token sees (`SequenceState.reach`). `removed` is the opposite. The
    first value of the tokens is a parameter.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.initial_mD = nn.Parameter(torch.empty(config.memory_tokens, config.d_model))
        # The output of a pre-norm model is not normalised, and would grow from segment to segment.
        self.norm = new_norm(config) if config.pre_lnorm else nn.Identity()

    def forward(self, x_BTD: Tensor, age_BT: Tensor, state: SequenceState) -> tuple[Tensor, Tensor]:
        assert isinstance(state, TokensState)
        # In this dtype, because the norm of a model in bf16 has gains in bf16.
        state_BmD = state.tokens_BmD.to(self.initial_mD.dtype)
        read_BmD = self.norm(state_BmD).to(x_BTD.dtype)
        num_lanes, m, _ = read_BmD.shape
        age_BT = age_BT.expand(num_lanes, -1)
        # Whether the document of each token began before the segment.
        is_old_BT = age_BT > torch.arange(age_BT.shape[1], device=age_BT.device)
        write_BmD = torch.where(is_old_BT[:, -1:, None], read_BmD, self.initial_mD.to(x_BTD.dtype))
        slot_m = torch.arange(m, device=age_BT.device, dtype=age_BT.dtype)
        read_age_Bm = age_BT[:, :1] + slot_m
        # Tokens of the same document before each token, with the read tokens if it sees them.
        age_BT = age_BT + m * is_old_BT
        write_age_Bm = age_BT[:, -1:] + 1 + slot_m
        return (
            torch.cat([read_BmD, x_BTD, write_BmD], dim=1),
            torch.cat([read_age_Bm, age_BT, write_age_Bm], dim=1),
        )

    def removed(self, x_BTD: Tensor) -> Tensor:
        m = len(self.initial_mD)
        return x_BTD[:, m:-m]
