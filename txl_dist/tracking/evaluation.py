"""An evaluation as a child run of its training run in MLflow.

`log_evaluation` is for the caller; MLflow itself is spoken to by a short process of this module
(`python -m txl_dist.tracking.evaluation RUN`), so that a server that hangs costs a bounded time and
`txl eval` does not import mlflow.
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
from txl_dist.tracking.state import (
    STATE,
    TrackingState,
    artifact_location,
    as_text,
    child_environment,
    resolve_server,
)

TIMEOUT_SECONDS = 30.0

log = logging.getLogger("txl_dist.tracking")


def log_evaluation(
    run_dir: Path, result: Mapping[str, Any], *, timeout_seconds: float = TIMEOUT_SECONDS
) -> bool:
    """Record `result` under the run of `run_dir`: numbers as metrics, the rest as parameters.

    True if it was recorded. A run that was never tracked gives False; so does any failure, with a
    warning and within `timeout_seconds`.
    """
    state = TrackingState.load(run_dir / STATE)
    if state is None or state.run_id is None:
        return False
    try:
        answer = subprocess.run(
            [sys.executable, "-m", "txl_dist.tracking.evaluation", str(run_dir)],
            input=json.dumps(dict(result), default=str),
            capture_output=True,
            text=True,
            timeout=timeout_seconds,
            check=False,
            env=child_environment(),
        )
        reason = "" if answer.returncode == 0 else (answer.stderr.strip().splitlines() or ["?"])[-1]
    except subprocess.TimeoutExpired:
        reason = f"no answer within {timeout_seconds:g} s"
    except (OSError, ValueError) as error:
        reason = str(error)
    if reason:
        log.warning("the evaluation was not recorded in MLflow: %s", redact(reason))
    return not reason


def record(run_dir: Path, result: Mapping[str, Any]) -> None:
    """Write the child run. Raises what `mlflow_client` raises."""
    from txl_dist.tracking.mlflow_client import MlflowStore, Point, UnavailableError, clean_key

    state = TrackingState.load(run_dir / STATE)
    if state is None or state.run_id is None or state.experiment_id is None:
        raise UnavailableError(f"{run_dir / STATE} names no MLflow run")
    server = resolve_server(state.server, run_dir)
    if server is None:
        raise UnavailableError("the server's credentials are not stored; set MLFLOW_TRACKING_URI")
    store = MlflowStore(server, artifact_location(server))
    now = int(time.time() * 1000)
    name = f"evaluation {result.get('split', '')}".strip()
    tags = {"mlflow.parentRunId": state.run_id, "txl.kind": "evaluation"}
    run_id = store.create_run(state.experiment_id, name, tags)
    numbers = {key: value for key, value in result.items() if type(value) in (int, float)}
    texts = {key: value for key, value in result.items() if key not in numbers}
    store.log_params(run_id, {key: as_text(value) for key, value in redact(texts).items()})
    store.log_points(
        run_id,
        [
            Point(clean_key(key), float(value), 0, now)
            for key, value in numbers.items()
            if math.isfinite(value)
        ],
    )
    store.set_status(run_id, "FINISHED")


def main() -> int:
    """Read the result from standard input and record it; the last line of stderr says why not."""
    try:
        record(Path(sys.argv[1]), json.load(sys.stdin))
    except Exception as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
