"""Sampling the next token: temperature, top-k and top-p (nucleus)."""

from collections.abc import Sequence

import torch
from torch import Tensor

from txl_dist.errors import TxlError
from txl_dist.generation.options import Sampling

# Shapes: B lanes, V vocabulary


def next_tokens(
    logits_BV: Tensor, sampling: Sampling, generators: Sequence[torch.Generator]
) -> list[int]:
    """Sample one token id per lane. Top-k comes first, then temperature, then top-p.

    Each lane draws from its own generator, so its tokens do not depend on the other lanes. Raises
    TxlError if a lane's largest logit is not finite.
    """
    if sampling.temperature == 0:
        return logits_BV.argmax(dim=-1).tolist()
    # Subtract the maximum first, so that division by a small temperature cannot overflow.
    largest_B1 = logits_BV.amax(dim=-1, keepdim=True)
    if not largest_B1.isfinite().all():
        raise TxlError(
            "the model's logits are not finite, so no token can be drawn. Its training has "
            "diverged, or its precision is too low: try --precision fp32"
        )
    scaled_BV = (logits_BV.double() - largest_B1) / sampling.temperature
    if sampling.top_k is not None and sampling.top_k < scaled_BV.shape[-1]:
        # By index, because a comparison with the k-th value would keep more than k tokens if
        # several are equal to it. From raw logits, because subtracting the maximum in floating
        # point can make different logits equal.
        tokens = logits_BV.topk(sampling.top_k).indices
        kept_BV = torch.full_like(scaled_BV, -torch.inf)
        scaled_BV = kept_BV.scatter(-1, tokens, scaled_BV.gather(-1, tokens))
    probability_BV = scaled_BV.softmax(dim=-1)
    if sampling.top_p is not None:
        probability_BV = _nucleus(probability_BV, sampling.top_p)
    # A token with probability p has the largest p / e, e exponentially distributed, with
    # probability p. torch.multinomial draws the same numbers, but from one generator for all lanes.
    exponential_BV = torch.empty_like(probability_BV)
    for exponential_V, generator in zip(exponential_BV, generators, strict=True):
        exponential_V.exponential_(generator=generator)
    return (probability_BV / exponential_BV).argmax(dim=-1).tolist()


def _nucleus(probability_BV: Tensor, top_p: float) -> Tensor:
    """Keep the smallest set of most likely tokens with a total of at least `top_p`; zero others."""
    ordered_BV, token_BV = probability_BV.sort(descending=True)
    # A token is kept if the more likely ones sum to less than top_p, so the first always is.
    is_kept_BV = ordered_BV.cumsum(dim=-1) - ordered_BV < top_p
    return torch.zeros_like(probability_BV).scatter(-1, token_BV, ordered_BV * is_kept_BV)
