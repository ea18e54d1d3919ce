"""Batches of chunks: those of a planned job, how a worker scores one, and the sums of all."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from data_pipeline.system.progress import Progress
from data_pipeline.system.remote_path import DatasetPath
from txl_dist.checkpoint.directory import model_name
from txl_dist.errors import CheckpointError
from txl_dist.evaluation.breakdown import (
    BreakdownCounter,
    count_tokens,
    log_bucket,
    total_breakdown,
)
from txl_dist.evaluation.finished_scores import BatchScores, FinishedScores
from txl_dist.evaluation.job import EvaluationJob
from txl_dist.evaluation.result import (
    EvaluationResult,
    ScoredText,
    Subject,
    context_tokens,
)
from txl_dist.evaluation.scores import LossSums
from txl_dist.evaluation.scoring import EvaluationChunk, Scorer, overhead
from txl_dist.model.config import ModelConfig
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


@dataclass(frozen=True, slots=True, eq=False)
class PlannedJob:
    """A job, its chunks, and the batches that are finished."""

    job: EvaluationJob
    chunks: list[EvaluationChunk]
    finished: FinishedScores
    text: ScoredText
    data: Subject
    given: EvaluationJob
    """The job as it was given, whose paths may be relative."""
    trained: ModelConfig
    counted_split: str | None
    """The split whose token frequencies are used for the details; None: without details."""
    per_document: bool = False
    """Whether the finished batches have the sums of their documents, which details have too."""

    def batches(self) -> Iterator[range]:
        """The numbers of the chunks of every batch."""
        for rank in range(self.job.num_ranks):
            numbers = range(rank, len(self.chunks), self.job.num_ranks)
            for first in range(0, len(numbers), self.job.batch_chunks):
                yield numbers[first : first + self.job.batch_chunks]

    def result(self) -> EvaluationResult:
        """The sums of all batches, added in the order of the chunks."""
        numbers_of = list(self.batches())
        batches = [(numbers_of[number], scores) for number, scores in self.finished.batches.items()]
        batches.sort(key=lambda batch: batch[0][0])
        sums_of = {
            chunk_number: sums
            for numbers, scores in batches
            for chunk_number, sums in zip(numbers, scores.sums, strict=True)
        }
        breakdowns = [scores.breakdown for _, scores in batches if scores.breakdown is not None]
        return EvaluationResult(
            sums=sum((sums_of[number] for number in sorted(sums_of)), LossSums()),
            settings=self.job.settings,
            num_chunks=len(self.chunks),
            overhead=overhead(self.chunks),
            text=self.text,
            data=self.data,
            model=Subject(model_name(self.job.checkpoint), self.job.digest),
            weights=self.job.weights,
            kernels=tuple(sorted({scores.kernel for _, scores in batches})),
            breakdown=total_breakdown(breakdowns) if self.counted_split else None,
            counted_split=self.counted_split,
            memory=self.trained.memory,
            context_tokens=context_tokens(self.job.settings, self.trained),
        )


def scoring_tasks(planned: Sequence[PlannedJob], progress: Progress) -> Iterator[ScoringTask]:
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
