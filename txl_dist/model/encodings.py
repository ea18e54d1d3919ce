"""Distance encodings: what attention knows of the distance between a query and a key.

Beside q_i . k_j, the score of query i and key j may have the terms

    u . k_j        (q_i + v) . r_(i-j)        b_(i-j)

and q and k may be turned by their positions. An encoding says which of u, v, r, b and the turning
there are, and what they are made of. They depend on distances alone, so a text has the same scores
read at once and read in segments. The exception is `absolute`, which knows the place in a segment
and therefore goes without memory.

An encoding is a module of every layer. `prepare` makes what all layers of a segment share,
`forward` turns it into the layer's terms. To add one, write it and name it in `ENCODINGS`.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn

from txl_dist.model.config import ModelConfig
from txl_dist.model.distances import distances, encode_distances

# Shapes: T segment tokens, S keys, D d_model, H heads, K d_head

Biases = tuple[Tensor, Tensor]
"""u and v, [H, K] each, of all layers."""

Drop = Callable[[Tensor], Tensor]
"""Dropout of what all layers share."""


@dataclass(frozen=True, kw_only=True)  # no slots: ZeRO stage 3 looks for tensors in `vars` of it
class DistanceTerms:
    """The terms of one layer for S keys, at the distances S - 1 down to 0."""

    content_bias_HK: Tensor | None = None
    """u: how much each head likes a key whatever the query."""
    distance_bias_HK: Tensor | None = None
    """v: how much each head likes a distance whatever the query."""
    distance_HSK: Tensor | None = None
    """r: what the query is multiplied with for each distance."""
    score_HS: Tensor | None = None
    """b: the score of each distance for any query."""
    turn_SK: tuple[Tensor, Tensor] | None = None
    """Cosines and sines for the keys' positions; queries are at the last T of them."""

    def detached(self) -> "DistanceTerms":
        """The same numbers without the graph that made them, to be kept."""
        given: dict[str, Any] = {field.name: getattr(self, field.name) for field in fields(self)}
        for name, x in given.items():
            given[name] = x.detach() if isinstance(x, Tensor) else x
        return DistanceTerms(**given)


class Sinusoidal(nn.Module):
    """The paper's: r is a projection of sines and cosines; u and v are learned.

    Source: Dai et al. 2019, arXiv:1901.02860, section 3.3, equation 5.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.heads = (config.n_head, config.d_head)
        self.project = nn.Linear(config.d_model, config.n_head * config.d_head, bias=False)
        if config.untie_r:
            self.content_bias_HK = nn.Parameter(torch.empty(self.heads))  # u of this layer
            self.distance_bias_HK = nn.Parameter(torch.empty(self.heads))  # v of this layer

    @staticmethod
    def prepare(config: ModelConfig, num_keys: int, like: Tensor, drop: Drop) -> Tensor:
        """Encoded distances [S, D]."""
        return drop(
            encode_distances(
                num_keys,
                config.d_model,
                clamp_len=config.clamp_len,
                dtype=like.dtype,
                device=like.device,
            )
        )

    def forward(self, encoded_SD: Tensor, shared: Biases | None) -> DistanceTerms:
        u_HK, v_HK = shared or (self.content_bias_HK, self.distance_bias_HK)
        r_SHK = self.project(encoded_SD).unflatten(-1, self.heads)
        return DistanceTerms(
            content_bias_HK=u_HK, distance_bias_HK=v_HK, distance_HSK=r_SHK.transpose(0, 1)
        )


class Shaw(nn.Module):
    """A learned r and b for every distance up to `clamp_len`, which the farther ones share; and u.

    Source: Shaw et al. 2018, arXiv:1803.02155, as the paper's code has it for its ablation.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        heads, num_distances = (config.n_head, config.d_head), (config.clamp_len or 0) + 1
        self.content_bias_HK = nn.Parameter(torch.empty(heads))
        self.distance_SHK = nn.Parameter(torch.empty(num_distances, *heads))
        self.score_SH = nn.Parameter(torch.empty(num_distances, config.n_head))

    @staticmethod
    def prepare(config: ModelConfig, num_keys: int, like: Tensor, _: Drop) -> Tensor:
        """The row of each distance, [S]."""
        return distances(num_keys, clamp_len=config.clamp_len, device=like.device).long()

    def forward(self, row_S: Tensor, _: Biases | None) -> DistanceTerms:
        scale = self.distance_SHK.shape[-1] ** -0.5
        return DistanceTerms(
            content_bias_HK=self.content_bias_HK,
            distance_HSK=self.distance_SHK[row_S].transpose(0, 1),
            score_HS=self.score_SH[row_S].t() * scale,
        )


class _Fixed(nn.Module):
    """An encoding without parameters: the prepared terms are those of every layer."""

    def __init__(self, _: ModelConfig) -> None:
        super().__init__()

    def forward(self, terms: DistanceTerms, shared: Biases | None) -> DistanceTerms:
        return terms


class Rotary(_Fixed):
    """Queries and keys are turned in planes by angles that grow with their positions.

    Pairs are (i, i + K / 2). Source: Su et al. 2021, arXiv:2104.09864, section 3.2.
    """

    @staticmethod
    def prepare(config: ModelConfig, num_keys: int, like: Tensor, _: Drop) -> DistanceTerms:
        """Positions count back from the newest key; only differences matter."""
        encoded_SK = encode_distances(
            num_keys, config.d_head, clamp_len=None, dtype=like.dtype, device=like.device
        )
        sin_SK, cos_SK = (half.repeat(1, 2) for half in encoded_SK.chunk(2, dim=-1))
        return DistanceTerms(turn_SK=(cos_SK, -sin_SK))


class Alibi(_Fixed):
    """A score that falls with the distance, by a slope a head.

    Source: Press et al. 2022, arXiv:2108.12409, section 3.
    """

    @staticmethod
    def prepare(config: ModelConfig, num_keys: int, like: Tensor, _: Drop) -> DistanceTerms:
        """Slopes are 2 ** (-8 h / H) for h = 1 .. H."""
        distance_S = distances(num_keys, clamp_len=config.clamp_len, device=like.device)
        head_H = torch.arange(1, config.n_head + 1, dtype=torch.float64, device=like.device)
        slope_H = 2.0 ** (-8.0 * head_H / config.n_head)
        return DistanceTerms(score_HS=(-slope_H[:, None] * distance_S).to(like.dtype))


class Absolute(_Fixed):
    """The vanilla baseline: sines and cosines of the place in the segment, added to the input.

    As in the paper's code, places count down to 0 at the segment's last token.
    """

    @staticmethod
    def prepare(config: ModelConfig, num_keys: int, like: Tensor, _: Drop) -> DistanceTerms:
        """Nothing: attention itself knows no distances."""
        return DistanceTerms()

    @staticmethod
    def add_to_input(config: ModelConfig, x_BTD: Tensor) -> Tensor:
        """The tokens' vectors with their places."""
        return x_BTD + encode_distances(
            x_BTD.shape[1],
            config.d_model,
            clamp_len=config.clamp_len,
            dtype=x_BTD.dtype,
            device=x_BTD.device,
        )


ENCODINGS: dict[str, Any] = {
    "sinusoidal": Sinusoidal,
    "shaw": Shaw,
    "rotary": Rotary,
    "alibi": Alibi,
    "absolute": Absolute,
}
"""By the name that `ModelConfig.distance_encoding` has for it."""


def apply_rotary(x_HBNK: Tensor, turn_SK: tuple[Tensor, Tensor]) -> Tensor:
    """Turn vectors [H, B, N, K] that stand at the last N of the S positions; their dtype stays."""
    cos_NK, sin_NK = (table[-x_HBNK.shape[-2] :] for table in turn_SK)
    first, second = x_HBNK.chunk(2, dim=-1)
    turned = x_HBNK * cos_NK + torch.cat([-second, first], dim=-1) * sin_NK
    return turned.to(x_HBNK.dtype)
