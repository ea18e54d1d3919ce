"""`txl track`: what tracking still holds."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from txl_dist.cli.options import AsJson, local_path_parser

app = typer.Typer(no_args_is_help=True, help="Tracking of runs in MLflow.")


@app.command("sync")
def sync(
    run: Annotated[
        Path, typer.Argument(metavar="RUN", help="A run directory.", parser=local_path_parser())
    ],
    timeout_seconds: Annotated[float, typer.Option(min=1, help="Give up after this time.")] = 600.0,
    as_json: AsJson = False,
) -> None:
    """Deliver to MLflow what a run has not delivered: metrics, settings and how it ended.

    For a run that has ended; one that is training delivers by itself. Points that MLflow has are
    not sent again, so it can be repeated. The copy of a run directory gets its own MLflow run.

    Example: txl track sync runs/quickstart
    """
    from txl_dist.cli.progress import running
    from txl_dist.config.redaction import HIDDEN
    from txl_dist.errors import ConfigError, TxlError
    from txl_dist.tracking.process import EXIT_UNDELIVERED
    from txl_dist.tracking.tracker import (
        LOG,
        REQUEST,
        STATE,
        TrackingRequest,
        TrackingState,
        child_environment,
    )

    request = TrackingRequest.load(run / REQUEST)
    if request is None:
        raise ConfigError(
            f"{run} has no {REQUEST}: it is not a run directory, or its run was not tracked "
            "(tracking.enabled). Give the `directory` of a config that `txl train` has run"
        )
    if HIDDEN in (request.server or "") and "MLFLOW_TRACKING_URI" not in os.environ:
        raise ConfigError(
            f"{run} was tracked at {request.server}, whose credentials are not stored. Give them: "
            "MLFLOW_TRACKING_URI=URI txl track sync RUN"
        )
    command = [sys.executable, "-m", "txl_dist.tracking.sender", str(run), "--sync"]
    command += ["--flush-seconds", str(timeout_seconds)]
    with running(f"delivering {run} to MLflow", quiet=as_json):
        done = subprocess.run(
            command, capture_output=True, text=True, env=child_environment(), check=False
        )
    state = TrackingState.load(run / STATE)
    if done.returncode or state is None or not state.delivered:
        reason = next(iter(done.stderr.strip().splitlines()), "no response")
        is_late = done.returncode == EXIT_UNDELIVERED
        raise TxlError(
            f"{run}: MLflow does not have everything"
            f"{f' after {timeout_seconds:g} s' if is_late else ''}: {reason}. The metrics are in "
            f"{run / 'metrics.jsonl'}. If the run is training, it delivers by itself (see "
            f"{run / LOG}); else check the server, and run the command again"
        )
    if as_json:
        result = {"run": str(run), "mlflow_run_id": state.run_id, "status": state.status}
        print(json.dumps({**result, "delivered": True}))
    else:
        print(f"MLflow run {state.run_id} has all metrics of {run} (status: {state.status})")
