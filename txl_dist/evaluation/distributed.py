"""Evaluates any number of specs on workers, batch by batch; a killed evaluation can be resumed.

    spec -> plan_spec (chunks) -> scoring_tasks (batches) -> score_batch on any worker
        -> FinishedScores -> sums in the order of the chunks -> result

A batch is `batch_chunks` consecutive chunks (with `num_ranks`, of the chunks of one rank). Which
worker scores it, and in which attempt, does not change its sums, so the result is always the same
to the last bit.

A sweep (`txl eval --sweep`) scores every combination of memory options on one split and reports the
best one on the others, as the paper chose mem_len and clamp_len.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TypeAlias

from data_pipeline.shards.manifest import load_manifest
from data_pipeline.shards.shard_reader import open_split
from data_pipeline.system.strict_json import sha256_of
from data_pipeline.system.workers import InProcess, Progress, WorkerDiedError, Workers
from txl_dist.convert.stored_model import find_model
from txl_dist.errors import ConfigError, DataError, TxlError
from txl_dist.evaluation.batches import (
    FinishedScores,
    PlannedEvaluation,
    close_scorer,
    score_batch,
    scoring_tasks,
)
from txl_dist.evaluation.breakdown import counted_split
from txl_dist.evaluation.result import EvaluationResult, scored_text
from txl_dist.evaluation.spec import EvaluationSpec, plan_evaluation
from txl_dist.runtime.process import code_description


def evaluate_on_workers(
    planned: Sequence[PlannedEvaluation],
    workers: Workers,
    *,
    progress: Progress = lambda label, done, total: None,
    note: Callable[[str], None] = lambda line: None,
) -> list[EvaluationResult]:
    """The results of all specs, in their order. Progress counts tokens.

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
            planned[task.spec_number].finished.add(task.batch_number, scores)
            done += task.num_tokens
            progress("scoring", done, total)
    except WorkerDiedError as error:
        raise TxlError(
            f"{error.event}. Most likely RAM ran out (SIGKILL: see dmesg on that machine). Run the "
            f"same command with --resume and fewer --workers (now {workers.num_workers}), "
            "which keeps the finished chunks, or with a smaller --batch (now "
            f"{planned[0].spec.batch_chunks}), which starts again"
        ) from None
    finally:
        close_scorer()
    return [each.result() for each in planned]


def evaluate(spec: EvaluationSpec, workers: Workers | None = None) -> EvaluationResult:
    """Score one split, on `workers` or in this process.

    Raises CheckpointError or DataError if there is no such model or split, or if they do not fit.
    """
    return evaluate_on_workers([plan_spec(spec)], workers or InProcess())[0]


def plan_spec(
    spec: EvaluationSpec,
    directory: Path | None = None,
    *,
    resume: bool = False,
    details: bool = False,
    per_document: bool = False,
    allow_short_split: bool = False,
) -> PlannedEvaluation:
    """Check that model and data fit, and cut the split into chunks.

    `directory`: where the sums of finished batches are kept; None: nowhere. `resume`: use those
    that are there. `details`: also sum the loss by position, token frequency and document.
    `per_document`: only by document. A split shorter than a segment is refused without
    `allow_short_split`.
    """
    given = spec
    # Workers may have another working directory.
    spec = replace(spec, checkpoint=spec.checkpoint.resolve(), data=spec.data.resolve())
    model, manifest = find_model(spec.checkpoint, weights=spec.weights), load_manifest(spec.data)
    model.check_data(manifest, spec.data)
    spec = replace(spec, digest=model.digest)
    source = open_split(spec.data, spec.settings.split, manifest=manifest)
    chunks = plan_evaluation(source, spec.settings, model.config)
    num_targets = source.num_tokens - 1
    if num_targets < spec.settings.tgt_len and not allow_short_split:
        raise DataError(
            f"split {spec.settings.split} of {spec.data} has {num_targets:,} targets, less than a "
            f"segment of tgt_len={spec.settings.tgt_len}. Score it with --tgt-len {num_targets} or "
            "less, or prepare more text"
        )
    if directory is None and resume:
        raise ConfigError(
            f"--resume: {spec.checkpoint} is not in a run directory, so there is no default place "
            "for the scores of finished chunks. Give one: --out DIR"
        )
    counted = counted_split(manifest, spec.settings.split) if details else None
    description = {
        "model": model.digest,
        "data": manifest.digest,
        "settings": asdict(spec.settings),
        "batch_chunks": spec.batch_chunks,
        "num_ranks": spec.num_ranks,
        "num_threads": spec.num_threads,
        "chunks": sha256_of([[c.context_start, c.start, c.stop] for c in chunks]),
        "code": code_description(),
        "token_frequency_counted_on": counted,
        "per_document": per_document and not details,
    }
    key = sha256_of(description)
    path = directory and directory / f"{spec.settings.split}-{key[:16]}.jsonl"
    # The path is not part of the key: it may be another one after a move.
    description["checkpoint"] = str(spec.checkpoint)
    return PlannedEvaluation(
        spec=spec,
        given=given,
        chunks=chunks,
        finished=FinishedScores(path, key=key, description=description, resume=resume),
        text=scored_text(source, max_tokens=spec.settings.max_tokens),
        data_digest=manifest.digest,
        trained=model.config,
        counted_split=counted,
        per_document=per_document,
    )


Sweep: TypeAlias = Sequence[Sequence[PlannedEvaluation]]
"""The specs of one model: sweep[combination][split]. The first split selects."""


def evaluate_sweep(
    sweep: Sweep, score: Callable[[Sequence[PlannedEvaluation]], list[EvaluationResult]]
) -> list[EvaluationResult]:
    """Score all combinations on the first split, and the best one on the others, in this order.

    Of equal losses the first is the best. `selected` says of which setting a result is.
    """
    candidates = score([specs[0] for specs in sweep])
    best = min(range(len(candidates)), key=lambda number: candidates[number].nats)
    reported = score(sweep[best][1:]) if sweep[best][1:] else []
    return [
        *(
            each.model_copy(update={"selected": number == best})
            for number, each in enumerate(candidates)
        ),
        *(each.model_copy(update={"selected": True}) for each in reported),
    ]
