"""Which keys a query may see: one rule for empty memory, document starts and `same_length`.

    key j is visible to query i  iff  0 <= i - j <= age(i)  (and i - j < mem_len: `same_length`)

The age of a token is its distance to the first token of its document or stream
(data_pipeline/streams/segments.py).
"""

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

# Shapes: B lanes, T segment tokens, M memory tokens, S = M + T keys


@dataclass(frozen=True, kw_only=True, slots=True)
class Visibility:
    """The rule for one segment, in the two ways in which forms of attention apply it."""

    reach_BT: Tensor
    """A query sees the keys at distances 0 to its reach. B is the number of lanes, or 1."""
    mask_BTS: Tensor | None
    """To add to scores: 0 where a query may see a key, else minus infinity. None if the form of
    attention compares distances with `reach_BT` (`AttentionForm.masks_by_reach`)."""

    @classmethod
    def of(
        cls,
        age_BT: Tensor,
        *,
        mem_len: int,
        same_length: bool,
        mask_dtype: torch.dtype | None,
    ) -> Self:
        """`mask_dtype`: None leaves out the mask."""
        reach_BT = age_BT.clamp(max=mem_len - 1) if same_length else age_BT
        if mask_dtype is None:
            return cls(reach_BT=reach_BT, mask_BTS=None)
        visible_BTS = visible_keys(age_BT, mem_len=mem_len, same_length=same_length)
        return cls(reach_BT=reach_BT, mask_BTS=mask_scores(visible_BTS, mask_dtype))

    @property
    def mask(self) -> Tensor:
        """`mask_BTS`, for a form that needs it."""
        assert self.mask_BTS is not None, "the form of attention was chosen as masks_by_reach"
        return self.mask_BTS


def visible_keys(age_BT: Tensor, *, mem_len: int, same_length: bool) -> Tensor:
    """Booleans [B, T, S]. Every query sees at least itself, so no softmax row is empty.

    Query t is at position M + t of the keys, with M = `mem_len`.
    """
    # The same code for training, evaluation and a KVCache. Its mask and the addition of it cost
    # 0.4 % of a training step of `txl bench model`.
    tgt_len = age_BT.shape[1]
    position_T = torch.arange(mem_len, mem_len + tgt_len, device=age_BT.device)
    position_S = torch.arange(mem_len + tgt_len, device=age_BT.device)
    distance_TS = position_T[:, None] - position_S[None, :]
    allowed_TS = distance_TS >= 0
    if same_length:
        allowed_TS &= distance_TS < mem_len
    return allowed_TS & (distance_TS <= age_BT[:, :, None])


def mask_scores(visible_BTS: Tensor, dtype: torch.dtype) -> Tensor:
    """The mask to add to scores, [B, T, S]: 0 for visible keys, minus infinity for others."""
    mask_BTS = torch.zeros(visible_BTS.shape, dtype=dtype, device=visible_BTS.device)
    return mask_BTS.masked_fill_(~visible_BTS, -torch.inf)
