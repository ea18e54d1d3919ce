"""Batches of chunks: the tasks of an evaluation, and how a worker scores one of them."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from data_pipeline.system.progress import Progress
from data_pipeline.system.remote_path import DatasetPath
from txl_dist.errors import CheckpointError
from txl_dist.evaluation.breakdown import BreakdownCounter, count_tokens, log_bucket
from txl_dist.evaluation.finished_scores import BatchScores
from txl_dist.evaluation.job import EvaluationJob
from txl_dist.evaluation.scores import LossSums
from txl_dist.evaluation.scoring import EvaluationChunk, Scorer
from txl_dist.runtime.device import torch_threads
from txl_dist.runtime.fault_injection import fault_point

if TYPE_CHECKING:
    from txl_dist.evaluation.distributed import PlannedJob

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

    Raises CheckpointError if the score of a chunk is NaN or Inf.
    """
    fault_point("score")
    scorer, counter = open_scorer(task.job), None
    if task.per_document or task.frequency_bucket_V is not None:
        counter = BreakdownCounter(
            frequency_bucket_V=task.frequency_bucket_V, byte_counts_V=scorer.byte_counts_V
        )
    with torch_threads(task.job.num_threads):
        sums = list(scorer.scores(task.chunks, counter=counter))
    _require_finite(task, sums)
    return BatchScores(sums, scorer.kernel, counter.breakdown() if counter else None)


def _require_finite(task: ScoringTask, sums: Sequence[LossSums]) -> None:
    for number, chunk in zip(task.chunk_numbers, sums, strict=True):
        if not math.isfinite(chunk.nats):
            raise CheckpointError(
                f"chunk {number} of split {task.job.settings.split}, {task.job.checkpoint}: the "
                f"sum of its losses is {chunk.nats}, although all weights are finite, so the model "
                "overflows on this text. Try --precision fp32, or an earlier checkpoint: txl "
                "checkpoint list RUN"
            )


_opened: dict[EvaluationJob, Scorer] = {}
"""The model and split of the last job, at most one."""


def open_scorer(job: EvaluationJob) -> Scorer:
    """Load model and split of a job, unless they are those of the last one."""
    if job not in _opened:
        _opened.clear()  # free this model before the next one is loaded
        _opened[job] = job.open()
    return _opened[job]


def close_scorer() -> None:
    """Free the model that this process keeps."""
    _opened.clear()


def scoring_tasks(planned: "Sequence[PlannedJob]", progress: Progress) -> Iterator[ScoringTask]:
    """The unfinished batches, job after job, so that workers rarely change their model."""

    @cache
    def frequency_buckets(data: DatasetPath, split: str) -> NDArray[np.uint8]:
        return log_bucket(count_tokens(data, split, progress=progress)).astype(np.uint8)

    for job_number, each in enumerate(planned):
        split = each.counted_split
        for batch_number, numbers in enumerate(each.batches()):
            if batch_number not in each.finished.batches:
                yield ScoringTask(
                    job=each.job,
                    job_number=job_number,
                    batch_number=batch_number,
                    chunk_numbers=numbers,
                    chunks=tuple(each.chunks[number] for number in numbers),
                    frequency_bucket_V=frequency_buckets(each.job.data, split) if split else None,
                    per_document=each.per_document,
                )
