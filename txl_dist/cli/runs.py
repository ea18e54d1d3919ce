"""What runs do and have written: `txl report`, `txl status` and `txl track`."""

import json
from pathlib import Path
from typing import Annotated

import typer

from data_pipeline.system.files import write_file
from txl_dist.cli.options import AsJson, Run, path_argument, print_result
from txl_dist.cli.progress import running
from txl_dist.errors import ConfigError, TxlError

track_app = typer.Typer(help="Tracking of runs in MLflow.", no_args_is_help=True)

COMPARISON = "comparison.html"
MLFLOW_SECONDS = 120.0
"""For the import of mlflow."""


def report(
    runs: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN...",
            help="A run directory; of several runs, a comparison.",
            parser=path_argument,
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Default: RUN/report.html, of several runs comparison.html next to the first one.",
            parser=path_argument,
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write one HTML page about a run, or about several.

    It has curves, scores, wall time and events. Of several runs: curves over each other, settings
    that differ, scores and goodput side by side. The page needs no other file and no network. The
    runs may be in progress.

    Example: txl report runs/quickstart
    """
    from txl_dist.analysis.run_report import read_run, run_page

    records = [read_run(run) for run in runs]
    path = out or (runs[0] / "report.html" if len(runs) == 1 else runs[0].parent / COMPARISON)
    write_file(path, run_page(records).encode())
    newest = [{"run": each.name, "step": each.last_step} for each in records]
    content = {**newest[0], "report": str(path), "runs": newest}
    print_result(content, f"wrote {path}; open it in a browser", as_json=as_json)


def status(
    runs: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="[RUN...]",
            help="Run directories. Default: those below runs/.",
            parser=path_argument,
            show_default=False,
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Say what runs are doing.

    Prints step, loss, speed, time left, newest checkpoint, the error of a failed run, and MLflow's
    page. A run is running, starting, ended, stopped (on request), failed, or lost (without a last
    word). Reads files only, also those of a run on another host that shares the storage: then
    it takes up to 15 seconds to see whether the ranks live.

    Example: txl status runs/quickstart
    """
    from txl_dist.analysis.run_status import find_runs, read_status, status_lines

    with running("watching the heartbeats of runs, at most 15 s"):
        statuses = read_status(runs or find_runs(Path("runs")))
    if as_json:
        print(json.dumps({"runs": [each.to_json() for each in statuses]}))
        return
    for each in statuses:
        print("\n".join(status_lines(each)))
    if not statuses:
        print("no run in runs/; give run directories: txl status RUN")


# --- tracking -------------------------------------------------------------------------------------


@track_app.command("sync")
def sync(
    run: Run,
    timeout_seconds: Annotated[float, typer.Option(min=1, help="Give up after this time.")] = 600.0,
    as_json: AsJson = False,
) -> None:
    """Deliver to MLflow what a run has not delivered.

    Metrics, settings, checkpoints, and scores, also those of txl eval. For a run that has ended;
    one that is training delivers by itself. Points that MLflow has are not sent again, so it can be
    repeated. The copy of a run directory gets its own MLflow run.

    Example: txl track sync runs/quickstart
    """
    from txl_dist.tracking.process import run_sender
    from txl_dist.tracking.tracker import (
        LOG,
        REQUEST,
        STATE,
        TrackingRequest,
        TrackingState,
        UnavailableError,
        server_of,
    )

    request = TrackingRequest.load(run / REQUEST)
    if request is None:
        raise ConfigError(
            f"{run} has no {REQUEST}: it is not a run directory, or its run was not tracked "
            "(tracking.enabled). Give the `directory` of a config that `txl train` has run"
        )
    try:
        server_of(request.server, run)
    except UnavailableError:
        raise ConfigError(
            f"{run} was tracked at {request.server}, whose credentials are not stored. Give them: "
            "MLFLOW_TRACKING_URI=URI txl track sync RUN"
        ) from None
    words = (str(run), "--flush-seconds", str(timeout_seconds))
    with running(f"delivering {run} to MLflow"):
        reason = run_sender(*words, timeout_seconds=timeout_seconds + MLFLOW_SECONDS)
    state = TrackingState.load(run / STATE)
    if reason or state is None or not state.delivered:
        raise TxlError(
            f"{run}: MLflow does not have everything: {reason or 'training has begun again'}. The "
            f"metrics are in {run / 'metrics.jsonl'}. If the run is training, it delivers by "
            f"itself (see {run / LOG}); else check the server, and run the command again"
        )
    content = {"run": str(run), "mlflow_run_id": state.run_id, "status": state.status}
    text = f"MLflow run {state.run_id} has all metrics of {run} (status: {state.status})"
    print_result({**content, "delivered": True}, text, as_json=as_json)
