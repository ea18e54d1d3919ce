"""`txl eval`: score a split of a dataset with a trained model, on any number of workers."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from txl_dist.cli.options import (
    AsJson,
    Checkpoint,
    EvaluationData,
    MemLen,
    PrecisionOption,
    TgtLen,
)

if TYPE_CHECKING:
    from data_pipeline.storage.remote_path import DatasetPath
    from txl_dist.checkpoint.reader import Weights
    from txl_dist.config.run_config import Precision
    from txl_dist.evaluation.evaluate import EvaluationJob, EvaluationResult


def evaluate(
    checkpoint: Checkpoint,
    data: EvaluationData,
    split: Annotated[str, typer.Option(help="Split to score.")] = "valid",
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
    workers: Annotated[
        int, typer.Option(min=1, help="Number of workers; more than one needs Ray.")
    ] = 1,
    on: Annotated[
        str | None,
        typer.Option(help="processes: in this process. ray, or the address of a cluster: on Ray."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Score a split. Every target is scored once, with the memory of one sequential pass.

    Example: txl eval runs/quickstart data/stdlib --split valid --workers 2
    """
    from txl_dist.cli.progress import chunk_progress
    from txl_dist.launch.launcher import find_launcher

    job = evaluation_job(
        checkpoint,
        data,
        split=split,
        mode=mode,
        tgt_len=tgt_len,
        mem_len=mem_len,
        clamp_len=clamp_len,
        same_length=same_length,
        batch=batch,
        precision=precision,
        weights=weights,
    )
    launcher = find_launcher(on or ("processes" if workers == 1 else "ray"))
    with chunk_progress(quiet=as_json) as on_progress:
        result = launcher.evaluate(job, num_workers=workers, on_progress=on_progress)
    _log_to_mlflow(job, result)
    if as_json:
        print(
            json.dumps(
                {
                    **result.to_json(),
                    "checkpoint": str(job.checkpoint),
                    "weights": job.weights,
                    "workers": workers,
                }
            )
        )
    else:
        _print_table(job, result)


def evaluation_job(
    checkpoint: Path,
    data: "str | DatasetPath",
    *,
    split: str,
    mode: Literal["exact", "fast"] = "exact",
    tgt_len: int | None,
    mem_len: int | None,
    clamp_len: int | None = None,
    same_length: bool = False,
    batch: int,
    precision: "Precision" = "fp32",
    max_tokens: int | None = None,
    weights: "Weights" = "auto",
) -> "EvaluationJob":
    """An evaluation with the settings of training, except for the options that are not None.

    Raises CheckpointError if no model is there, ConfigError if the options do not fit the model.
    """
    from data_pipeline.storage.remote_path import dataset_path
    from txl_dist.convert.stored_model import find_model
    from txl_dist.errors import ConfigError
    from txl_dist.evaluation.evaluate import EvaluationJob, EvaluationSettings

    stored = find_model(checkpoint, weights=weights)
    trained = stored.config
    new_mem_len = trained.mem_len if mem_len is None else mem_len
    settings = EvaluationSettings(
        split=split,
        mode=mode,
        tgt_len=tgt_len or stored.tgt_len,
        mem_len=new_mem_len,
        # On the command line 0 means no clamping; in a config that is null.
        clamp_len=trained.clamp_len if clamp_len is None else (clamp_len or None),
        # --mem-len 0 on a model trained with same_length: the option needs a memory.
        same_length=same_length or (trained.same_length and new_mem_len > 0),
        reset=stored.reset,
        precision=precision,
        max_tokens=max_tokens,
    )
    job = EvaluationJob(
        checkpoint=stored.path,
        data=dataset_path(data),
        settings=settings,
        batch_chunks=batch,
        weights=stored.weights,
    )
    try:  # Here, and not on the workers, so that wrong options start nothing.
        job.model_config(trained)
    except ValueError as error:
        raise ConfigError(f"{stored.path}: {error}") from None
    return job


def _log_to_mlflow(job: "EvaluationJob", result: "EvaluationResult") -> None:
    """Log a child run of the training run, if the checkpoint is in its run directory."""
    from txl_dist.tracking.evaluation import log_evaluation

    run = job.checkpoint.resolve().parent.parent
    if (run / "tracking.json").exists():
        log_evaluation(run, {**result.to_json(), "checkpoint": job.checkpoint.name})


def _print_table(job: "EvaluationJob", result: "EvaluationResult") -> None:
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
    if settings.mode == "fast":
        print(
            "  fast: only one memory length of context per chunk; the exact score is slightly lower"
        )
