"""Chunks: a split cut so that workers can score it apart and get the number of one pass.

The receptive field of a token is finite: each layer reaches `mem_len` back from its segment's
start. So n_layer * ceil(mem_len / tgt_len) whole segments of unscored warm-up, cut on the same
segment grid as the sequential pass, give exactly the memory of that pass. Under `reset: document`
no token sees past its document, so warm-up need not go past the segment in which it starts.

Pure integers. The cut depends on the split and the model alone, never on workers or batch size.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

Mode = Literal["exact", "fast"]

MAX_CONTEXTS_PER_CHUNK = 8
"""A chunk is at most this many times as long as its warm-up, which then costs an eighth more."""
MIN_CONTEXTS_PER_CHUNK = 2
"""And at least this many times, so that at most half as much again is read."""
TARGET_NUM_CHUNKS = 16
"""Between the two, a split is cut into about this many chunks, to be shared out."""
MAX_SEGMENTS_WITHOUT_CONTEXT = 64
"""Segments of a chunk where warm-up sets no limit."""


@dataclass(frozen=True, slots=True)
class EvaluationChunk:
    """Input positions [start, stop) of a split are scored after reading [context_start, start)."""

    context_start: int
    start: int
    stop: int


def plan_chunks(
    *,
    num_targets: int,
    tgt_len: int,
    mem_len: int,
    n_layer: int,
    mode: Mode,
    document_start: Callable[[int], int] | None = None,
) -> list[EvaluationChunk]:
    """Chunks that score the targets of input positions [0, num_targets) exactly once.

    `document_start(position)`, given under `reset: document`, is where the document of that input
    position starts. `fast` warms up for one memory length only, and is not exact.
    """
    if num_targets < 1:
        raise ValueError(f"num_targets={num_targets}: a split needs two tokens to have a target")
    memory_segments = -(-mem_len // tgt_len)
    context_segments = memory_segments * (n_layer if mode == "exact" else 1)
    num_segments = -(-num_targets // tgt_len)
    chunk_segments = _chunk_segments(num_segments, context_segments)
    chunks = []
    for first in range(0, num_segments, chunk_segments):
        start = first * tgt_len
        context_start = max(0, first - context_segments) * tgt_len
        if document_start is not None and context_start < start:
            context_start = max(context_start, document_start(start) // tgt_len * tgt_len)
        stop = min(num_targets, start + chunk_segments * tgt_len)
        chunks.append(EvaluationChunk(context_start, start, stop))
    return chunks


def _chunk_segments(num_segments: int, context_segments: int) -> int:
    """Segments a chunk: enough chunks to share out, few enough to keep the overhead low."""
    shortest = max(1, MIN_CONTEXTS_PER_CHUNK * context_segments)
    longest = max(MAX_SEGMENTS_WITHOUT_CONTEXT, MAX_CONTEXTS_PER_CHUNK * context_segments)
    return min(max(-(-num_segments // TARGET_NUM_CHUNKS), shortest), longest)


def overhead(chunks: list[EvaluationChunk]) -> float:
    """Tokens read for warm-up, as a share of the tokens scored."""
    warm = sum(chunk.start - chunk.context_start for chunk in chunks)
    return warm / sum(chunk.stop - chunk.start for chunk in chunks)
