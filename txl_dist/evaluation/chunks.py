"""Cuts a split into chunks that workers score independently, with the sums of one sequential pass.

The receptive field of a token is finite (`MemoryKind.receptive_tokens`): some whole segments before
its own. They are the context of a chunk, which is read but not scored. If chunk and context use the
same segment boundaries as the sequential pass, the chunk starts with exactly the memory of that
pass.

Cost: the context is read twice, at most 5 % more tokens in a long split and half in a short one,
which is cut nevertheless, so that several workers can score it. `txl eval` prints the cost. Source:
the dependency length O(N * L) of Dai et al. 2019, arXiv:1901.02860, section 3.2.

Integer arithmetic only. The cut depends on the split and the model, not on workers or batch size.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

Mode = Literal["exact", "fast"]

MAX_CONTEXTS_PER_CHUNK = 20
"""A chunk is at most this many times as long as its context, or MAX_SEGMENTS_WITHOUT_CONTEXT
segments if that is more."""
MAX_OVERHEAD = 1 / MAX_CONTEXTS_PER_CHUNK
"""The cost of the context in a split of at least TARGET_NUM_CHUNKS such chunks."""
MIN_CONTEXTS_PER_CHUNK = 2
"""A chunk is at least this many times as long, so the context costs at most half as much again."""
TARGET_NUM_CHUNKS = 16
"""Between these limits a split is cut into about this many chunks, to be distributed to workers."""
MAX_SEGMENTS_WITHOUT_CONTEXT = 64
"""Maximum segments of a chunk if its context is short or empty."""


@dataclass(frozen=True, slots=True)
class EvaluationChunk:
    """Score the targets of input positions [start, stop) after reading [context_start, start)."""

    context_start: int
    start: int
    stop: int


def plan_chunks(
    *,
    num_targets: int,
    tgt_len: int,
    context_tokens: int | None,
    document_start: Callable[[int], int] | None = None,
) -> list[EvaluationChunk]:
    """Chunks that score the targets of input positions [0, num_targets) exactly once, in order.

    `context_tokens` are read before a chunk, a multiple of `tgt_len`. None: a token may depend on
    any earlier one, so the whole split is one chunk. With `reset: document`,
    `document_start(position)` returns the position where the document of `position` starts.
    """
    if num_targets < 1:
        raise ValueError(f"num_targets={num_targets}: a split needs two tokens to have a target")
    if context_tokens is None:
        return [EvaluationChunk(0, 0, num_targets)]
    context_segments = context_tokens // tgt_len
    num_segments = -(-num_targets // tgt_len)
    chunk_segments = _chunk_segments(num_segments, context_segments)
    chunks = []
    for first in range(0, num_segments, chunk_segments):
        start = first * tgt_len
        context_start = max(0, first - context_segments) * tgt_len
        if document_start is not None and context_start < start:
            # No token sees past its document, so the context may begin with the segment that has
            # the document's start.
            context_start = max(context_start, document_start(start) // tgt_len * tgt_len)
        stop = min(num_targets, start + chunk_segments * tgt_len)
        chunks.append(EvaluationChunk(context_start, start, stop))
    return chunks


def _chunk_segments(num_segments: int, context_segments: int) -> int:
    """Segments per chunk: enough chunks for the workers, few enough for a low overhead."""
    shortest = max(1, MIN_CONTEXTS_PER_CHUNK * context_segments)
    longest = max(MAX_SEGMENTS_WITHOUT_CONTEXT, MAX_CONTEXTS_PER_CHUNK * context_segments)
    return min(max(-(-num_segments // TARGET_NUM_CHUNKS), shortest), longest)


def overhead(chunks: list[EvaluationChunk]) -> float:
    """Context tokens as a fraction of the scored tokens."""
    num_context_tokens = sum(chunk.start - chunk.context_start for chunk in chunks)
    return num_context_tokens / sum(chunk.stop - chunk.start for chunk in chunks)
