"""Distances between tokens: their sinusoidal encoding and their alignment with keys.

Source: Dai et al. 2019, arXiv:1901.02860, section 3.3 and appendix B; `clamp_len` is the option of
that name in the paper's code.
"""

from functools import lru_cache

import torch
from torch import Tensor
from torch.nn.functional import pad

# Shapes: T segment tokens, S keys, D d_model


def distances(num_keys: int, *, clamp_len: int | None, device: torch.device | str) -> Tensor:
    """S - 1, ..., 1, 0 as float64 [S], none above `clamp_len`."""
    distance_S = torch.arange(num_keys - 1, -1, -1, dtype=torch.float64, device=device)
    return distance_S if clamp_len is None else distance_S.clamp(max=clamp_len)


@lru_cache(maxsize=8)
def encode_distances(
    num_keys: int,
    d_model: int,
    *,
    clamp_len: int | None,
    dtype: torch.dtype,
    device: torch.device | str,
) -> Tensor:
    """Encodings [S, D] of the distances S - 1, ..., 1, 0: sines, then cosines. Not to be changed.

    Computed in float64 and rounded once: in float32 the angle of a distance of thousands is coarse.
    Kept for the next call, because every segment of a run asks for the same.
    """
    with torch.inference_mode(False):  # or a kept tensor of inference could not be trained with
        distance_S = distances(num_keys, clamp_len=clamp_len, device=device)
        exponent = torch.arange(0, d_model, 2, dtype=torch.float64, device=device) / d_model
        angle = distance_S[:, None] * 10000.0 ** -exponent[None, :]
        return torch.cat([angle.sin(), angle.cos()], dim=-1).to(dtype)


def align_distances(by_distance: Tensor) -> Tensor:
    """From scores by distance to scores by key: [..., T, S] -> [..., T, S] (the relative shift).

    Column c of the input belongs to distance S - 1 - c. Row t of the output has at key s the score
    of distance M + t - s. Entries of keys in a query's future are meaningless and must be masked.
    """
    return align_padded_distances(pad(by_distance, (1, 0)))


def align_padded_distances(by_distance: Tensor) -> Tensor:
    """`align_distances` for scores with a column to spare in front, [..., T, 1 + S], as a view.

    With rows one longer than the keys, dropping the first T scores of the flattened rows moves row
    t left by T - 1 - t, which is the shift.
    """
    num_queries, width = by_distance.shape[-2:]
    flat = by_distance.flatten(-2)[..., num_queries:]
    return flat.unflatten(-1, (num_queries, width - 1))
