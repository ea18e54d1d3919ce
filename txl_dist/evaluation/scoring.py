"""Scores chunks of a split, several per batch. Each row of a batch is one chunk with its memory.

All rows advance by one segment at a time, and shorter rows are padded at the end. Rows do not
influence each other, so the batch size changes only the order of additions inside matrix products.
Sums are accumulated per chunk, in float64.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from data_pipeline.shards.shard_reader import TokenSource
from data_pipeline.streams.cursor import read_range
from data_pipeline.streams.segments import IGNORED, Reset
from txl_dist.config.run_config import Precision
from txl_dist.evaluation.breakdown import BreakdownCounter
from txl_dist.evaluation.chunks import EvaluationChunk
from txl_dist.evaluation.loss_sums import LossSums
from txl_dist.model.attention import choose_attention
from txl_dist.model.devices import to_device
from txl_dist.model.transformer_xl import TransformerXL
from txl_dist.runtime.device import autocast

# Shapes: B chunks per batch, T segment tokens, N tokens of one chunk and its context, V vocabulary

READ_TOKENS = 1 << 18
"""Tokens of each chunk that are read at a time, which bounds the memory for long chunks."""


class _Segment(NamedTuple):
    """One segment of a batch, [B, T] each."""

    input_BT: Tensor
    target_BT: Tensor
    """IGNORED in the context and in padding."""
    age_BT: Tensor
    position_BT: Tensor
    """Position of the target in the split."""
    document_age_BT: Tensor
    """Tokens from the start of the target's document to the target."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Scorer:
    """Scores chunks of one split with one model."""

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
            attention = choose_attention(
                self.model.config.attention,
                device=self.device,
                with_dropout=False,
                d_head=self.model.config.d_head,
            )
        is_gpu = self.device.type == "cuda"
        device = torch.cuda.get_device_name(self.device) if is_gpu else str(self.device)
        return f"{attention.__name__} on {device}"

    def scores(
        self,
        chunks: Sequence[EvaluationChunk],
        *,
        stop: object = False,
        counter: BreakdownCounter | None = None,
    ) -> Iterator[LossSums]:
        """The sums of every chunk, in order. Ends early, also within a batch, if `stop` is true.

        `counter` receives every segment, for the sums by position and token.
        """
        for group in self.groups(chunks):
            sums = self._score_group(group, stop, counter)
            if sums is None:
                return
            yield from sums

    def groups(self, chunks: Sequence[EvaluationChunk]) -> Iterator[list[EvaluationChunk]]:
        """The chunks in order, `batch_chunks` at a time."""
        remaining = iter(chunks)
        while group := list(islice(remaining, self.batch_chunks)):
            yield group

    def _score_group(
        self, group: list[EvaluationChunk], stop: object, counter: BreakdownCounter | None
    ) -> list[LossSums] | None:
        device = self.device
        longest = max(chunk.stop - chunk.context_start for chunk in group)
        memory = self.model.inference_state(len(group), max_tokens=longest)
        sums = [LossSums() for _ in group]
        for segment in self._segments(group):
            input_BT, target_BT, age_BT = segment.input_BT, segment.target_BT, segment.age_BT
            if stop:
                return None
            with torch.no_grad(), autocast(self.precision, device):
                # Targets on the host: the softmax finds the rows of its clusters there.
                nats_BT, memory = self.model(
                    to_device(input_BT, device), target_BT, to_device(age_BT, device), memory
                )
            nats_BT = nats_BT.cpu()  # one copy per segment, instead of one per chunk
            for row in range(len(group)):
                sums[row] += LossSums.of(nats_BT[row], target_BT[row], self.byte_counts_V)
            if counter is not None:
                counter.add(nats_BT, target_BT, segment.position_BT, segment.document_age_BT)
        return sums

    def segments(self, group: list[EvaluationChunk]) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Input, target and age [B, T] of each segment, from the context to the longest row's end.

        Targets in the context are IGNORED. Ages start at 0 where the context starts, because the
        memory is empty there, and also at document starts with `reset: document`.
        """
        for segment in self._segments(group):
            yield segment.input_BT, segment.target_BT, segment.age_BT

    def _segments(self, group: list[EvaluationChunk]) -> Iterator["_Segment"]:
        num_tokens = max(chunk.stop - chunk.context_start for chunk in group)
        num_segments = -(-num_tokens // self.tgt_len)
        num_read = max(1, READ_TOKENS // self.tgt_len)
        for first in range(0, num_segments, num_read):
            stop = min(first + num_read, num_segments)
            rows = [self._row(c, first * self.tgt_len, stop * self.tgt_len) for c in group]
            stacked = [torch.from_numpy(np.stack(arrays)) for arrays in zip(*rows, strict=True)]
            for segment in range(stop - first):
                columns = slice(segment * self.tgt_len, (segment + 1) * self.tgt_len)
                yield _Segment(*(tensor[:, columns] for tensor in stacked))

    def _row(self, chunk: EvaluationChunk, first: int, stop: int) -> list[np.ndarray]:
        """The arrays of a `_Segment` for tokens [first, stop) of one chunk, from its context on.

        Padded after the end of the chunk.
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
