"""`txl eval`: score splits of a dataset with trained models, on any number of workers."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from txl_dist.cli.options import (
    AsJson,
    Checkpoints,
    EvaluationData,
    MemLen,
    PrecisionOption,
    TgtLen,
)
from txl_dist.cli.paths import local_path_parser

if TYPE_CHECKING:
    from txl_dist.evaluation.evaluate import EvaluationJob, EvaluationResult


def evaluate(
    checkpoints: Checkpoints,
    data: EvaluationData,
    split: Annotated[
        str, typer.Option(metavar="NAME,...", help="Splits to score, such as valid,test.")
    ] = "valid",
    mode: Annotated[
        Literal["exact", "fast"],
        typer.Option(
            help="exact: the score of one sequential pass. fast: less context before each chunk, "
            "so the score is approximate."
        ),
    ] = "exact",
    tgt_len: TgtLen = None,
    mem_len: MemLen = None,
    clamp_len: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Larger distances share one encoding; 0: no limit. Default: as in training.",
        ),
    ] = None,
    same_length: Annotated[
        bool, typer.Option("--same-length", help="Every query sees exactly mem_len keys.")
    ] = False,
    precision: PrecisionOption = "fp32",
    batch: Annotated[int, typer.Option(min=1, help="Chunks per batch.")] = 8,
    weights: Annotated[
        Literal["auto", "averaged", "last"],
        typer.Option(
            help="averaged: the average over steps (optimizer.averaging); last: those of the last "
            "step; auto: the average if the checkpoint has one."
        ),
    ] = "auto",
    workers: Annotated[int, typer.Option(min=1, help="Number of workers.")] = 1,
    on: Annotated[
        str | None,
        typer.Option(
            help="processes: on this machine, one worker in this process. ray: a Ray started for "
            "this command. An address: a running Ray cluster, whose nodes must all see the "
            "checkpoints and the data. Default: processes for one worker, else ray."
        ),
    ] = None,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume", help="Do not score again the chunks that a stopped command has finished."
        ),
    ] = False,
    scores: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Where the sums of finished chunks are kept. Default: RUN/evaluations for the "
            "checkpoints of a run; for other models they are not kept.",
            parser=local_path_parser(),
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Score splits. Every target is scored once, with the memory of one sequential pass.

    Several checkpoints or splits give one table, with --json a list. If a worker dies, another one
    scores its chunks.

    Example: txl eval runs/quickstart data/stdlib --split valid --workers 2
    """
    from txl_dist.cli.work_progress import TOKENS, work_progress
    from txl_dist.cli.workers import open_workers, stoppable
    from txl_dist.evaluation.distributed import (
        default_scores_directory,
        evaluate_on_workers,
        plan_job,
    )
    from txl_dist.evaluation.job import evaluation_job

    jobs = [
        evaluation_job(
            checkpoint,
            data,
            split=name,
            mode=mode,
            tgt_len=tgt_len,
            mem_len=mem_len,
            clamp_len=clamp_len,
            same_length=same_length,
            batch=batch,
            precision=precision,
            weights=weights,
        )
        for checkpoint in checkpoints
        for name in _names(split)
    ]
    directories = [scores or default_scores_directory(job.checkpoint.resolve()) for job in jobs]
    planned = [plan_job(*each, resume=resume) for each in zip(jobs, directories, strict=True)]
    on = on or ("processes" if workers == 1 else "ray")
    with (
        stoppable(_resume_advice(directories)),
        open_workers(on, workers, use_gpus=True) as pool,
        work_progress(TOKENS, pool) as progress,
    ):
        results = evaluate_on_workers(
            planned,
            pool,
            progress=progress,
            note=lambda line: print(line, file=sys.stderr),
        )
    _log_to_mlflow(jobs, results)
    if as_json:
        objects = [_json(*pair, workers) for pair in zip(jobs, results, strict=True)]
        print(json.dumps(objects[0] if len(objects) == 1 else objects))
    elif len(jobs) == 1:
        _print_result(jobs[0], results[0])
    else:
        _print_table(jobs, results)


def _names(split: str) -> list[str]:
    """Parse `valid,test`."""
    from txl_dist.errors import ConfigError

    names = [name.strip() for name in split.split(",")]
    if "" in names or len(set(names)) < len(names):
        raise ConfigError(f"--split {split!r}: expected different names, such as valid,test")
    return names


def _resume_advice(directories: "Sequence[Path | None]") -> str:
    if None in directories:
        return "no score was computed. With --scores DIR, finished chunks are kept for --resume"
    places = ", ".join(sorted({str(directory) for directory in directories}))
    return (
        f"no score was computed. Finished chunks are kept in {places}: run the same command with "
        "--resume to continue"
    )


def _log_to_mlflow(jobs: "Sequence[EvaluationJob]", results: "Sequence[EvaluationResult]") -> None:
    """Log child runs of the training run, for the checkpoints that are in its run directory."""
    from txl_dist.tracking.evaluation import log_evaluations

    scored = []
    for job, result in zip(jobs, results, strict=True):
        run = job.checkpoint.resolve().parent.parent
        if (run / "tracking.json").exists():
            scored.append((run, {**result.to_json(), "checkpoint": job.checkpoint.name}))
    log_evaluations(scored)


def _json(job: "EvaluationJob", result: "EvaluationResult", workers: int) -> dict[str, Any]:
    return {
        **result.to_json(),
        "checkpoint": str(job.checkpoint),
        "weights": job.weights,
        "workers": workers,
    }


def _print_table(jobs: "Sequence[EvaluationJob]", results: "Sequence[EvaluationResult]") -> None:
    """One line per checkpoint and split."""
    names = [str(job.checkpoint) for job in jobs]
    width = max(len(name) for name in ("checkpoint", *names))
    splits = max(len(result.settings.split) for result in results)
    splits = max(splits, len("split"))
    print(
        f"{'checkpoint':{width}}  {'split':{splits}}  {'targets':>12}  {'nats/token':>10}  "
        f"{'perplexity':>11}  {'bits/byte':>9}  context"
    )
    for name, result in zip(names, results, strict=True):
        sums = result.sums
        per_byte = f"{sums.bits_per_byte:.4f}" if sums.num_bytes else "-"
        print(
            f"{name:{width}}  {result.settings.split:{splits}}  {sums.num_tokens:>12,}  "
            f"{sums.nats_per_token:>10.4f}  {sums.perplexity:>11.4f}  {per_byte:>9}  "
            f"{result.overhead:.1%}"
        )
    settings = results[0].settings
    print(
        f"data {jobs[0].data}, {settings.mode}, {settings.precision}; context: more tokens that "
        "were read, because chunks are scored independently"
    )


def _print_result(job: "EvaluationJob", result: "EvaluationResult") -> None:
    from txl_dist.evaluation.chunks import MAX_OVERHEAD

    sums, settings = result.sums, result.settings
    print(f"{job.checkpoint} on {job.data}, split {settings.split} ({settings.mode})")
    if job.weights == "averaged":
        print("  weights          averaged over steps; those of the last one: --weights last")
    print(f"  targets scored   {sums.num_tokens:,}")
    print(f"  nats             {sums.nats:.4f}  ({sums.nats_per_token:.4f} per token)")
    print(f"  perplexity       {sums.perplexity:.4f}")
    if sums.num_bytes:
        print(f"  bits per byte    {sums.bits_per_byte:.4f}")
    print(
        f"  tgt_len {settings.tgt_len}, mem_len {settings.mem_len}, clamp_len "
        f"{settings.clamp_len}, same_length {settings.same_length}, {settings.precision}; "
        f"{result.num_chunks} chunks, {result.overhead:.1%} more tokens read as context"
    )
    if result.overhead > MAX_OVERHEAD:
        print("  so many because the split is short and is cut for several workers nevertheless")
    if settings.mode == "fast":
        print(
            "  fast: only one memory length of context per chunk; the exact score is slightly lower"
        )
