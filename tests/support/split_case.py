"""A small split with a model, cut into more chunks than the package would cut it into."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from data_pipeline.streams import segments
from data_pipeline.streams.segments import Reset
from tests.support.small_models import VOCAB_SIZE, small_model
from tests.support.token_sources import TextSource, random_corpus
from txl_dist.evaluation import scoring
from txl_dist.evaluation.scoring import EvaluationChunk, Scorer
from txl_dist.evaluation.spec import EvaluationSettings, plan_evaluation
from txl_dist.model.transformer_xl import TransformerXL

BYTE_COUNTS_V = torch.arange(VOCAB_SIZE) % 4
"""UTF-8 bytes per token id; token 0 has none."""


@dataclass(frozen=True)
class SplitCase:
    """A split, a model, and how chunks of it are cut and batched."""

    lengths: list[list[int]]
    tgt_len: int
    model_options: dict[str, Any]
    reset: Reset
    batch_chunks: int = 2
    target_num_chunks: int = 100
    min_overhead: int = 0
    max_tokens: int | None = None

    @property
    def source(self) -> TextSource:
        return random_corpus(self.lengths, vocab_size=VOCAB_SIZE, seed=2)

    @property
    def model(self) -> TransformerXL:
        return small_model(seed=4, **self.model_options)

    @property
    def settings(self) -> EvaluationSettings:
        config = self.model.config
        return EvaluationSettings(
            split="valid",
            mode="exact",
            tgt_len=self.tgt_len,
            mem_len=config.mem_len,
            clamp_len=config.clamp_len,
            same_length=config.same_length,
            reset=self.reset,
            max_tokens=self.max_tokens,
        )

    @property
    def scorer(self) -> Scorer:
        return Scorer(
            model=self.model,
            source=self.source,
            tgt_len=self.tgt_len,
            reset=self.reset,
            batch_chunks=self.batch_chunks,
            byte_counts_V=BYTE_COUNTS_V,
        )

    def plan(self) -> list[EvaluationChunk]:
        """Chunks of this tiny split, which the package would otherwise cut into one or two."""
        with small_chunks(self):
            return plan_evaluation(self.source, self.settings, self.model.config)


@contextmanager
def small_chunks(case: SplitCase) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scoring, "TARGET_NUM_CHUNKS", case.target_num_chunks)
        patch.setattr(scoring, "MIN_CONTEXTS_PER_CHUNK", case.min_overhead)
        patch.setattr(segments, "CHUNK_TOKENS", 5)
        patch.setattr(scoring, "READ_TOKENS", 7)
        yield
