"""Cuts a split into chunks and scores them in batches, with the sums of one sequential pass.

The receptive field of a token is finite (`MemoryKind.receptive_tokens`): some whole segments before
its own, or those of its document. They are the context of a chunk, which is read but not scored.
With the segment boundaries of the sequential pass, the chunk then starts with exactly the memory of
that pass. Source: the dependency length O(N * L) of Dai et al. 2019, arXiv:1901.02860, section 3.2.

The context is read twice: at most 5 % more tokens in a long split, half in a short one. The cut
depends on the split and the model, not on workers or batch size.

Each row of a batch is one chunk with its memory. All rows advance by one segment at a time, and
shorter rows are padded at the end. Rows do not influence each other, so the batch size changes only
the order of additions inside matrix products. Sums are accumulated per chunk, in float64. A kind of
memory without a limit (`receptive_tokens` is None) carries such a difference on through a document,
where large weights can let it grow: for these kinds it has no bound.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice, pairwise
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from data_pipeline.shards.shard_reader import TokenSource
from data_pipeline.streams.segments import IGNORED, Reset, read_range
from txl_dist.config.run_config import Precision
from txl_dist.evaluation.breakdown import BreakdownCounter
from txl_dist.evaluation.scores import LossSums
from txl_dist.model.attention import choose_implementation
from txl_dist.model.transformer_xl import TransformerXL
from txl_dist.runtime.world import World
from txl_dist.sequence import SequenceReader

Mode = Literal["exact", "fast"]

MAX_CONTEXTS_PER_CHUNK = 20
"""A chunk is at most this many times as long as its context, or MAX_SEGMENTS_WITHOUT_CONTEXT
segments if that is more. So in a split of at least TARGET_NUM_CHUNKS such chunks the context costs
a twentieth."""
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
    any earlier one of its document, so a chunk begins with a document; without documents the whole
    split is one chunk. With `reset: document`, `document_start(position)` returns the position
    where the document of `position` starts.
    """
    if num_targets < 1:
        raise ValueError(f"num_targets={num_targets}: a split needs two tokens to have a target")
    if context_tokens is None:
        return _whole_documents(num_targets, tgt_len, document_start or (lambda position: 0))
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


def _whole_documents(
    num_targets: int, tgt_len: int, document_start: Callable[[int], int]
) -> list[EvaluationChunk]:
    """Chunks that begin with the first segment after the start of a document."""
    num_segments = -(-num_targets // tgt_len)
    chunk_segments = _chunk_segments(num_segments, 0)
    starts = [EvaluationChunk(0, 0, num_targets)]
    for segment in range(chunk_segments, num_segments, chunk_segments):
        # The segment in which the document begins is read before the chunk.
        first = document_start(segment * tgt_len)
        context_start, start = first // tgt_len * tgt_len, -(-first // tgt_len) * tgt_len
        if start > starts[-1].start:
            starts.append(EvaluationChunk(context_start, start, num_targets))
    return [replace(chunk, stop=following.start) for chunk, following in pairwise(starts)] + starts[
        -1:
    ]


def _chunk_segments(num_segments: int, context_segments: int) -> int:
    """Segments per chunk: enough chunks for the workers, few enough for a low overhead."""
    shortest = max(1, MIN_CONTEXTS_PER_CHUNK * context_segments)
    longest = max(MAX_SEGMENTS_WITHOUT_CONTEXT, MAX_CONTEXTS_PER_CHUNK * context_segments)
    return min(max(-(-num_segments // TARGET_NUM_CHUNKS), shortest), longest)


def overhead(chunks: list[EvaluationChunk]) -> float:
    """Context tokens as a fraction of the scored tokens."""
    num_context_tokens = sum(chunk.start - chunk.context_start for chunk in chunks)
    return num_context_tokens / sum(chunk.stop - chunk.start for chunk in chunks)


# Shapes: B chunks per batch, T segment tokens, N tokens of one chunk and its context, V vocabulary

READ_TOKENS = 1 << 18
"""Tokens of each chunk that are read at a time, which bounds the RAM for long chunks."""


class BatchSegment(NamedTuple):
    """One segment of a batch, [B, T] each."""

    input_BT: Tensor
    target_BT: Tensor
    """IGNORED in the context and in padding."""
    age_BT: Tensor
    """From 0 at the start of the context, where the memory is empty, and with `reset: document` at
    document starts."""
    position_BT: Tensor
    document_age_BT: Tensor
    """Tokens from the start of the target's document to the target."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Scorer:
    model: TransformerXL
    source: TokenSource
    tgt_len: int
    reset: Reset
    precision: Precision = "fp32"
    batch_chunks: int
    byte_counts_V: Tensor
    """UTF-8 bytes per token id, on the CPU."""

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    @property
    def kernel(self) -> str:
        """The attention function and the device that compute the scores."""
        with torch.no_grad():
            attention = choose_implementation(self.model.config, self.device, with_dropout=False)
        is_gpu = self.device.type == "cuda"
        device = torch.cuda.get_device_name(self.device) if is_gpu else str(self.device)
        return f"{attention.name} on {device}"

    def scores(
        self,
        chunks: Sequence[EvaluationChunk],
        *,
        stop: object = False,
        counter: BreakdownCounter | None = None,
        on_scored: Callable[[int], None] = lambda num_tokens: None,
    ) -> Iterator[LossSums]:
        """The sums of every chunk, in order. Ends early, also within a batch, if `stop` is true.

        `counter` receives every segment, for the sums by position and token; `on_scored` the number
        of targets scored so far, after every segment.
        """
        num_scored = 0
        for group in self.groups(chunks):
            reader, sums = self.reader(group), [LossSums() for _ in group]
            for segment in self.segments(group):
                if stop:
                    return
                target_BT = segment.target_BT
                # One copy from the device per segment, instead of one per chunk.
                nats_BT = reader.score(segment.input_BT, target_BT, segment.age_BT).cpu()
                for row in range(len(group)):
                    sums[row] += LossSums.of(nats_BT[row], target_BT[row], self.byte_counts_V)
                num_scored += int((target_BT >= 0).sum())
                on_scored(num_scored)
                if counter is not None:
                    counter.add(nats_BT, target_BT, segment.position_BT, segment.document_age_BT)
            yield from sums

    def groups(self, chunks: Sequence[EvaluationChunk]) -> Iterator[list[EvaluationChunk]]:
        remaining = iter(chunks)
        while group := list(islice(remaining, self.batch_chunks)):
            yield group

    def reader(self, group: Sequence[EvaluationChunk]) -> SequenceReader:
        """A reader of a batch of chunks, before their contexts."""
        longest = max(chunk.stop - chunk.context_start for chunk in group)
        state = self.model.inference_state(len(group), max_tokens=longest)
        return SequenceReader(
            self.model, state=state, tgt_len=self.tgt_len, precision=self.precision
        )

    def segments(self, group: Sequence[EvaluationChunk]) -> Iterator[BatchSegment]:
        """The segments of a batch of chunks, from the context to the end of the longest row."""
        num_tokens = max(chunk.stop - chunk.context_start for chunk in group)
        num_segments = -(-num_tokens // self.tgt_len)
        num_read = max(1, READ_TOKENS // self.tgt_len)
        for first in range(0, num_segments, num_read):
            stop = min(first + num_read, num_segments)
            rows = [self._row(c, first * self.tgt_len, stop * self.tgt_len) for c in group]
            stacked = [torch.from_numpy(np.stack(arrays)) for arrays in zip(*rows, strict=True)]
            for segment in range(stop - first):
                columns = slice(segment * self.tgt_len, (segment + 1) * self.tgt_len)
                yield BatchSegment(*(tensor[:, columns] for tensor in stacked))

    def _row(self, chunk: EvaluationChunk, first: int, stop: int) -> list[np.ndarray]:
        """The arrays of a `BatchSegment` for tokens [first, stop) of one chunk.

        Counted from the start of its context, and padded after the end of the chunk.
        """
        length, begin = stop - first, chunk.context_start
        first, stop = (min(begin + position, chunk.stop) for position in (first, stop))
        # One token more than inputs: the target of the last input.
        tokens, document_age = read_range(self.source, first, stop + 1)
        input_N, target_N = tokens[:-1], tokens[1:].copy()
        target_N[: max(0, chunk.start - first)] = IGNORED
        age_N = np.arange(first - begin, stop - begin, dtype=np.int32)
        # The smaller age wins: nothing before the context is in the memory, although a document may
        # have started there.
        if self.reset == "document":
            age_N = np.minimum(age_N, document_age[:-1])
        return [
            _padded(input_N, length, 0),
            _padded(target_N, length, IGNORED),
            _padded(age_N, length, 0),
            _padded(np.arange(first + 1, stop + 1), length, 0),
            _padded(document_age[1:], length, 0),
        ]


def _padded(array: np.ndarray, length: int, fill: int) -> np.ndarray:
    return np.pad(array, (0, length - len(array)), constant_values=fill)


def evaluate_on_ranks(
    scorer: Scorer, chunks: Sequence[EvaluationChunk], *, world: World, stop: object = False
) -> LossSums | None:
    """Collective: every rank scores its chunks, and every rank returns the sums of all.

    If `stop` becomes true on any rank, that rank stops scoring and all ranks return None. The name
    of the activity, which the log and `txl status` show, says how much this rank has scored.
    """
    indices = range(world.rank, len(chunks), world.num_ranks)
    own, name = [chunks[i] for i in indices], world.activity.name
    num_targets = sum(chunk.stop - chunk.start for chunk in own)

    def show(num_scored: int) -> None:
        world.activity.name = f"{name}, {num_scored / num_targets:.0%} scored"

    scored = list(scorer.scores(own, stop=stop, on_scored=show))
    # One all-reduce: each chunk has its own row, so adding zeros keeps every sum bit for bit. The
    # last row counts the chunks that a stop left unscored.
    table = torch.zeros(len(chunks) + 1, 3, dtype=torch.float64)
    for index, sums in zip(indices, scored, strict=False):
        table[index] = torch.tensor([sums.nats, sums.num_tokens, sums.num_bytes], dtype=table.dtype)
    table[-1, 0] = len(indices) - len(scored)
    *rows, (num_unscored, _, _) = world.all_reduce_sum(table).tolist()
    if num_unscored:
        return None
    scores = (LossSums(nats, int(tokens), int(size)) for nats, tokens, size in rows)
    return sum(scores, LossSums())
