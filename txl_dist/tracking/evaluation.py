"""Records evaluations in MLflow, as child runs of their training run.

    one result         training run -> evaluation
    several results    training run -> table of evaluations -> evaluation, evaluation, ...

Results are in one table if their training runs are in one experiment. A table of several training
runs has no parent; `txl.training_run` of an evaluation is the MLflow run that trained it.

`txl eval` calls `log_evaluations`, which starts this module as a short process
(`python -m txl_dist.tracking.evaluation`): a server that does not respond costs a bounded time, and
`txl eval` does not import mlflow.
"""

import json
import logging
import math
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from txl_dist.config.redaction import redact
from txl_dist.tracking.state import STATE, TrackingState, as_text, child_environment

if TYPE_CHECKING:
    from txl_dist.tracking.mlflow_client import MlflowStore

TIMEOUT_SECONDS = 30.0
"""For one result; each further result of a table has RESULT_SECONDS more."""
RESULT_SECONDS = 2.0

log = logging.getLogger("txl_dist.tracking")

Scored = tuple[Path, Mapping[str, Any]]
"""A run directory, and the result of an evaluation of one of its checkpoints."""


def log_evaluations(scored: Sequence[Scored], *, timeout_seconds: float = TIMEOUT_SECONDS) -> bool:
    """Record results under the MLflow runs of their run directories.

    Numbers become metrics, the protocol becomes the tag `txl.protocol`, the rest parameters.
    Confidence intervals become metrics such as `perplexity_low`; the tables of `details` are left
    out. Returns whether all were recorded: False if a run
    has no tracking, and, with a warning, for any failure and after the time limit. Never raises.
    """
    tracked = [each for each in scored if _state(each[0]) is not None]
    tables = groupby(sorted(tracked, key=_place), key=_place)
    recorded = [_record_in_process(list(table), timeout_seconds) for _, table in tables]
    return all(recorded) and 0 < len(tracked) == len(scored)


def _state(run_dir: Path) -> TrackingState | None:
    """None for a run without tracking."""
    state = TrackingState.load(run_dir / STATE)
    return None if state is None or state.run_id is None else state


def _place(scored: Scored) -> tuple[str, str]:
    """Server and experiment. Without a server it is a database next to the run directory."""
    run_dir, _ = scored
    state = _state(run_dir)
    assert state is not None
    return state.server or str(run_dir.resolve().parent), str(state.experiment_id)


def _record_in_process(table: list[Scored], timeout_seconds: float) -> bool:
    timeout_seconds += RESULT_SECONDS * (len(table) - 1)
    try:
        process = subprocess.run(
            [sys.executable, "-m", "txl_dist.tracking.evaluation"],
            input=json.dumps(
                [(str(run_dir), dict(result)) for run_dir, result in table], default=str
            ),
            capture_output=True,
            text=True,
            errors="replace",  # native code may write other bytes to standard error
            timeout=timeout_seconds,
            check=False,
            env=child_environment(),
        )
    except subprocess.TimeoutExpired:
        failure = f"no response within {timeout_seconds:g} s"
    except OSError as error:
        failure = str(error)
    else:
        if process.returncode == 0:
            return True
        failure = process.stderr.strip().rpartition("\n")[2]
    log.warning("the evaluation was not recorded in MLflow: %s", redact(failure))
    return False


def record(table: Sequence[Scored]) -> None:
    """Create the runs of results in one experiment. Raises the errors of `mlflow_client`."""
    from txl_dist.tracking.mlflow_client import connect

    run_dir, first = table[0]
    state = _state(run_dir)
    assert state is not None  # log_evaluations has checked it
    store, experiment_id = connect(state.server, run_dir), str(state.experiment_id)
    training_runs = [str(_state(run_dir).run_id) for run_dir, _ in table]  # type: ignore[union-attr]
    parent = training_runs[0] if len(set(training_runs)) == 1 else None
    if len(table) == 1:
        _record_result(store, experiment_id, parent, training_runs[0], first)
        return
    tags = {"txl.kind": "evaluations", **({"mlflow.parentRunId": parent} if parent else {})}
    table_id = store.create_run(experiment_id, f"{len(table)} evaluations", tags)
    store.log_params(
        table_id,
        {
            name: ", ".join(sorted({str(result.get(key, "")) for _, result in table}))
            for name, key in (("checkpoints", "checkpoint"), ("splits", "split"))
        },
    )
    for training_run, (_, result) in zip(training_runs, table, strict=True):
        _record_result(store, experiment_id, table_id, training_run, result)
    store.set_status(table_id, "FINISHED")


def _record_result(
    store: "MlflowStore",
    experiment_id: str,
    parent: str | None,
    training_run: str,
    result: Mapping[str, Any],
) -> None:
    from txl_dist.tracking.mlflow_client import Point, clean_key

    name = f"evaluation {result.get('split', '')}".strip()
    tags = {
        "mlflow.parentRunId": parent or training_run,
        "txl.kind": "evaluation",
        "txl.training_run": training_run,
    }
    if "protocol" in result:
        tags["txl.protocol"] = redact(str(result["protocol"]))
    run_id = store.create_run(experiment_id, name, tags)
    scalars = {key: value for key, value in result.items() if key not in ("details", "protocol")}
    numbers = {key: value for key, value in scalars.items() if type(value) in (int, float)}
    texts = {key: value for key, value in scalars.items() if key not in numbers}
    numbers |= _interval(result.get("details") or {})
    # All points have step 0: a child run has one value per metric, and no curve.
    milliseconds = int(time.time() * 1000)
    store.log_params(run_id, {key: as_text(value) for key, value in redact(texts).items()})
    store.log_points(
        run_id,
        [
            Point(clean_key(key), float(value), 0, milliseconds)
            for key, value in numbers.items()
            if math.isfinite(value)
        ],
    )
    store.set_status(run_id, "FINISHED")


def _interval(details: Mapping[str, Any]) -> dict[str, float]:
    """The bounds of every score that has an interval, such as perplexity_low."""
    bounds = [
        (name, value)
        for name, value in (details.get("interval") or {}).items()
        if isinstance(value, list)
    ]
    return {
        f"{name}_{end}": bound
        for name, value in bounds
        for end, bound in zip(("low", "high"), value, strict=True)
    }


if __name__ == "__main__":
    # The last line of an error's traceback is what log_evaluations reports.
    record([(Path(run_dir), result) for run_dir, result in json.load(sys.stdin)])
