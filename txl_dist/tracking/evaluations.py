"""Scores of `txl eval`, as runs below the training run.

    txl eval -> RUN/evaluations/SPLIT-KEY.json -> the sender of the run, if it trains
                                               -> `log_evaluations` of `process.py`
                                               -> `txl track sync RUN`, if the server was away

KEY is a digest of all that the sums of the result depend on, so an evaluation that is repeated is
the same file and the same run. `TrackingState.evaluations` has the names of those that the server
has; one that it has got although the state does not say so is found by its key.

Scores become metrics such as `valid/mem_len_64/perplexity`, at the step of the checkpoint;
confidence intervals `..._low` and `..._high`; settings parameters, and the protocol the tag
`txl.protocol`. The tables of `details` are left out.
"""

import json
import logging
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from txl_dist.config.redaction import redact
from txl_dist.evaluation.scores import SCORES, kept_results
from txl_dist.tracking.tracker import (
    Point,
    RefusedError,
    TrackedDataset,
    TrackedRun,
    Tracker,
    TrackingState,
    UnavailableError,
    as_text,
    dataset_name,
)

_COUNTS = ("nats", "tokens_scored", "bytes_scored", "characters_scored", "words_scored")
_EDITED = (AttributeError, KeyError, OverflowError, RecursionError, TypeError, ValueError)
"""Errors of a file that somebody has edited."""
_STEP_NAME = re.compile(r"(?:superseded-)?step-(\d{8,})")

log = logging.getLogger("txl_dist.tracking")


def unsent_evaluations(run_dir: Path, state: TrackingState) -> list[Path]:
    """The results that the server does not have."""
    return [path for path in kept_results(run_dir) if path.name not in state.evaluations]


def send_evaluations(tracker: Tracker, run_dir: Path, state: TrackingState) -> TrackingState:
    """Record all results that the server lacks; returns the state with what it has.

    Raises UnavailableError, also if the server has no run yet to which they belong.
    """
    if state.run_id is None:
        raise UnavailableError("its training run is not there yet")
    for path in unsent_evaluations(run_dir, state):
        try:
            _record(tracker, path, state, state.run_id)
        except OSError as error:  # a network file system that fails now
            raise UnavailableError(str(error)) from None
        except (RefusedError, *_EDITED) as error:
            log.warning("%s was refused: %s", path, redact(str(error)))
        state = state.changed(run_dir, evaluations=(*state.evaluations, path.name))
    return state


def _record(tracker: Tracker, path: Path, state: TrackingState, training_run: str) -> None:
    """Record one result as a run below the training run. May be repeated."""
    result = json.loads(path.read_bytes())
    checkpoint, split = Path(result["checkpoint"]).name, str(result["split"])
    match = _STEP_NAME.fullmatch(checkpoint)
    step, mem_len = int(match[1]) if match else 0, result["mem_len"]
    scores = _scores(result)
    left_out = {*scores, "details", "protocol", "save_id"}
    settings = {**result, "checkpoint": checkpoint}
    settings = redact({key: value for key, value in settings.items() if key not in left_out})
    data, protocol = str(result["data"]), redact(str(result["protocol"]))
    run = TrackedRun(
        key=f"{state.key}/{path.stem}",
        name=f"eval step {step}: {split}, mem_len {mem_len}",
        experiment=state.experiment,
        command="txl eval",
        note=protocol,
        params={key: as_text(value) for key, value in settings.items()},
        tags={
            "txl.kind": "evaluation",
            "txl.training_run": training_run,
            "txl.protocol": protocol,
        },
        parent=training_run,
        datasets=[
            TrackedDataset(
                name=dataset_name(data, split),
                digest=str(result["data_sha256"]),
                source=redact(data),
                context="evaluation",
                profile={key: result[key] for key in _COUNTS[1:] if result.get(key) is not None},
            )
        ],
    )
    milliseconds = int(path.stat().st_mtime * 1000)
    points = [
        Point(f"{split}/mem_len_{mem_len}/{name}", float(value), step, milliseconds)
        for name, value in scores.items()
        if type(value) in (int, float) and math.isfinite(value)
    ]
    run_id = tracker.start(run)
    # All or none of the points were recorded, so one of them tells.
    if points and not tracker.recorded(run_id, points[0].metric):
        tracker.log(run_id, points)
    tracker.end(run_id, "finished")


def _scores(result: Mapping[str, Any]) -> dict[str, Any]:
    """The scores and counts, and the ends of their intervals, by name."""
    scores = {key: result[key] for key in (*_COUNTS, *SCORES) if key in result}
    intervals = (result.get("details") or {}).get("interval") or {}
    for name, bounds in intervals.items():
        if isinstance(bounds, list) and None not in bounds:  # None: out of the range of a float
            scores |= {f"{name}_low": bounds[0], f"{name}_high": bounds[1]}
    return scores
