"""Which keys a query may see: one rule for empty memory, document starts and `same_length`.

Key j is visible to query i iff 0 <= i - j <= age(i), and i - j < mem_len under `same_length`.
`age` counts tokens since the document or the stream began (data_pipeline/streams/segments.py).
"""

import torch
from torch import Tensor

# Shapes: B lanes, T segment tokens, M memory tokens, S = M + T keys


def visible_keys(age_BT: Tensor, *, mem_len: int, same_length: bool) -> Tensor:
    """Booleans [B, T, S]; a query always sees itself, so no row is empty.

    Query t stands at position M + t of the keys, where M is `mem_len`.
    """
    tgt_len = age_BT.shape[1]
    position_T = torch.arange(mem_len, mem_len + tgt_len, device=age_BT.device)
    position_S = torch.arange(mem_len + tgt_len, device=age_BT.device)
    distance_TS = position_T[:, None] - position_S[None, :]
    allowed_TS = distance_TS >= 0
    if same_length:
        allowed_TS &= distance_TS < mem_len
    return allowed_TS & (distance_TS <= age_BT[:, :, None])


def mask_scores(visible_BTS: Tensor, dtype: torch.dtype) -> Tensor:
    """What to add to scores: 0 for a visible key, minus infinity for another, [B, T, S]."""
    mask_BTS = torch.zeros(visible_BTS.shape, dtype=dtype, device=visible_BTS.device)
    return mask_BTS.masked_fill_(~visible_BTS, -torch.inf)
