"""Samples the targets whose loss is measured at several context lengths.

All models and all contexts are compared on the same targets, so each target needs the longest
context before it. Models with `reset: document` never see past the start of a document: for them
the whole context must be in the target's document. The end-of-document token, which opens the next
document, is therefore never a target.

The sample is stratified: the eligible targets are cut into N ranges of equal size, and a hash of
the seed chooses one of each. It depends on the split, the context, N and the seed only.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from data_pipeline.shards.shard_reader import TokenSource
from data_pipeline.streams.order import hash_ids
from data_pipeline.streams.segments import Reset
from txl_dist.errors import DataError

# Shapes: N positions


@dataclass(frozen=True, slots=True, eq=False)
class Positions:
    """Sampled targets of one split, in corpus order."""

    target_N: NDArray[np.int64]
    """Position of the target token in the split."""
    document_N: NDArray[np.int64]
    """Number of its document in the split."""

    def __len__(self) -> int:
        return len(self.target_N)

    @property
    def num_documents(self) -> int:
        return len(np.unique(self.document_N))


def sample_positions(
    source: TokenSource, *, context: int, num_positions: int, seed: int, reset: Reset
) -> Positions:
    """At most `num_positions` targets that have `context` tokens before them.

    With reset `document`, these tokens are in the document of the target. Raises DataError if there
    is no such target.
    """
    document_starts, num_tokens = _document_starts(source)
    starts = document_starts if reset == "document" else np.zeros(1, np.int64)
    lengths = np.diff(np.append(starts, num_tokens))
    eligible = np.maximum(lengths - context, 0)
    stops = np.cumsum(eligible)
    total = int(stops[-1]) if len(stops) else 0
    if total == 0:
        longest = int(lengths.max(initial=0))
        kind = "document" if reset == "document" else "split"
        raise DataError(
            f"no token has {context} tokens of context before it: the longest {kind} holds "
            f"{longest} tokens. Take shorter contexts (--max-context {max(1, longest - 1)} or "
            "less), or a split with longer documents"
        )
    number_N = _stratified(total, min(num_positions, total), seed)
    text_N = np.searchsorted(stops, number_N, side="right")
    target_N = starts[text_N] + context + number_N - (stops - eligible)[text_N]
    document_N = np.searchsorted(document_starts, target_N, side="right") - 1
    return Positions(target_N, document_N)


def _document_starts(source: TokenSource) -> tuple[NDArray[np.int64], int]:
    """Positions of all document starts in the split, and the tokens of the split."""
    block_starts = np.cumsum(source.block_tokens) - source.block_tokens
    starts = [
        start + source.document_starts(block) for block, start in enumerate(block_starts.tolist())
    ]
    return np.concatenate([np.empty(0, np.int64), *starts]), int(source.block_tokens.sum())


def _stratified(total: int, num_samples: int, seed: int) -> NDArray[np.int64]:
    """One number of each of `num_samples` equal ranges of [0, total)."""
    edges = np.array([total * k // num_samples for k in range(num_samples + 1)], np.int64)
    sizes = np.diff(edges)
    offset = hash_ids(seed, num_ids=num_samples) % sizes.astype(np.uint64)
    return edges[:-1] + offset.astype(np.int64)
