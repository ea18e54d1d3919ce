"""Evaluates any number of jobs on workers, batch by batch; a killed evaluation can be resumed.

    job -> plan_job (chunks) -> scoring_tasks (batches) -> score_batch on any worker
        -> FinishedScores -> sums in the order of the chunks -> result

A batch is `batch_chunks` consecutive chunks (with `num_ranks`, of the chunks of one rank). Which
worker scores it, and in which attempt, does not change its sums, so the result is always the same
to the last bit.

A sweep (`txl eval --sweep`) scores every combination of memory options on one split and reports the
best one on the others, as the paper chose mem_len and clamp_len.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TypeAlias

from data_pipeline.shards.manifest import load_manifest
from data_pipeline.shards.shard_reader import open_split
from data_pipeline.system.progress import Progress
from data_pipeline.system.strict_json import sha256_of
from data_pipeline.system.workers import InProcess, WorkerDiedError, Workers
from txl_dist.checkpoint.directory import run_of
from txl_dist.convert.stored_model import find_model
from txl_dist.errors import ConfigError, DataError, TxlError
from txl_dist.evaluation.batches import (
    FinishedScores,
    PlannedJob,
    close_scorer,
    score_batch,
    scoring_tasks,
)
from txl_dist.evaluation.breakdown import counted_split
from txl_dist.evaluation.job import EvaluationJob, plan_evaluation
from txl_dist.evaluation.result import EvaluationResult, Subject, scored_text
from txl_dist.evaluation.scores import FOLDER
from txl_dist.runtime.process import code_description


def evaluate_on_workers(
    planned: Sequence[PlannedJob],
    workers: Workers,
    *,
    progress: Progress = lambda label, done, total: None,
    note: Callable[[str], None] = lambda line: None,
) -> list[EvaluationResult]:
    """The results of all jobs, in their order. Progress counts tokens.

    Raises the first TxlError of any worker.
    """
    tasks = list(scoring_tasks(planned, progress))
    if any(each.finished.is_resumed for each in planned):
        num_batches = sum(1 for each in planned for _ in each.batches())
        note(f"resuming: {num_batches - len(tasks)} of {num_batches} batches are already scored")
    done, total = 0, sum(task.num_tokens for task in tasks)
    progress("scoring", 0, total)
    try:
        for index, scores in workers.map(score_batch, tasks):
            task = tasks[index]
            planned[task.job_number].finished.add(task.batch_number, scores)
            done += task.num_tokens
            progress("scoring", done, total)
    except WorkerDiedError as error:
        raise TxlError(
            f"{error.event}. Most likely RAM ran out (SIGKILL: see dmesg on that machine). Run the "
            f"same command with --resume and fewer --workers (now {workers.num_workers}), "
            "which keeps the finished chunks, or with a smaller --batch (now "
            f"{planned[0].job.batch_chunks}), which starts again"
        ) from None
    finally:
        close_scorer()
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
    `per_document`: only by document. A split shorter than a segment is refused without
    `allow_short_split`.
    """
    given = job
    # Workers may have another working directory.
    job = replace(job, checkpoint=job.checkpoint.resolve(), data=job.data.resolve())
    model, manifest = find_model(job.checkpoint, weights=job.weights), load_manifest(job.data)
    model.check_data(manifest, job.data)
    job = replace(job, digest=model.digest)
    source = open_split(job.data, job.settings.split, manifest=manifest)
    chunks = plan_evaluation(source, job.settings, model.config)
    num_targets = source.num_tokens - 1
    if num_targets < job.settings.tgt_len and not allow_short_split:
        raise DataError(
            f"split {job.settings.split} of {job.data} has {num_targets:,} targets, fewer than one "
            f"segment of tgt_len={job.settings.tgt_len}. Score it with --tgt-len {num_targets} or "
            "less, or prepare more text"
        )
    if directory is None and resume:
        raise ConfigError(
            f"--resume: {job.checkpoint} is not in a run directory, so there is no default place "
            "for the scores of finished chunks. Give one: --scores DIR"
        )
    counted = counted_split(manifest, job.settings.split) if details else None
    description = {
        "model": model.digest,
        "data": manifest.digest,
        "settings": asdict(job.settings),
        "batch_chunks": job.batch_chunks,
        "num_ranks": job.num_ranks,
        "num_threads": job.num_threads,
        "chunks": sha256_of([[c.context_start, c.start, c.stop] for c in chunks]),
        "code": code_description(),
        "token_frequency_counted_on": counted,
        "per_document": per_document and not details,
    }
    key = sha256_of(description)
    path = directory and directory / f"{job.settings.split}-{key[:16]}.jsonl"
    # The path is not part of the key: it may be another one after a move.
    description["checkpoint"] = str(job.checkpoint)
    return PlannedJob(
        job=job,
        given=given,
        chunks=chunks,
        finished=FinishedScores(path, key=key, description=description, resume=resume),
        text=scored_text(source, max_tokens=job.settings.max_tokens),
        data=Subject(job.data.name, manifest.digest),
        trained=model.config,
        counted_split=counted,
        per_document=per_document,
    )


def default_scores_directory(checkpoint: Path) -> Path | None:
    """RUN/evaluations for a checkpoint of a run; None for other models."""
    run = run_of(checkpoint)
    return None if run is None else run / FOLDER


Sweep: TypeAlias = Sequence[Sequence[PlannedJob]]
"""The jobs of one model: sweep[combination][split]. The first split selects."""


@dataclass(frozen=True, slots=True, eq=False)
class SweepResult:
    """The scores of one model."""

    candidates: list[EvaluationResult]
    """Result of each combination on the first split."""
    best: int
    """The combination with the lowest loss; the first of equal ones."""
    reported: list[EvaluationResult]
    """Results of the best combination on the other splits."""


def evaluate_sweep(
    sweep: Sweep,
    workers: Workers,
    *,
    progress: Progress = lambda label, done, total: None,
    note: Callable[[str], None] = lambda line: None,
) -> SweepResult:
    """Score all combinations on the first split, and the best one on the others."""
    first_jobs = [jobs[0] for jobs in sweep]
    candidates = evaluate_on_workers(first_jobs, workers, progress=progress, note=note)
    losses = [candidate.sums.nats for candidate in candidates]
    best = losses.index(min(losses))
    other_jobs, reported = sweep[best][1:], []
    if other_jobs:
        reported = evaluate_on_workers(other_jobs, workers, progress=progress, note=note)
    return SweepResult(candidates, best, reported)
