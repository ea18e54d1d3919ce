"""`txl doctor`: check this machine, or all nodes of a Ray cluster, before a run."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from txl_dist.cli.options import AsJson, require_local

if TYPE_CHECKING:
    from txl_dist.doctor.checks import DoctorRequest
    from txl_dist.doctor.finding import Finding

_GIB = 2**30


def doctor(
    on: Annotated[
        str | None,
        typer.Option(
            help="The address of a running Ray cluster: check every node. ray: a Ray started for "
            "this command.",
            show_default="this machine, without Ray",
        ),
    ] = None,
    run: Annotated[
        str | None,
        typer.Option(
            metavar="DIR",
            help="A run directory, which exists or will be created: check that all nodes can use "
            "it. A probe file is written there and removed.",
            parser=require_local,
        ),
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(metavar="DATA", help="A dataset: check that all nodes read the same one."),
    ] = None,
    tracking_uri: Annotated[
        str | None,
        typer.Option(
            metavar="URI",
            help="MLflow server or database to check.",
            show_default="MLFLOW_TRACKING_URI",
        ),
    ] = None,
    min_free_gib: Annotated[
        float, typer.Option(min=0, help="Free space that the run directory needs, in GiB.")
    ] = 10.0,
    time_limit: Annotated[
        float, typer.Option(min=1, help="Seconds for one check; then it counts as failed.")
    ] = 30.0,
    skip: Annotated[
        list[str] | None,
        typer.Option(
            metavar="CHECK",
            help="A check to leave out: versions, devices, storage, "
            "dataset, tracking, exposure, clock or network; can be repeated.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Check versions, devices, storage, dataset, tracking, exposure, clocks and network.

    Exit code 1 if a problem was found. Nothing is changed.

    Example: txl doctor --on 10.0.0.1:6379 --run /shared/runs/first --data /shared/data/stdlib
    """
    from txl_dist.cli.progress import running
    from txl_dist.doctor.checks import DoctorRequest
    from txl_dist.doctor.finding import num_problems, print_report, to_json

    request = DoctorRequest(
        run=None if run is None else _absolute(run),
        data=None if data is None else _absolute(data),
        tracking_uri=tracking_uri,
        min_free_bytes=int(min_free_gib * _GIB),
        limit_seconds=time_limit,
        skip=_checks_to_skip(skip or []),
    )
    with running(f"checking {on or 'this machine'}", quiet=as_json):
        findings = _findings(request, on)
    if as_json:
        print(json.dumps(to_json(findings)))
    else:
        print_report(findings)
    if num_problems(findings):
        raise typer.Exit(1)


def _absolute(path: str) -> str:
    """Ray's workers have another working directory. URLs stay as they are."""
    from data_pipeline.system.sources import is_url

    return path if is_url(path) else str(Path(path).expanduser().absolute())


def _findings(request: "DoctorRequest", on: str | None) -> "list[Finding]":
    from txl_dist.doctor.checks import NodeChecker, check_this_machine
    from txl_dist.errors import ConfigError
    from txl_dist.launch.launcher import find_launcher

    if on is None or on == "processes":
        return check_this_machine(request)
    launcher = find_launcher(on)
    if not isinstance(launcher, NodeChecker):
        raise ConfigError(
            f"--on {on}: this launcher cannot check its nodes. Run txl doctor on each of them, "
            "without --on"
        )
    return launcher.check_nodes(request)


def _checks_to_skip(names: list[str]) -> frozenset[str]:
    from txl_dist.doctor.checks import CHECKS
    from txl_dist.errors import ConfigError

    if unknown := sorted(set(names) - set(CHECKS)):
        raise ConfigError(
            f"--skip {unknown[0]}: there is no such check; the checks are {', '.join(CHECKS)}"
        )
    return frozenset(names)
