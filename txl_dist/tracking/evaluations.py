"""Scores of `txl eval`, as runs below the training run.

    txl eval -> RUN/evaluations/SPLIT-KEY.json -> the sender of the run, if it trains
                                               -> `log_evaluations` of `process.py`
                                               -> `txl track sync RUN`, if the server was away

KEY is a digest of all that the sums of the result depend on, so an evaluation that is repeated is
the same file and the same run. `TrackingState.evaluations` has the names of those that the server
has; one that it has got although the state does not say so is found by its key.

Scores become metrics such as `valid/mem_len_64/perplexity`, at the step of the checkpoint;
settings parameters, and the protocol the description. The tables of `details` are left out.
"""

import logging
import math
import re
from pathlib import Path

from txl_dist.config.redaction import redact, redact_values
from txl_dist.errors import CheckpointError
from txl_dist.evaluation.result import EvaluationResult, kept_results, read_result
from txl_dist.tracking.tracker import (
    STATE,
    Point,
    RefusedError,
    TrackedDataset,
    TrackedRun,
    Tracker,
    TrackingState,
    UnavailableError,
    as_text,
    dataset_name,
    open_tracker,
)

_COUNTS = {"tokens_scored", "bytes_scored", "characters_scored", "words_scored"}
_STEP_NAME = re.compile(r"(?:superseded-)?step-(\d{8,})")

log = logging.getLogger("txl_dist.tracking")


def unsent_evaluations(run_dir: Path, state: TrackingState) -> list[Path]:
    """The results that the server does not have."""
    return [path for path in kept_results(run_dir) if path.name not in state.evaluations]


def deliver_evaluations(run_dir: Path) -> None:
    """Record the results of a run that does not train. Raises UnavailableError and OSError."""
    if (state := TrackingState.load(run_dir / STATE)) is not None:
        send_evaluations(open_tracker(state.server, run_dir), run_dir, state)


def send_evaluations(tracker: Tracker, run_dir: Path, state: TrackingState) -> TrackingState:
    """Record all results that the server lacks; returns the state with what it has.

    Raises OSError, and UnavailableError, also if the server has no run yet to which they belong.
    """
    if state.run_id is None:
        raise UnavailableError("its training run is not there yet")
    for path in unsent_evaluations(run_dir, state):
        try:
            _record(tracker, path, read_result(path), state, state.run_id)
        except (RefusedError, CheckpointError) as error:  # a file that somebody edited
            log.warning("%s was refused: %s", path, redact(str(error)))
        state = state.changed(run_dir, evaluations=(*state.evaluations, path.name))
    return state


def _record(
    tracker: Tracker, path: Path, result: EvaluationResult, state: TrackingState, training_run: str
) -> None:
    """Record one result as a run below the training run. May be repeated."""
    checkpoint, name = Path(result.checkpoint).name, f"{result.split}, mem_len {result.mem_len}"
    match = _STEP_NAME.fullmatch(checkpoint)
    step = int(match[1]) if match else 0
    content = result.to_json()
    counts = {key: value for key, value in content.items() if key in _COUNTS and value is not None}
    scores = {"nats": result.nats, **counts, **result.known_scores}
    left_out = {"nats", *_COUNTS, *result.scores, "details", "protocol", "save_id"}
    settings = {key: value for key, value in content.items() if key not in left_out}
    settings = redact_values({**settings, "checkpoint": checkpoint})
    dataset = TrackedDataset(
        name=dataset_name(result.data, result.split),
        digest=result.data_sha256,
        source=redact(result.data),
        context="evaluation",
        profile=counts,
    )
    run_id = tracker.start(
        TrackedRun(
            key=f"{state.key}/{path.stem}",
            name=f"eval step {step}: {name}",
            experiment=state.experiment,
            note=redact(result.protocol),
            params={key: as_text(value) for key, value in settings.items()},
            tags={"txl.kind": "evaluation"},
            parent=training_run,
            datasets=[dataset],
        )
    )
    milliseconds = int(path.stat().st_mtime * 1000)
    points = [
        Point(f"{result.split}/mem_len_{result.mem_len}/{key}", float(value), step, milliseconds)
        for key, value in scores.items()
        if math.isfinite(value)
    ]
    # All or none of the points were recorded, so one of them tells.
    if not tracker.recorded(run_id, points[0].metric):
        tracker.log(run_id, points)
    tracker.end(run_id, "finished")
