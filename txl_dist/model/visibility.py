"""Which keys a query may see: one rule for empty memory, document starts and `same_length`.

    key j is visible to query i  iff  0 <= i - j <= age(i)  (and i - j < mem_len: `same_length`)

The age of a token is its distance to the first token of its document or stream
(data_pipeline/streams/segments.py).
"""

import torch
from torch import Tensor

# Shapes: B lanes, T segment tokens, M memory tokens, S = M + T keys


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
