"""Scores chunks of a split, several per batch. Each row of a batch is one chunk with its memory.

All rows advance by one segment at a time, and shorter rows are padded at the end. Rows do not
influence each other, so the batch size changes only the order of additions inside matrix products.
Sums are accumulated per chunk, in float64.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
import torch
from torch import Tensor

from data_pipeline.shards.shard_reader import TokenSource
from data_pipeline.streams.cursor import read_range
from data_pipeline.streams.segments import IGNORED, Reset
from txl_dist.config.run_config import Precision
from txl_dist.evaluation.chunks import EvaluationChunk
from txl_dist.evaluation.loss_sums import LossSums
from txl_dist.model.transformer_xl import TransformerXL
from txl_dist.runtime.precision import autocast

# Shapes: B chunks per batch, T segment tokens, N tokens of one chunk and its context, V vocabulary


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

    def scores(
        self, chunks: Sequence[EvaluationChunk], *, stop: object = False
    ) -> Iterator[LossSums]:
        """The sums of every chunk, in order. Ends early, also within a batch, if `stop` is true."""
        for group in self.groups(chunks):
            sums = self._score_group(group, stop)
            if sums is None:
                return
            yield from sums

    def groups(self, chunks: Sequence[EvaluationChunk]) -> Iterator[list[EvaluationChunk]]:
        """The chunks in order, `batch_chunks` at a time."""
        remaining = iter(chunks)
        while group := list(islice(remaining, self.batch_chunks)):
            yield group

    def _score_group(self, group: list[EvaluationChunk], stop: object) -> list[LossSums] | None:
        device = next(self.model.parameters()).device
        memory = self.model.empty_kv_cache(len(group))
        sums = [LossSums() for _ in group]
        for input_BT, target_BT, age_BT in self.segments(group):
            if stop:
                return None
            with torch.no_grad(), autocast(self.precision, device):
                nats_BT, memory = self.model(
                    input_BT.to(device), target_BT.to(device), age_BT.to(device), memory
                )
            nats_BT = nats_BT.cpu()  # one copy per segment, instead of one per chunk
            for row in range(len(group)):
                sums[row] += LossSums.of(nats_BT[row], target_BT[row], self.byte_counts_V)
        return sums

    def segments(self, group: list[EvaluationChunk]) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Input, target and age [B, T] of each segment, from the context to the longest row's end.

        Targets in the context are IGNORED. Ages start at 0 where the context starts, because the
        memory is empty there, and also at document starts with `reset: document`.
        """
        rows = [self._row(chunk) for chunk in group]
        num_segments = max(input_N.shape[0] for input_N, _, _ in rows) // self.tgt_len
        stacked = [
            torch.from_numpy(
                np.stack([_padded(row[k], num_segments * self.tgt_len, fill) for row in rows])
            )
            for k, fill in ((0, 0), (1, IGNORED), (2, 0))
        ]
        for segment in range(num_segments):
            columns = slice(segment * self.tgt_len, (segment + 1) * self.tgt_len)
            input_BT, target_BT, age_BT = (tensor[:, columns] for tensor in stacked)
            yield input_BT, target_BT, age_BT

    def _row(self, chunk: EvaluationChunk) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Input, target and age of one chunk's tokens, padded to whole segments."""
        # One token more than inputs: the target of the last input.
        tokens, document_age = read_range(self.source, chunk.context_start, chunk.stop + 1)
        input_N, target_N = tokens[:-1], tokens[1:].copy()
        target_N[: chunk.start - chunk.context_start] = IGNORED
        age_N = np.arange(len(input_N), dtype=np.int32)
        # The smaller age wins: nothing before the context is in the memory, although a document may
        # have started there.
        if self.reset == "document":
            age_N = np.minimum(age_N, document_age[:-1])
        length = -(-len(input_N) // self.tgt_len) * self.tgt_len
        return (
            _padded(input_N, length, 0),
            _padded(target_N, length, IGNORED),
            _padded(age_N, length, 0),
        )


def _padded(array: np.ndarray, length: int, fill: int) -> np.ndarray:
    return np.pad(array, (0, length - len(array)), constant_values=fill)
