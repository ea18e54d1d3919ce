"""Sampling the next token: temperature, top-k and top-p (nucleus)."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """Sampling options. Temperature 0 is greedy: always the most likely token."""

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None

    def __post_init__(self) -> None:
        if not self.temperature >= 0:
            raise ValueError(f"temperature={self.temperature} must not be negative")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k={self.top_k} must be at least 1")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p} must be in (0, 1]")


def next_token(logits_V: Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    """Sample one token id from logits [V]. Top-k comes first, then temperature, then top-p."""
    if sampling.temperature == 0:
        return int(logits_V.argmax())
    # Subtract the maximum first, so that division by a small temperature cannot overflow.
    scaled_V = (logits_V.double() - logits_V.max()) / sampling.temperature
    if sampling.top_k is not None and sampling.top_k < scaled_V.numel():
        # By index, because a comparison with the k-th value would keep more than k tokens if
        # several are equal to it. From raw logits, because subtracting the maximum in floating
        # point can make different logits equal.
        tokens = logits_V.topk(sampling.top_k).indices
        scaled_V = torch.full_like(scaled_V, -torch.inf).scatter(-1, tokens, scaled_V[tokens])
    probability_V = scaled_V.softmax(dim=-1)
    if sampling.top_p is not None:
        probability_V = _nucleus(probability_V, sampling.top_p)
    return int(torch.multinomial(probability_V, 1, generator=generator))


def _nucleus(probability_V: Tensor, top_p: float) -> Tensor:
    """Keep the smallest set of most likely tokens with a total of at least `top_p`; zero others."""
    ordered_V, token_V = probability_V.sort(descending=True)
    # A token is kept if the more likely ones sum to less than top_p, so the first always is.
    is_kept_V = ordered_V.cumsum(dim=-1) - ordered_V < top_p
    return torch.zeros_like(probability_V).scatter(-1, token_V, ordered_V * is_kept_V)
