"""`txl train`: start or resume a run, here or on a cluster, and show what it says."""

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from txl_dist.cli.paths import local_path_parser, require_local

if TYPE_CHECKING:
    from txl_dist.training.job import TrainJob
    from txl_dist.world import World


def train(
    config: Annotated[
        Path,
        typer.Argument(
            help="YAML file of the run.", show_default=False, parser=local_path_parser()
        ),
    ],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="Settings to change: k.e.y=value ...")
    ] = None,
    on: Annotated[
        str, typer.Option(help="ray: a Ray of its own here; an address; or processes.")
    ] = "ray",
    ranks: Annotated[int, typer.Option(min=1, help="Number of data-parallel ranks.")] = 1,
    resume: Annotated[
        str,
        typer.Option(
            help="auto, never, or a checkpoint's path.",
            parser=require_local,
        ),
    ] = "auto",
    allow_change: Annotated[
        list[str] | None, typer.Option(help="A setting that may differ from the checkpoint's.")
    ] = None,
    allow_data_change: Annotated[
        bool, typer.Option("--allow-data-change", help="Resume on other data, same tokenizer.")
    ] = False,
    strict: Annotated[
        bool, typer.Option("--strict", help="Never fall back to an older checkpoint.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check config and data, then stop.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print no progress.")] = False,
) -> None:
    """Train a model, resuming from its newest checkpoint if there is one.

    Example: txl train configs/quickstart.yaml --ranks 2 training.num_steps=500
    """
    from txl_dist.cli.progress import run_progress
    from txl_dist.config_file import load_run_config
    from txl_dist.launchers import find_launcher
    from txl_dist.training.data import TrainingData
    from txl_dist.training.job import TrainJob
    from txl_dist.training.run_directory import RunDirectory
    from txl_dist.world import RANK_VARIABLES, World

    job = TrainJob(
        config=load_run_config(config, overrides or []),
        resume=resume,
        allow_change=tuple(allow_change or ()),
        allow_data_change=allow_data_change,
        strict=strict,
    )
    if all(os.environ.get(name) for name in RANK_VARIABLES):
        _train_as_rank(job, World.from_environment())
        return
    _check_allowed(job)
    launcher = find_launcher(on)
    data = TrainingData.open(job.config, num_ranks=ranks)
    if dry_run:
        print(
            f"{config}: ready. {data.plan.num_tokens:,} training tokens in {data.plan.num_lanes} "
            f"lanes on {ranks} ranks; the run would write to {job.run_path}"
        )
        return
    RunDirectory(job.run_path).create()
    with run_progress(job.config.training.num_steps, quiet=quiet) as on_line:
        launcher.train(job, num_ranks=ranks, on_line=on_line)
    if not quiet:
        print(f"done: {job.run_path} (checkpoints, metrics.jsonl, logs)")


def _check_allowed(job: "TrainJob") -> None:
    """A misspelt --allow-change would allow nothing, and be noticed only on the ranks."""
    import difflib

    from txl_dist.checkpoint.compatibility import MIXTURE
    from txl_dist.config_file import flatten_config
    from txl_dist.errors import ConfigError

    legal = {*flatten_config(job.config), MIXTURE}
    for key in job.allow_change:
        if key not in legal:
            nearest = difflib.get_close_matches(key, legal, n=1)
            hint = f"did you mean {nearest[0]}?" if nearest else "see txl config show CONFIG"
            raise ConfigError(f"--allow-change {key}: there is no such setting; {hint}")


def _train_as_rank(job: "TrainJob", world: "World") -> None:
    """Under torchrun this process is one rank; rank 0 prints its own lines."""
    import logging

    from txl_dist.training.rank import train_rank

    if world.is_first:
        logging.getLogger("txl_dist").addHandler(logging.StreamHandler(sys.stdout))
    try:
        train_rank(job, world)
    finally:
        world.leave()
