"""The unigram entropy of tokens: the loss of a model that knows how frequent they are, and no more.

A language model whose loss stays there has learned nothing from the context.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from data_pipeline.streams.cursor import LaneCursor
from data_pipeline.streams.order import EpochOrder

if TYPE_CHECKING:
    from data_pipeline.shards.shard_reader import TokenSource

SAMPLE_TOKENS, SAMPLE_RANGES = 1 << 22, 32
"""Of a larger split, this many tokens are read, in evenly spaced ranges."""


def unigram_entropy(
    sources: Sequence[TokenSource], shares: Sequence[float], *, vocab_size: int
) -> float:
    """The entropy of the token frequencies, in nats per token.

    Source i gives the share `shares[i]` of all tokens; the shares add up to 1. Exact for sources
    of at most `SAMPLE_TOKENS`. A sample of a larger one misses rare tokens, so the result is
    slightly too low if the vocabulary is large.
    """
    frequency_V = np.zeros(vocab_size)
    for source, share in zip(sources, shares, strict=True):
        counts_V = _count_tokens(source, vocab_size)
        frequency_V += share * counts_V / counts_V.sum()
    frequency_V = frequency_V[frequency_V > 0]
    return float(-(frequency_V * np.log(frequency_V)).sum())


def _count_tokens(source: TokenSource, vocab_size: int) -> NDArray[np.int64]:
    """Occurrences of each id in the sample of a source that has tokens, int64 [vocab_size]."""
    order = EpochOrder.of(source.block_tokens, seed=0, epoch=0, shuffle="none")
    num_ranges = SAMPLE_RANGES if order.num_tokens > SAMPLE_TOKENS else 1
    range_tokens = min(order.num_tokens, SAMPLE_TOKENS) // num_ranges
    counts_V, cursor = np.zeros(vocab_size, np.int64), LaneCursor()
    for start in np.linspace(0, order.num_tokens - range_tokens, num_ranges, dtype=np.int64):
        tokens, _ = cursor.read(source, order, int(start), int(start) + range_tokens)
        counts_V += np.bincount(tokens, minlength=vocab_size)
    return counts_V
