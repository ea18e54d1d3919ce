"""`txl train`: start or resume a run, on this machine or on a cluster, and show its log."""

import difflib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from txl_dist.cli.options import ConfigPath, Overrides, require_local
from txl_dist.cli.progress import run_progress
from txl_dist.errors import ConfigError

if TYPE_CHECKING:
    from txl_dist.launch.launcher import RankRange
    from txl_dist.training.job import TrainJob


def train(
    config: ConfigPath,
    overrides: Overrides = None,
    on: Annotated[
        str | None,
        typer.Option(
            help="ray: start Ray on this machine. An address: use a running Ray cluster. "
            "processes: start processes on this machine, without Ray.",
            show_default="ray",
        ),
    ] = None,
    ranks: Annotated[
        str | None,
        typer.Option(
            help="Number of data-parallel ranks. A:B, with Ray: from A to B, as many as the "
            "cluster has room for.",
            show_default="1",
        ),
    ] = None,
    resume: Annotated[
        str,
        typer.Option(
            help="auto: resume from the newest checkpoint, if there is one. never: refuse a "
            "directory with checkpoints. Or the path of a checkpoint, from which the same command "
            "later continues.",
            parser=require_local,
        ),
    ] = "auto",
    allow_change: Annotated[
        list[str] | None,
        typer.Option(help="Setting that may differ from the checkpoint's; can be repeated."),
    ] = None,
    allow_data_change: Annotated[
        bool,
        typer.Option("--allow-data-change", help="Resume on other data with the same tokenizer."),
    ] = False,
    strict: Annotated[
        bool, typer.Option("--strict", help="Never fall back to an older checkpoint.")
    ] = False,
    max_restarts: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Restarts from the newest checkpoint after a rank was killed or hung. A new "
            "checkpoint resets the count.",
            show_default="ray.max_restarts with Ray, 0 with processes",
        ),
    ] = None,
    force_unlock: Annotated[
        bool,
        typer.Option(
            "--force-unlock",
            help="Start although the directory is locked by another run, for example on a host "
            "that is lost. If that run is still alive, it stops at its next checkpoint.",
        ),
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check config and data, then stop.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print no progress.")] = False,
) -> None:
    """Train a model. Resumes from the newest checkpoint of the run directory, if there is one.

    Example: txl train quickstart --ranks 2 training.num_steps=500
    """
    from txl_dist.config.config_file import load_run_config
    from txl_dist.launch.launcher import RankRange
    from txl_dist.runtime.process import is_torchrun
    from txl_dist.training.job import TrainJob

    rank_range = RankRange.parse(ranks or "1")
    job = TrainJob(
        config=load_run_config(config, overrides or []),
        resume=resume,
        allow_change=tuple(allow_change or ()),
        allow_data_change=allow_data_change,
        strict=strict,
        force_unlock=force_unlock,
    )
    _require_known_settings(job)
    if is_torchrun():
        from txl_dist.launch.torchrun import train_as_rank

        train_as_rank(job, on=on, ranks=ranks, max_restarts=max_restarts, dry_run=dry_run)
    else:
        _launch(
            job,
            config,
            on=on or "ray",
            ranks=rank_range,
            max_restarts=max_restarts,
            dry_run=dry_run,
            quiet=quiet,
        )


def _launch(
    job: "TrainJob",
    config: Path,
    *,
    on: str,
    ranks: "RankRange",
    max_restarts: int | None,
    dry_run: bool,
    quiet: bool,
) -> None:
    """Open the data to find errors early, then let a launcher start the ranks."""
    from data_pipeline.shards import require_manifest

    for corpus in job.config.data.corpora.values():
        require_manifest(corpus.path)  # before numpy is imported: the most common mistake
    from txl_dist.launch.launcher import find_launcher
    from txl_dist.runtime.process import stray_variables
    from txl_dist.training.compatibility import check_newest_checkpoint
    from txl_dist.training.data import TrainingData
    from txl_dist.training.run_directory import RunDirectory
    from txl_dist.training.schedule import resolve_duration

    if not (quiet or dry_run):
        print(f"checking {config} and its data", flush=True)
    if stray := stray_variables():
        print(
            f"ignored {', '.join(stray)} of the environment: torchrun did not set them",
            file=sys.stderr,
        )
    # In this process first: one message, instead of one from every rank after a slow start.
    launcher = find_launcher(on)
    data = TrainingData.open(job.config, num_ranks=ranks.maximum)
    config_in_steps = resolve_duration(job.config, data.plan)
    num_steps = config_in_steps.num_steps
    check_newest_checkpoint(job.model_copy(update={"config": config_in_steps}), data)
    if dry_run:
        print(
            f"{config}: ready. {data.plan.num_tokens:,} training tokens in {data.plan.num_lanes} "
            f"lanes on {ranks} ranks; the run would write to {job.run_path}"
        )
        return
    RunDirectory(job.run_path).create()
    with run_progress(num_steps, quiet=quiet) as on_line:
        launcher.train(
            job,
            num_ranks=ranks.maximum,
            min_ranks=ranks.minimum,
            on_line=on_line,
            max_restarts=max_restarts,
        )
    if not quiet:
        print(f"done: {job.run_path} (checkpoints, metrics.jsonl, logs)")


def _require_known_settings(job: "TrainJob") -> None:
    """Raises ConfigError if `--allow-change` names a setting that does not exist."""
    if not job.allow_change:
        return
    from txl_dist.config.config_file import flatten_config
    from txl_dist.training.compatibility import MIXTURE

    # A misspelt key would allow nothing, and the ranks would refuse the change much later.
    settings = {*flatten_config(job.config), MIXTURE}
    for key in job.allow_change:
        if key not in settings:
            nearest = difflib.get_close_matches(key, settings, n=1)
            hint = f"did you mean {nearest[0]}?" if nearest else "see txl config show CONFIG"
            raise ConfigError(f"--allow-change {key}: there is no such setting; {hint}")
