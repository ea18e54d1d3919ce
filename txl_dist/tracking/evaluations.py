"""Scores of `txl eval` in the tracker, as runs below the training run.

A score of `txl eval` is a file RUN/evaluations/SPLIT-KEY.json, and becomes a run below the training
run. KEY is a digest of all that the sums of the result depend on, so an evaluation that is repeated
is the same file and the same run. `TrackingState.evaluations` has the names of those that the
server has; one that it has got although the state does not say so is found by its key. Scores
become metrics such as `valid/mem_len_64/perplexity`, at the step of the checkpoint; settings
parameters, and the protocol the description. The tables of `details` are left out.

A new run on the server gets them again, as it gets the whole journal: after a resume that has
superseded steps, for a copy of the run directory, and in another database. Not those of superseded
checkpoints, which stay below the run that had them.
"""

import logging
import math
import re
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

from txl_dist.checkpoint.directory import CheckpointDirectory
from txl_dist.checkpoint.manifest import load_checkpoint_manifest
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
    directory_identity,
    open_tracker,
)

_COUNTS = {"tokens_scored", "bytes_scored", "characters_scored", "words_scored", "unknown_targets"}
_STEP_NAME = re.compile(r"(?:superseded-)?step-(\d{8,})")

log = logging.getLogger("txl_dist.tracking.evaluations")


def unsent_evaluations(run_dir: Path, state: TrackingState) -> list[Path]:
    unsent = [path for path in kept_results(run_dir) if path.name not in state.evaluations]
    if not state.superseded:  # else each file is read
        return unsent
    times = ((path, path.stat().st_mtime_ns) for path in unsent)
    return [path for path, time in times if _result_save(path, time) not in state.superseded]


def deliver_evaluations(run_dir: Path) -> None:
    """Record the results of a run that does not train. Raises UnavailableError and OSError."""
    if (state := TrackingState.load(run_dir / STATE)) is None:
        return
    if state.directory not in (None, directory_identity(run_dir)):
        raise UnavailableError(f"{run_dir} is a copy that does not have its own MLflow run yet")
    send_evaluations(open_tracker(state.server, run_dir), run_dir, state)


def send_evaluations(tracker: Tracker, run_dir: Path, state: TrackingState) -> TrackingState:
    """Record all results that the server lacks; returns the state with what it has.

    Raises OSError, and UnavailableError, also if the server has no run yet to which they belong.
    """
    if state.run_id is None:
        raise UnavailableError("its training run is not there yet")
    for path in unsent_evaluations(run_dir, state):
        try:
            _record(tracker, path, state)
        except (RefusedError, CheckpointError) as error:  # a file that somebody edited
            log.warning("%s was refused: %s", path, redact(str(error)))
        state = state.changed(run_dir, evaluations=(*state.evaluations, path.name))
    return state


def superseded_saves(run_dir: Path, state: TrackingState, first_step: int) -> set[str]:
    """The `save_id` of scored checkpoints that a resume has superseded; of results of earlier
    versions their names.

    A resumed run computes the same weights again, and their result has the same name, but another
    `save_id`. `first_step`: the first superseded step of which the server has a point.
    """
    directory, found = CheckpointDirectory(run_dir), set[str]()
    renamed = {_save_id(checkpoint) for checkpoint in directory.superseded()} - {None}
    for path in kept_results(run_dir):
        with suppress(OSError, CheckpointError):
            result = read_result(path)
            step = _step_of(result)
            current = _save_id(directory.at(step))
            # Without a checkpoint of its step: it was renamed, or removed as older ones are. The
            # resumed run may have scored and removed one, too, while the server did not respond.
            was_sent = path.name in state.evaluations and step >= first_step
            is_gone = current is None and (was_sent or result.save_id in renamed)
            is_other = None not in (current, result.save_id) and current != result.save_id
            if is_gone or is_other:
                found.add(result.save_id or path.name)
    return found


def _save_id(checkpoint: Path) -> str | None:
    with suppress(CheckpointError):
        return load_checkpoint_manifest(checkpoint).save_id
    return None


@lru_cache(maxsize=1024)
def _result_save(path: Path, modified: int) -> str:
    """As in `superseded_saves`. `modified`: the file is read again after a change only."""
    with suppress(OSError, CheckpointError):
        return read_result(path).save_id or path.name
    return path.name


def _step_of(result: EvaluationResult) -> int:
    match = _STEP_NAME.fullmatch(Path(result.checkpoint).name)
    return int(match[1]) if match else 0


def _record(tracker: Tracker, path: Path, state: TrackingState) -> None:
    """Record one result as a run below the training run. May be repeated."""
    result = read_result(path)
    checkpoint, name = Path(result.checkpoint).name, f"{result.split}, mem_len {result.mem_len}"
    step = _step_of(result)
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
            key=f"{state.run_id}/{path.stem}",
            name=f"eval step {step}: {name}",
            experiment=state.experiment,
            note=redact(result.protocol),
            params={key: as_text(value) for key, value in settings.items()},
            tags={"txl.kind": "evaluation"},
            parent=state.run_id,
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
