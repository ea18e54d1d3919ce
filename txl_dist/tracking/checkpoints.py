"""What the sender reads from a run directory besides the journal: checkpoints and their scores.

The checkpoints that exist become models of the run. Training writes nothing else for it: a
checkpoint appears in the directory, and is removed from it, by one rename.

Scores of `txl eval` become runs below the training run:

    txl eval -> RUN/evaluations/SPLIT-KEY.json -> the sender of the run, if it trains
                                               -> `sender.py RUN --evaluations`, started by txl eval
                                               -> `txl track sync RUN`, if the server was away

KEY is a digest of all that the sums of the result depend on, so an evaluation that is repeated is
the same file and the same run. `TrackingState.evaluations` has the names of those that the server
has; one that it has got although the state does not say so is found by its key.
"""

import json
import logging
import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from data_pipeline.system.files import wait_for_lock
from txl_dist.checkpoint.directory import CheckpointDirectory, run_of
from txl_dist.checkpoint.manifest import MANIFEST_NAME
from txl_dist.config.redaction import redact
from txl_dist.evaluation.scores import SCORES, kept_results
from txl_dist.tracking.process import SENDER, run_module, sync_command
from txl_dist.tracking.tracker import (
    LOCK,
    STATE,
    Point,
    RefusedError,
    TrackedDataset,
    TrackedModel,
    TrackedRun,
    Tracker,
    TrackingState,
    UnavailableError,
    as_text,
    dataset_name,
    open_tracker,
)

EVALUATION_SECONDS = 30.0
"""For one result; each further result of a table has RESULT_SECONDS more."""
RESULT_SECONDS = 2.0
_COUNTS = ("nats", "tokens_scored", "bytes_scored", "characters_scored", "words_scored")
_EDITED = (AttributeError, KeyError, OverflowError, RecursionError, TypeError, ValueError)
"""Errors of a file that somebody has edited."""
_STEP_NAME = re.compile(r"(?:superseded-)?step-(\d{8,})")

log = logging.getLogger("txl_dist.tracking")


class CheckpointModels:
    """Reads the manifest of each checkpoint once."""

    def __init__(self, run_dir: Path) -> None:
        self._name = run_dir.resolve().name
        self._directory = CheckpointDirectory(run_dir)
        self._manifests: dict[Path, tuple[tuple[int, int], dict[str, Any]]] = {}

    def read(
        self, scores: Mapping[int, tuple[Point, ...]], scored_on: TrackedDataset | None
    ) -> tuple[TrackedModel, ...]:
        """The models of all complete checkpoints, by ascending step.

        `scores` by step. Raises OSError if the directory cannot be read.
        """
        pointers = self._directory.pointers_by_step()
        models, manifests = [], {}
        for step in self._directory.steps():
            path = self._directory.at(step)
            try:
                manifests[path] = self._manifest(path)
                model = self._model(path, manifests[path][1])
            except (FileNotFoundError, ValueError, KeyError, TypeError, AttributeError):
                continue  # removed meanwhile, or damaged: it is no model
            tags = {
                f"txl.{name.lower()}": str(name in pointers.get(step, ())).lower()
                for name in ("LATEST", "BEST")
            }
            models.append(
                TrackedModel(
                    **{**model, "tags": {**model["tags"], **tags}},
                    scores=scores.get(step, ()),
                    scored_on=scored_on,
                )
            )
        self._manifests = manifests
        return tuple(models)

    def _manifest(self, path: Path) -> tuple[tuple[int, int], dict[str, Any]]:
        status = (path / MANIFEST_NAME).stat()
        version = status.st_ino, status.st_mtime_ns
        known = self._manifests.get(path)
        if known is not None and known[0] == version:
            return known
        # Not `load_checkpoint_manifest`, which checks every slice: this reads a few facts of it.
        manifest = json.loads((path / MANIFEST_NAME).read_bytes())
        return version, {
            name: manifest[name]
            for name in ("digest", "save_id", "state", "model", "data_digest", "written_by")
        }

    def _model(self, path: Path, manifest: Mapping[str, Any]) -> dict[str, Any]:
        state, architecture = manifest["state"], manifest["model"]
        return {
            "key": str(manifest["save_id"]),
            "name": f"{self._name} step {state['step']}",
            "step": int(state["step"]),
            "params": {
                "step": str(state["step"]),
                "tokens": str(state.get("tokens")),
                "data_sha256": str(manifest["data_digest"]),
                "written_by": str(manifest["written_by"]),
                **{f"model.{name}": as_text(value) for name, value in architecture.items()},
            },
            "tags": {
                "txl.path": redact(str(path.resolve())),
                "txl.manifest_sha256": str(manifest["digest"]),
            },
        }


# --- scores of txl eval ---------------------------------------------------------------------------


def log_evaluations(checkpoints: Iterable[Path]) -> None:
    """Record the results that the runs of these checkpoints keep, as runs below their runs.

    Scores become metrics such as `valid/mem_len_64/perplexity`, at the step of the checkpoint;
    confidence intervals `..._low` and `..._high`; settings parameters, and the protocol the tag
    `txl.protocol`. The tables of `details` are left out.

    Never raises, and waits EVALUATION_SECONDS for one result. What the server does not have then is
    a warning: the next start of the run delivers it, or `txl track sync`.
    """
    unsent: dict[Path, int] = {}
    for run in filter(None, (run_of(checkpoint.resolve()) for checkpoint in checkpoints)):
        state = TrackingState.load(run / STATE)
        if state is not None and (paths := unsent_evaluations(run, state)):
            unsent[run] = len(paths)
    if not unsent:
        return
    seconds = EVALUATION_SECONDS + RESULT_SECONDS * (sum(unsent.values()) - 1)
    if reason := run_module(SENDER, *map(str, unsent), "--evaluations", timeout_seconds=seconds):
        log.warning(
            "the evaluation was not recorded in MLflow yet: %s. To send it later: %s",
            reason,
            " and ".join(map(sync_command, unsent)),
        )


def unsent_evaluations(run_dir: Path, state: TrackingState) -> list[Path]:
    """The results that the server does not have."""
    return [path for path in kept_results(run_dir) if path.name not in state.evaluations]


def send_evaluations(tracker: Tracker, run_dir: Path, state: TrackingState) -> TrackingState:
    """Record all results that the server lacks; returns the state with what it has."""
    for path in unsent_evaluations(run_dir, state):
        try:
            _record(tracker, path, state)
        except OSError as error:  # a network file system that fails now
            raise UnavailableError(str(error)) from None
        except (RefusedError, *_EDITED) as error:
            log.warning("%s was refused: %s", path, redact(str(error)))
        state = replace(state, evaluations=[*state.evaluations, path.name])
        state.try_save(run_dir)
    return state


def deliver_evaluations(run_dirs: Sequence[Path]) -> None:
    """Record what run directories hold, in a separate process, whose time the caller limits.

    The sender of a run that trains does it for that run. Raises UnavailableError.
    """
    for run_dir in run_dirs:
        lock = os.open(run_dir / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            while not wait_for_lock(lock, timeout_seconds=1.0):
                state = TrackingState.load(run_dir / STATE)
                if state is not None and not unsent_evaluations(run_dir, state):
                    break
            else:
                state = TrackingState.load(run_dir / STATE)
                if state is None or state.run_id is None:
                    raise UnavailableError("its training run is not there yet")
                send_evaluations(open_tracker(state.server, run_dir), run_dir, state)
        finally:
            os.close(lock)


def _record(tracker: Tracker, path: Path, state: TrackingState) -> None:
    """Record one result as a run below the training run of `state`. May be repeated."""
    assert state.run_id is not None
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
            "txl.training_run": state.run_id,
            "txl.protocol": protocol,
        },
        parent=state.run_id,
        datasets=[
            TrackedDataset(
                name=dataset_name(data, split),
                digest=str(result["data_sha256"]),
                source=redact(data),
                context="evaluation",
                profile={key: result[key] for key in _COUNTS[1:] if result.get(key) is not None},
            )
        ],
        evaluates=result.get("save_id"),
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
