"""Records an evaluation in MLflow, as a child run of its training run.

`txl eval` calls `log_evaluation`, which starts this module as a short process
(`python -m txl_dist.tracking.evaluation RUN`): a server that does not respond costs a bounded time,
and `txl eval` does not import mlflow.
"""

import json
import logging
import math
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from txl_dist.config.redaction import redact
from txl_dist.tracking.state import STATE, TrackingState, as_text, child_environment

TIMEOUT_SECONDS = 30.0

log = logging.getLogger("txl_dist.tracking")


def log_evaluation(
    run_dir: Path, result: Mapping[str, Any], *, timeout_seconds: float = TIMEOUT_SECONDS
) -> bool:
    """Record `result` under the run's MLflow run: numbers as metrics, the rest as parameters.

    Returns whether it was recorded: False for a run without tracking, and, with a warning, for any
    failure and after `timeout_seconds`. Never raises.
    """
    state = TrackingState.load(run_dir / STATE)
    if state is None or state.run_id is None:
        return False
    try:
        process = subprocess.run(
            [sys.executable, "-m", "txl_dist.tracking.evaluation", str(run_dir)],
            input=json.dumps(dict(result), default=str),
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


def record(run_dir: Path, result: Mapping[str, Any]) -> None:
    """Create the child run. Raises the errors of `mlflow_client`."""
    from txl_dist.tracking.mlflow_client import Point, clean_key, connect

    state = TrackingState.load(run_dir / STATE)
    assert state is not None  # log_evaluation has checked it
    assert state.run_id is not None
    assert state.experiment_id is not None
    store = connect(state.server, run_dir)
    name = f"evaluation {result.get('split', '')}".strip()
    tags = {"mlflow.parentRunId": state.run_id, "txl.kind": "evaluation"}
    run_id = store.create_run(state.experiment_id, name, tags)
    numbers = {key: value for key, value in result.items() if type(value) in (int, float)}
    texts = {key: value for key, value in result.items() if key not in numbers}
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


if __name__ == "__main__":
    # The last line of an error's traceback is what log_evaluation reports.
    record(Path(sys.argv[1]), json.load(sys.stdin))
