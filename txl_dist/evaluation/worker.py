"""What a worker does: it scores one batch of chunks, with the model and split of the batch's job.

A worker holds one model and one batch of one segment per chunk at a time.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from txl_dist.evaluation.batch_scores import BatchScores
from txl_dist.evaluation.breakdown import BreakdownCounter
from txl_dist.evaluation.chunks import EvaluationChunk
from txl_dist.evaluation.job import EvaluationJob
from txl_dist.evaluation.scoring import Scorer
from txl_dist.runtime.device import torch_threads
from txl_dist.runtime.fault_injection import fault_point

# Shapes: V vocabulary


@dataclass(frozen=True, slots=True)
class ScoringTask:
    """One batch of chunks of one job."""

    job: EvaluationJob
    job_number: int
    batch_number: int
    chunk_numbers: range
    chunks: tuple[EvaluationChunk, ...]
    frequency_bucket_V: NDArray[np.uint8] | None = None
    """Bucket of the frequency of each token id; None: without details."""
    per_document: bool = False
    """Whether the sums of documents are wanted, without the other details."""

    @property
    def num_tokens(self) -> int:
        """Tokens that are read, with the contexts."""
        return sum(chunk.stop - chunk.context_start for chunk in self.chunks)

    def __str__(self) -> str:
        first, last = self.chunk_numbers[0], self.chunk_numbers[-1]
        return (
            f"chunks {first} to {last} of split {self.job.settings.split}, "
            f"{self.job.checkpoint.name}"
        )


def score_batch(task: ScoringTask) -> BatchScores:
    """Score one batch on a worker, which keeps model and split for its next batch.

    Raises NonFiniteScoreError if the score of a chunk is not finite.
    """
    fault_point("score")
    scorer, counter = open_job.scorer(task.job), None
    if task.per_document or task.frequency_bucket_V is not None:
        counter = BreakdownCounter(
            tgt_len=scorer.tgt_len,
            frequency_bucket_V=task.frequency_bucket_V,
            byte_counts_V=scorer.byte_counts_V,
        )
    with torch_threads(task.job.num_threads):
        sums = list(scorer.scores(task.chunks, counter=counter))
    scores = BatchScores(sums, scorer.kernel, counter.breakdown() if counter else None)
    scores.require_finite(
        f"split {task.job.settings.split}, {task.job.checkpoint}", numbers=task.chunk_numbers
    )
    return scores


class OpenJob:
    """The model and split of one job."""

    def __init__(self) -> None:
        self._opened: tuple[EvaluationJob, Scorer] | None = None

    def close(self) -> None:
        self._opened = None

    def scorer(self, job: EvaluationJob) -> Scorer:
        if self._opened is None or self._opened[0] != job:
            self.close()  # free this model before the next one is loaded
            self._opened = job, job.open()
        return self._opened[1]


open_job = OpenJob()
