"""Evaluates any number of jobs on workers, batch by batch; a killed evaluation can be resumed.

    job -> plan_job (chunks) -> ScoringTask (a batch) -> score_batch on any worker -> FinishedScores
        -> sums in the order of the chunks -> result

A batch is `batch_chunks` consecutive chunks (with `num_ranks`, of the chunks of one rank). Which
worker scores a batch, in which order, and in which process of which attempt does not change its
sums, so the result is always the same to the last bit. A worker holds one model and one batch of
one segment per chunk at a time.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from data_pipeline.shards.manifest import load_manifest
from data_pipeline.shards.shard_reader import SplitReader, open_split
from data_pipeline.system.progress import Progress
from data_pipeline.system.remote_path import DatasetPath
from data_pipeline.system.strict_json import sha256_of
from data_pipeline.system.workers import InProcess, WorkerDiedError, Workers
from txl_dist.convert.stored_model import find_model
from txl_dist.errors import ConfigError, DataError, TxlError
from txl_dist.evaluation.breakdown import LossBreakdown, log_bucket
from txl_dist.evaluation.chunks import EvaluationChunk
from txl_dist.evaluation.details import ScoreDetails
from txl_dist.evaluation.evaluate import (
    EvaluationJob,
    EvaluationResult,
    plan_evaluation,
    summarise,
)
from txl_dist.evaluation.finished_scores import FinishedScores
from txl_dist.evaluation.protocol import Subject, model_name
from txl_dist.evaluation.scored_text import ScoredText, scored_text
from txl_dist.evaluation.token_counts import count_tokens, counted_split
from txl_dist.evaluation.worker import ScoringTask, open_job, score_batch
from txl_dist.runtime.process import code_description


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
        details = None
        if self.counted_split is not None:
            parts = [
                scores.breakdown
                for _, scores in sorted(batches, key=lambda batch: batch[0][0])
                if scores.breakdown is not None
            ]
            details = ScoreDetails(LossBreakdown.total(parts), self.counted_split)
        sums_of = {
            chunk_number: sums
            for numbers, scores in batches
            for chunk_number, sums in zip(numbers, scores.sums, strict=True)
        }
        return summarise(
            (sums_of[chunk_number] for chunk_number in sorted(sums_of)),
            self.chunks,
            self.job.settings,
            text=self.text,
            data=self.data,
            model=Subject(model_name(self.job.checkpoint), self.job.digest),
            weights=self.job.weights,
            kernels=tuple(sorted({scores.kernel for _, scores in batches})),
            details=details,
        )


def evaluate_on_workers(
    planned: Sequence[PlannedJob],
    workers: Workers,
    *,
    progress: Progress = lambda phase, done, total: None,
    note: Callable[[str], None] = lambda line: None,
) -> list[EvaluationResult]:
    """The results of all jobs, in their order. Progress counts tokens.

    Raises the first TxlError of any worker.
    """
    tasks = list(_tasks(planned, _FrequencyBuckets(workers, progress)))
    _explain_plan(planned, tasks, workers.num_workers, note)
    done, total = 0, sum(task.num_tokens for task in tasks)
    with ExitStack() as stack:
        for each in planned:
            stack.enter_context(each.finished)
        progress("scoring", 0, total)
        try:
            for index, scores in workers.map(score_batch, tasks):
                task = tasks[index]
                planned[task.job_number].finished.add(task.batch_number, scores)
                done += task.num_tokens
                progress("scoring", done, total)
        except WorkerDiedError as error:
            raise _dead_workers_error(error, planned[0].job, workers) from None
        finally:
            open_job.close()
    return [each.result() for each in planned]


def evaluate(job: EvaluationJob, workers: Workers | None = None) -> EvaluationResult:
    """Score one split, on `workers` or in this process.

    Raises CheckpointError or DataError if there is no such model or split, or if they do not fit.
    """
    return evaluate_on_workers([plan_job(job)], workers or InProcess())[0]


def plan_job(
    job: EvaluationJob,
    directory: Path | None = None,
    *,
    resume: bool = False,
    details: bool = False,
    per_document: bool = False,
    allow_short_split: bool = False,
) -> PlannedJob:
    """Check that model and data fit, and cut the split into chunks.

    `directory`: where the sums of finished batches are kept; None: nowhere. `resume`: use those
    that are there. `details`: also sum the loss by position, token frequency and document.
    `per_document`: only by document (document_scores.py). A split shorter than a segment is refused
    without `allow_short_split`.
    """
    given = job
    # Workers may have another working directory.
    job = replace(job, checkpoint=job.checkpoint.resolve(), data=job.data.resolve())
    model, manifest = find_model(job.checkpoint, weights=job.weights), load_manifest(job.data)
    model.check_data(manifest, job.data)
    job = replace(job, digest=model.digest)
    source = open_split(job.data, job.settings.split, manifest=manifest)
    chunks = plan_evaluation(source, job.settings, model.config)
    if not allow_short_split:
        _require_a_segment(source, job)
    counted = counted_split(manifest, job.settings.split) if details else None
    description = {
        "checkpoint": str(job.checkpoint),
        "model": model.digest,
        "data": manifest.digest,
        "settings": asdict(job.settings),
        "batch_chunks": job.batch_chunks,
        "num_ranks": job.num_ranks,
        "num_threads": job.num_threads,
        "chunks": sha256_of([[c.context_start, c.start, c.stop] for c in chunks]),
        "code": code_description(),
    }
    if counted is not None:
        description["details"] = {"token_frequency_counted_on": counted}
    elif per_document:
        description["per_document"] = True
    # Without the path, which may be another one after a move.
    key = sha256_of({name: item for name, item in description.items() if name != "checkpoint"})
    if directory is None and resume:
        raise ConfigError(
            f"--resume: {job.checkpoint} is not in a run directory, so there is no default place "
            "for the scores of finished chunks. Give one: --scores DIR"
        )
    path = directory and directory / f"{job.settings.split}-{key[:16]}.jsonl"
    finished = FinishedScores(path, key=key, description=description, resume=resume)
    text = scored_text(source, max_tokens=job.settings.max_tokens)
    data = Subject(job.data.name, manifest.digest)
    return PlannedJob(job, chunks, finished, text, data, given, counted, per_document)


def _require_a_segment(source: SplitReader, job: EvaluationJob) -> None:
    num_targets, settings = source.num_tokens - 1, job.settings
    if num_targets < settings.tgt_len:
        raise DataError(
            f"split {settings.split} of {job.data} has {num_targets:,} targets, fewer than one "
            f"segment of tgt_len={settings.tgt_len}. Score it with --tgt-len {num_targets} or "
            "less, or prepare more text"
        )


def default_scores_directory(checkpoint: Path) -> Path | None:
    """RUN/evaluations for a checkpoint of a run; None for other models."""
    if checkpoint.parent.name != "checkpoints":
        return None
    return checkpoint.parent.parent / "evaluations"


class _FrequencyBuckets:
    """The bucket of each token id of a dataset, counted when first needed."""

    def __init__(self, workers: Workers, progress: Progress) -> None:
        self._workers, self._progress = workers, progress
        self._bucket_V: dict[tuple[DatasetPath, str], NDArray[np.uint8]] = {}

    def of(self, planned: PlannedJob) -> NDArray[np.uint8] | None:
        if planned.counted_split is None:
            return None
        key = planned.job.data, planned.counted_split
        if key not in self._bucket_V:
            count_V = count_tokens(*key, self._workers, progress=self._progress)
            self._bucket_V[key] = log_bucket(count_V).astype(np.uint8)
        return self._bucket_V[key]


def _tasks(planned: Sequence[PlannedJob], buckets: _FrequencyBuckets) -> Iterator[ScoringTask]:
    """The unfinished batches, job after job, so that workers rarely change their model."""
    for job_number, each in enumerate(planned):
        for batch_number, numbers in enumerate(each.batches()):
            if batch_number not in each.finished.batches:
                yield ScoringTask(
                    job=each.job,
                    job_number=job_number,
                    batch_number=batch_number,
                    chunk_numbers=numbers,
                    chunks=tuple(each.chunks[number] for number in numbers),
                    frequency_bucket_V=buckets.of(each),
                    per_document=each.per_document,
                )


def _explain_plan(
    planned: Sequence[PlannedJob],
    tasks: Sequence[ScoringTask],
    num_workers: int,
    note: Callable[[str], None],
) -> None:
    if any(each.finished.is_resumed for each in planned):
        num_batches = sum(1 for each in planned for _ in each.batches())
        note(f"resuming: {num_batches - len(tasks)} of {num_batches} batches are already scored")
    if 0 < len(tasks) < num_workers:
        note(
            f"there are {len(tasks)} batches of chunks for {num_workers} workers; a smaller "
            f"--batch (now {tasks[0].job.batch_chunks}) makes more"
        )


def _dead_workers_error(error: WorkerDiedError, job: EvaluationJob, workers: Workers) -> TxlError:
    return TxlError(
        f"{error.event}. Most likely memory ran out (SIGKILL: see dmesg on that machine). Run the "
        f"same command with --resume and fewer --workers (now {workers.num_workers}), which keeps "
        f"the finished chunks, or with a smaller --batch (now {job.batch_chunks}), which starts "
        "again"
    )
