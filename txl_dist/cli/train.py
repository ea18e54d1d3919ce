"""`txl train`: start or resume a run, on this machine or on a cluster, and show its log."""

from typing import TYPE_CHECKING, Annotated

import typer

from data_pipeline.errors import counted
from txl_dist.cli.options import ConfigPath, Overrides, require_local
from txl_dist.errors import ConfigError

if TYPE_CHECKING:
    from txl_dist.training.spec import TrainSpec


def train(
    config: ConfigPath,
    overrides: Overrides = None,
    on: Annotated[
        str | None,
        typer.Option(
            metavar="processes|ray|ADDRESS",
            help="ray: start Ray on this machine. An address, or auto for that of this host: use a "
            "running Ray cluster. processes: start processes on this machine, without Ray.",
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
    from data_pipeline.shards import require_manifest
    from txl_dist.launch.launcher import find_launcher
    from txl_dist.launch.rank_group import RankRange
    from txl_dist.runtime.process import is_torchrun
    from txl_dist.training.origin import check_origin, load_run_config
    from txl_dist.training.spec import RunDirectory, TrainSpec

    rank_range = RankRange.parse(ranks or "1")
    spec = TrainSpec(
        config=load_run_config(config, overrides or [], resume=resume),
        resume=resume,
        allow_change=tuple(allow_change or ()),
        allow_data_change=allow_data_change,
        strict=strict,
        force_unlock=force_unlock,
    )
    _require_known_settings(spec)
    if is_torchrun():
        from txl_dist.launch.rank_process import train_under_torchrun

        options = {"--on": on, "--ranks": ranks, "--max-restarts": max_restarts}
        options |= {"--dry-run": "" if dry_run else None}
        train_under_torchrun(spec, options, is_quiet=quiet)
    for corpus in spec.config.data.corpora.values():
        require_manifest(corpus.path)  # before numpy is imported: the most common mistake
    if not (quiet or dry_run):
        print(f"checking {config} and its data", flush=True)
    # These import numpy.
    from txl_dist.training.compatibility import check_newest_checkpoint
    from txl_dist.training.data import TrainingData

    launcher = find_launcher(on or "ray")
    launcher.check_ranks(rank_range)
    RunDirectory(spec.run_path).require_usable()
    # Before any rank: one message, instead of one from every rank after a slow start.
    data = TrainingData.open(spec.config, num_ranks=rank_range.maximum)
    check_newest_checkpoint(spec, data)
    if resume != "auto":
        from txl_dist.training.resume import check_resume  # imports torch

        check_resume(spec, data)
    check_origin(spec, data)
    if dry_run:
        plan = data.plan
        steps_per_epoch = -(-plan.lane_tokens // plan.tgt_len) * plan.num_turns
        print(
            f"{config}: ready. {plan.num_tokens:,} training tokens in "
            f"{counted(plan.num_lanes, 'lane')}, {counted(steps_per_epoch, 'step')} per epoch, "
            f"--ranks {rank_range}; the run would write to {spec.run_path}"
        )
        for warning in spec.config.warnings:
            print(f"WARNING: {warning}")
        return
    RunDirectory(spec.run_path).create()
    launcher.train(
        spec,
        num_ranks=rank_range.maximum,
        min_ranks=rank_range.minimum,
        on_line=(lambda line: None) if quiet else (lambda line: print(line, flush=True)),
        max_restarts=max_restarts,
    )
    if not quiet:
        print(f"done: {spec.run_path} (checkpoints, metrics.jsonl, logs)")


def _require_known_settings(spec: "TrainSpec") -> None:
    """Raises ConfigError if `--allow-change` names a setting that does not exist."""
    if not spec.allow_change:
        return
    from txl_dist.config.config_file import flatten_config, nearest_setting
    from txl_dist.training.compatibility import MIXTURE, OPEN_SECTIONS

    # A misspelt key would allow nothing, and the ranks would refuse the change much later.
    for key in {*spec.allow_change} - {*flatten_config(spec.config), MIXTURE}:
        if key.startswith(OPEN_SECTIONS):  # only the checkpoint may have it
            continue
        hint = nearest_setting(key)
        raise ConfigError(f"--allow-change {key}: there is no such setting; {hint}")
