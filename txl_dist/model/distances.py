"""Distances between tokens: their sinusoidal encoding, and the relative shift.

Source: Dai et al. 2019, arXiv:1901.02860, section 3.3 and appendix B; `clamp_len` is an option of
the paper's code.
"""

from functools import lru_cache

import torch
from torch import Tensor
from torch.nn.functional import pad

# Shapes: T segment tokens, S keys, D d_model


def distances(num_keys: int, *, clamp_len: int | None, device: torch.device | str) -> Tensor:
    """S - 1, ..., 1, 0 as float64 [S], at most `clamp_len`."""
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
    """Encodings [S, D] of the distances S - 1, ..., 1, 0: sines, then cosines.

    The result is cached, because all segments of a run have the same; do not change it in place.
    """
    # A tensor created in inference mode could not be used in training, and this one is cached.
    with torch.inference_mode(False):
        # In float64, because float32 angles of distances in the thousands are inaccurate.
        distance_S = distances(num_keys, clamp_len=clamp_len, device=device)
        exponent = torch.arange(0, d_model, 2, dtype=torch.float64, device=device) / d_model
        angle = distance_S[:, None] * 10000.0 ** -exponent[None, :]
        return torch.cat([angle.sin(), angle.cos()], dim=-1).to(dtype)


def align_distances(by_distance: Tensor) -> Tensor:
    """The relative shift: scores by distance [..., T, S] to scores by key [..., T, S].

    Column c of the input is distance S - 1 - c. Row t, column s of the output is distance
    M + t - s. Keys in a query's future get scores of other queries and must be masked.
    """
    return align_padded_distances(pad(by_distance, (1, 0)))


def align_padded_distances(by_distance: Tensor) -> Tensor:
    """`align_distances` without a copy, of scores [..., T, 1 + S] with a spare first column.

    Dropping the first T numbers of the flattened rows, and cutting the rest into rows of S, shifts
    row t left by T - 1 - t. The result is a view.
    """
    num_queries, width = by_distance.shape[-2:]
    flat = by_distance.flatten(-2)[..., num_queries:]
    return flat.unflatten(-1, (num_queries, width - 1))
