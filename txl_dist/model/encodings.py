"""Distance encodings: how attention depends on the distance between a query and a key.

In addition to q_i . k_j, the score of query i and key j can have the terms

    u . k_j        (q_i + v) . r_(i-j)        b_(i-j)

and q and k can be rotated by their positions. An encoding decides which of u, v, r, b and the
rotation exist, and computes them. All depend on distances only, so a text has the same scores
whether it is read in one segment or in several. The exception is `Absolute`, which encodes
positions in the segment and therefore allows no memory.

To add an encoding, write a `DistanceEncoding` here and add one entry to `DISTANCE_ENCODINGS` in
choices.py (docs/how_to/add_an_encoding.md). The relative shift and the products that several
implementations of attention share are at the end of this module.

Sources: Dai et al. 2019, arXiv:1901.02860, section 3.3 and appendix B; those of each class.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pkgutil import resolve_name
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad

from txl_dist.model.config import ModelConfig, RotaryScaling

# Shapes: B lanes, T segment tokens, S keys, N either, D d_model, H heads, K d_head

Biases = tuple[Tensor, Tensor]
"""u and v, [H, K] each, shared by all layers."""

DropoutFunction = Callable[[Tensor], Tensor]
"""Dropout of a tensor that all layers share."""


@dataclass(frozen=True, kw_only=True)  # no slots: ZeRO stage 3 searches `vars()` for tensors
class DistanceTerms:
    """The terms of one layer for S keys. Index 0 of S is distance S - 1, the last is distance 0."""

    content_bias_HK: Tensor | None = None
    """u: added to the query where it is multiplied by keys."""
    distance_bias_HK: Tensor | None = None
    """v: added to the query where it is multiplied by r."""
    distance_HSK: Tensor | None = None
    """r: the vector of each distance."""
    score_HS: Tensor | None = None
    """b: added to the scores of each distance."""
    rotary_SK: tuple[Tensor, Tensor] | None = None
    """Cosines and sines for the keys' positions; the queries have the last T of them."""


class DistanceEncoding(nn.Module):
    """One encoding. Every layer has an instance, which holds the layer's parameters, if any.

    `prepare` computes once per segment what all layers share; `forward` makes the layer's terms of
    that. This base class is an encoding without parameters: `prepare` returns the layers' terms.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()

    @staticmethod
    def add_to_input(config: ModelConfig, x_BTD: Tensor) -> Tensor:
        """The token vectors, with their positions if the encoding adds any."""
        return x_BTD

    @staticmethod
    def prepare(config: ModelConfig, num_keys: int, like: Tensor, dropout: DropoutFunction) -> Any:
        """What `forward` needs for S = `num_keys`, with the dtype and device of `like`."""
        return DistanceTerms()

    def forward(self, prepared: Any, shared: Biases | None) -> DistanceTerms:
        """The layer's terms. `shared` is u and v of all layers, or None."""
        return prepared


class Sinusoidal(DistanceEncoding):
    """The paper's: r is a projection of sines and cosines; u and v are learned.

    Source: Dai et al. 2019, arXiv:1901.02860, section 3.3, equation 5.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.heads = (config.n_head, config.d_head)
        self.project = nn.Linear(config.d_model, config.n_head * config.d_head, bias=False)
        if config.untie_r:
            self.content_bias_HK = nn.Parameter(torch.empty(self.heads))  # u of this layer
            self.distance_bias_HK = nn.Parameter(torch.empty(self.heads))  # v of this layer

    @staticmethod
    def prepare(
        config: ModelConfig, num_keys: int, like: Tensor, dropout: DropoutFunction
    ) -> Tensor:
        """Encoded distances [S, D]."""
        encoded_SD = encode_distances(
            num_keys,
            config.d_model,
            clamp_len=config.clamp_len,
            dtype=like.dtype,
            device=like.device,
        )
        return dropout(encoded_SD)

    def forward(self, encoded_SD: Tensor, shared: Biases | None) -> DistanceTerms:
        u_HK, v_HK = shared or (self.content_bias_HK, self.distance_bias_HK)
        r_SHK = self.project(encoded_SD).unflatten(-1, self.heads)
        return DistanceTerms(
            content_bias_HK=u_HK, distance_bias_HK=v_HK, distance_HSK=r_SHK.transpose(0, 1)
        )


class Shaw(DistanceEncoding):
    """Learned r and b for each distance up to `clamp_len`; larger distances share the last. And u.

    Source: Shaw et al. 2018, arXiv:1803.02155, as the paper's code implements it (`attn_type` 1).
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        heads, num_distances = (config.n_head, config.d_head), (config.clamp_len or 0) + 1
        self.content_bias_HK = nn.Parameter(torch.empty(heads))
        self.distance_SHK = nn.Parameter(torch.empty(num_distances, *heads))
        self.score_SH = nn.Parameter(torch.empty(num_distances, config.n_head))

    @staticmethod
    def prepare(
        config: ModelConfig, num_keys: int, like: Tensor, dropout: DropoutFunction
    ) -> Tensor:
        """The row of each distance in the learned tables, int64 [S]."""
        return distances(num_keys, clamp_len=config.clamp_len, device=like.device).long()

    def forward(self, row_S: Tensor, shared: Biases | None) -> DistanceTerms:
        # The paper's code scales b with the other terms of the score.
        scale = self.distance_SHK.shape[-1] ** -0.5
        return DistanceTerms(
            content_bias_HK=self.content_bias_HK,
            distance_HSK=self.distance_SHK[row_S].transpose(0, 1),
            score_HS=self.score_SH[row_S].t() * scale,
        )


class Rotary(DistanceEncoding):
    """Queries and keys are rotated in planes, by angles proportional to their positions.

    The planes are the channel pairs (i, i + K / 2). Source: Su et al. 2021, arXiv:2104.09864,
    section 3.2; scaled frequencies: Chen et al. 2023, arXiv:2306.15595 (linear), and the code of
    Llama 3.1.
    """

    @staticmethod
    def prepare(
        config: ModelConfig, num_keys: int, like: Tensor, dropout: DropoutFunction
    ) -> DistanceTerms:
        """Positions count back from the newest key; scores depend on differences only."""
        # The encoding of the paper holds exactly the sines and cosines of the rotation angles.
        encoded_SK = encode_distances(
            num_keys,
            config.d_head,
            clamp_len=None,
            dtype=like.dtype,
            device=like.device,
            base=config.rotary_base,
            scaling=config.rotary_scaling,
        )
        sin_SK, cos_SK = (half.repeat(1, 2) for half in encoded_SK.chunk(2, dim=-1))
        # Distances count down where positions count up, hence the sign.
        return DistanceTerms(rotary_SK=(cos_SK, -sin_SK))


class Alibi(DistanceEncoding):
    """A score that falls linearly with the distance, with a fixed slope per head.

    Source: Press et al. 2022, arXiv:2108.12409, section 3.
    """

    @staticmethod
    def prepare(
        config: ModelConfig, num_keys: int, like: Tensor, dropout: DropoutFunction
    ) -> DistanceTerms:
        """Slopes are 2 ** (-8 h / H) for h = 1 .. H."""
        distance_S = distances(num_keys, clamp_len=config.clamp_len, device=like.device)
        head_H = torch.arange(1, config.n_head + 1, dtype=torch.float64, device=like.device)
        # Steep slopes restrict a head to near tokens; flat ones let it use distant tokens.
        slope_H = 2.0 ** (-8.0 * head_H / config.n_head)
        return DistanceTerms(score_HS=(-slope_H[:, None] * distance_S).to(like.dtype))


class Absolute(DistanceEncoding):
    """The vanilla Transformer's: sines and cosines of the position, added to the input vectors.

    As in the paper's code (`attn_type` 2), positions count down to 0 at the segment's last token.
    """

    @staticmethod
    def add_to_input(config: ModelConfig, x_BTD: Tensor) -> Tensor:
        return x_BTD + encode_distances(
            x_BTD.shape[1],
            config.d_model,
            clamp_len=config.clamp_len,
            dtype=x_BTD.dtype,
            device=x_BTD.device,
        )


def encoding_class(config: ModelConfig) -> type[DistanceEncoding]:
    """The class of the config's `distance_encoding`."""
    return resolve_name(config.encoding.implementation)


def apply_rotary(x_HBNK: Tensor, rotary_SK: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate vectors [H, B, N, K] at the last N of S positions. The dtype does not change."""
    rotated_HBNK: Tensor = _Rotate.apply(x_HBNK, *rotary_SK)
    return rotated_HBNK


class _Rotate(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos_SK: Tensor, sin_SK: Tensor) -> Tensor:
        ctx.save_for_backward(cos_SK, sin_SK)
        return rotated(x, cos_SK, sin_SK)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        cos_SK, sin_SK = ctx.saved_tensors
        return rotated(gradients[0], cos_SK, -sin_SK), None, None


def rotated(x_HBNK: Tensor, cos_SK: Tensor, sin_SK: Tensor) -> Tensor:
    """`apply_rotary` without a gradient. The inverse has `-sin_SK`."""
    cos_NK, sin_NK = (table[-x_HBNK.shape[-2] :] for table in (cos_SK, sin_SK))
    half, wide = x_HBNK.shape[-1] // 2, torch.promote_types(x_HBNK.dtype, cos_SK.dtype)
    x = x_HBNK.to(wide)
    out = x * cos_NK
    # In place on both halves: two passes instead of five over tensors of this size.
    out[..., :half].addcmul_(x[..., half:], sin_NK[..., :half].to(wide), value=-1)
    out[..., half:].addcmul_(x[..., :half], sin_NK[..., half:].to(wide))
    return out.to(x_HBNK.dtype)


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
    base: float = 10000.0,
    scaling: RotaryScaling | None = None,
) -> Tensor:
    """Encodings [S, D] of the distances S - 1, ..., 1, 0: sines, then cosines.

    The result is cached, because all segments of a run have the same; do not change it in place.
    """
    # A tensor created in inference mode could not be used in training, and this one is cached.
    with torch.inference_mode(False):
        # In float64, because float32 angles of distances in the thousands are inaccurate.
        distance_S = distances(num_keys, clamp_len=clamp_len, device=device)
        exponent = torch.arange(0, d_model, 2, dtype=torch.float64, device=device) / d_model
        frequency = base ** -exponent[None, :]
        if scaling is not None:
            frequency = scaled_frequency(frequency, scaling)
        angle = distance_S[:, None] * frequency
        return torch.cat([angle.sin(), angle.cos()], dim=-1).to(dtype)


def scaled_frequency(frequency: Tensor, scaling: RotaryScaling) -> Tensor:
    """Angles per token of planes that turned by `frequency` before `scaling`."""
    slow = frequency / scaling.factor
    if scaling.kind == "linear":
        return slow
    turns = scaling.original_len * frequency / (2 * math.pi)
    share = (turns - scaling.low_turns) / (scaling.high_turns - scaling.low_turns)
    return torch.lerp(slow, frequency, share.clamp(0, 1))


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


# Shapes: B lanes, T segment tokens, S keys, R = 1 + S, H heads, K d_head, N = H B

Heads = tuple[int, int]
"""H and K."""


def heads_first(key_value_BNX: Tensor, heads: Heads) -> tuple[Tensor, Tensor]:
    """Keys and values [H, B, N, K], views of their projection [B, N, X]."""
    keys, values = key_value_BNX.unflatten(-1, (2, *heads)).permute(2, 3, 0, 1, 4).unbind()
    return keys, values


def cast_like(x: Tensor | None, q_HBTK: Tensor) -> Tensor | None:
    """`x` in the dtype of the queries, which under autocast is not that of the parameters."""
    return None if x is None else x.to(q_HBTK.dtype)


def pad_channels(x: Tensor) -> Tensor:
    """`x` with its last dimension padded by zeros to a multiple of 16.

    Then rows are multiples of 16 bytes in every dtype. GPUs load those asynchronously and in few
    instructions, and some of torch's kernels require them. The paper's base has a d_head of 41.
    """
    return pad(x, (0, -x.shape[-1] % 16)) if x.shape[-1] % 16 else x


def scaled_query(q_HBTK: Tensor, bias_HK: Tensor | None) -> Tensor:
    """(q + bias) / sqrt(K), contiguous. Queries are scaled because scores are larger tensors."""
    scale = q_HBTK.shape[-1] ** -0.5
    if bias_HK is None:
        return (q_HBTK * scale).contiguous()
    bias_H11K = (bias_HK * scale)[:, None, None]
    if torch.is_grad_enabled():  # `out=` cannot be differentiated
        return torch.add(bias_H11K, q_HBTK, alpha=scale).contiguous()
    packed = torch.empty(q_HBTK.shape, dtype=q_HBTK.dtype, device=q_HBTK.device)
    return torch.add(bias_H11K, q_HBTK, alpha=scale, out=packed)


def padded_distance_scores(q_HBTK: Tensor, r_HRK: Tensor, b_HS: Tensor | None) -> Tensor:
    """Scores by distance, aligned with the keys: [N, T, S], a view into the product.

    Row 0 of `r_HRK` is padding.
    """
    num_heads, num_lanes, num_queries, _ = q_HBTK.shape
    product_HXR = torch.bmm(q_HBTK.flatten(1, 2), r_HRK.transpose(1, 2))
    if b_HS is not None:
        product_HXR = product_HXR + pad(b_HS, (1, 0))[:, None]
    return align_padded_distances(product_HXR.view(num_heads * num_lanes, num_queries, -1))


def align_constant_scores(score_HS: Tensor, mask_BTS: Tensor) -> Tensor:
    """Scores that depend on the distance alone, aligned with the keys: [H, 1, T, S]."""
    return align_distances(score_HS[:, None, None].expand(-1, 1, mask_BTS.shape[-2], -1))
