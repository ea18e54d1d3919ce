"""Choosing the next token: temperature, the k likeliest, the nucleus of probability p."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """How to draw. Temperature 0 takes the likeliest token."""

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None

    def __post_init__(self) -> None:
        if not self.temperature >= 0:
            raise ValueError(f"temperature={self.temperature} must not be negative")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k={self.top_k} must be at least 1")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p} must lie in (0, 1]")


def next_token(logits_V: Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    """Draw one token id from unnormalised log-probabilities [V]."""
    if sampling.temperature == 0:
        return int(logits_V.argmax())
    # The maximum goes first, so that no small temperature overflows.
    scaled_V = (logits_V.double() - logits_V.max()) / sampling.temperature
    if sampling.top_k is not None and sampling.top_k < scaled_V.numel():
        # By index, not by value: of tokens as likely as the last kept one, no more than k stay.
        # Of the logits as they are: less the maximum, those that differ least may be equal.
        tokens = logits_V.topk(sampling.top_k).indices
        scaled_V = torch.full_like(scaled_V, -torch.inf).scatter(-1, tokens, scaled_V[tokens])
    probability_V = scaled_V.softmax(dim=-1)
    if sampling.top_p is not None:
        probability_V = _nucleus(probability_V, sampling.top_p)
    return int(torch.multinomial(probability_V, 1, generator=generator))


def _nucleus(probability_V: Tensor, top_p: float) -> Tensor:
    """Zero all but the fewest likeliest tokens that hold at least `top_p` together."""
    ordered_V, token_V = probability_V.sort(descending=True)
    # A token stays if those before it have not reached top_p yet; so the first always stays.
    kept_V = ordered_V.cumsum(dim=-1) - ordered_V < top_p
    return torch.zeros_like(probability_V).scatter(-1, token_V, ordered_V * kept_V)
