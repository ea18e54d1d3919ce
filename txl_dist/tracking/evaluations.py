"""Scores of `txl eval` as runs below the training run: written to a file, then sent.

    txl eval -> RUN/logs/evaluations.jsonl -> the sender of the run, if it trains
                                           -> `sender.py RUN --evaluations`, started by txl eval
                                           -> `txl track sync RUN`, if the server was away

A line of the file has everything that is recorded, and the key by which the run is found if it was
created already. `TrackingState.evaluations_bytes` is how much of the file the server has.
"""

import errno
import logging
import math
import os
import re
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from data_pipeline.system.files import wait_for_lock
from txl_dist.checkpoint.manifest import load_checkpoint_manifest
from txl_dist.config.redaction import redact
from txl_dist.errors import CheckpointError
from txl_dist.tracking.journal import MetricsJournal, parse_line
from txl_dist.tracking.process import SENDER, sync_command
from txl_dist.tracking.tracker import (
    EVALUATIONS,
    LOCK,
    STATE,
    Point,
    RefusedError,
    TrackedDataset,
    TrackedRun,
    Tracker,
    TrackingState,
    UnavailableError,
    as_text,
    child_environment,
    dataset_name,
    open_tracker,
)

EVALUATION_SECONDS = 30.0
"""For one result; each further result of a table has RESULT_SECONDS more."""
RESULT_SECONDS = 2.0
LOCK_SECONDS = 10.0
"""For the file of a run, in which other processes write a line at a time."""
_COUNTS = ("nats", "tokens_scored", "bytes_scored", "characters_scored", "words_scored")
_EDITED = (AttributeError, KeyError, OverflowError, TypeError, ValueError)
"""Errors of a line that somebody has edited."""
_STEP_NAME = re.compile(r"(?:superseded-)?step-(\d{8,})")

log = logging.getLogger("txl_dist.tracking")

Scored = tuple[Path, Mapping[str, Any]]
"""A run directory, and the result of an evaluation of one of its checkpoints."""


def scores_of_runs(results: Sequence[Mapping[str, Any]]) -> list[Scored]:
    """The results, as JSON of `txl eval`, of checkpoints that are in the directory of their run."""
    scored: list[Scored] = []
    for result in results:
        checkpoint = Path(result["checkpoint"])
        run = checkpoint.resolve().parent.parent
        if (run / STATE).exists():
            save_id = None
            with suppress(CheckpointError):  # its run has removed it since
                save_id = load_checkpoint_manifest(checkpoint).save_id
            name = checkpoint.resolve().name
            scored.append((run, {**result, "checkpoint": name, "save_id": save_id}))
    return scored


def log_evaluations(scored: Sequence[Scored], *, timeout_seconds: float | None = None) -> bool:
    """Record results as runs below the runs of their run directories.

    Scores become metrics such as `valid/mem_len_64/perplexity`, at the step of the checkpoint;
    confidence intervals `..._low` and `..._high`; settings parameters, and the protocol the tag
    `txl.protocol`. The tables of `details` are left out.

    Returns whether the server has all: False if a run has no tracking, and, with a warning, for any
    failure and after the time limit, EVALUATION_SECONDS for one result. Never raises. What is
    written and not delivered is delivered by the next start of the run, or `txl track sync`.
    """
    runs = [run_dir for run_dir, result in scored if _write(run_dir, result)]
    if not runs:
        return False
    if timeout_seconds is None:
        timeout_seconds = EVALUATION_SECONDS + RESULT_SECONDS * (len(runs) - 1)
    unique = list(dict.fromkeys(runs))
    command = [sys.executable, "-m", SENDER, *map(str, unique), "--evaluations"]
    try:
        process = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
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
            return len(runs) == len(scored)
        failure = process.stderr.strip().rpartition("\n")[2]
    log.warning(
        "the evaluation was not recorded in MLflow yet: %s. To send it later: %s",
        redact(failure),
        " and ".join(map(sync_command, unique)),
    )
    return False


def _write(run_dir: Path, result: Mapping[str, Any]) -> bool:
    """Append a result to the file of its run; False if that is not tracked, or not writable."""
    if TrackingState.load(run_dir / STATE) is None:
        return False
    path = run_dir / EVALUATIONS
    try:
        # One `txl eval` at a time: a journal removes the incomplete line that it finds at its end,
        # and that may be the line which another process is writing.
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab") as file:
            if not wait_for_lock(file.fileno(), timeout_seconds=LOCK_SECONDS):
                raise OSError(errno.EAGAIN, f"another process has locked {path}")
            with MetricsJournal(path) as journal:
                journal.append(_line(result))
                journal.sync()
                if journal.num_held:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    except OSError as error:
        log.warning("the evaluation was not recorded in MLflow: %s", error)
        return False
    return True


def _line(result: Mapping[str, Any]) -> dict[str, Any]:
    """What is recorded of a result, without secrets."""
    from txl_dist.evaluation.scores import SCORES

    checkpoint, split = str(result.get("checkpoint", "")), str(result.get("split", ""))
    match = _STEP_NAME.fullmatch(Path(checkpoint).name)
    step = int(match[1]) if match else 0
    scores = {key: result[key] for key in (*_COUNTS, *SCORES) if key in result}
    intervals = (result.get("details") or {}).get("interval") or {}
    for name, bounds in intervals.items():
        if isinstance(bounds, list) and None not in bounds:  # None: out of the range of a float
            scores |= {f"{name}_low": bounds[0], f"{name}_high": bounds[1]}
    left_out = {*scores, "details", "protocol", "save_id"}
    settings = redact({key: value for key, value in result.items() if key not in left_out})
    mem_len = result.get("mem_len", "default")
    protocol, digest = result.get("protocol"), result.get("data_sha256")
    dataset = TrackedDataset(
        name=dataset_name(str(result.get("data")), split),
        digest=str(digest),
        source=redact(str(result.get("data"))),
        context="evaluation",
        profile={key: result[key] for key in _COUNTS[1:] if result.get(key) is not None},
    )
    return {
        "step": step,
        "time": time.time(),
        "key": uuid.uuid4().hex,
        "name": f"eval step {step}: {split}, mem_len {mem_len}",
        "metrics": {
            f"{split}/mem_len_{mem_len}/{key}": float(value)
            for key, value in scores.items()
            if type(value) in (int, float) and math.isfinite(value)
        },
        "params": {key: as_text(value) for key, value in settings.items()},
        "tags": {"txl.protocol": redact(str(protocol))} if protocol is not None else {},
        "dataset": asdict(dataset) if digest is not None else None,
        "model": result.get("save_id"),
    }


def unsent_evaluations(run_dir: Path, state: TrackingState) -> list[tuple[int, dict[str, Any]]]:
    """The lines that the server does not have, each with the offset of its end in the file."""
    try:
        with (run_dir / EVALUATIONS).open("rb") as file:
            is_new = os.fstat(file.fileno()).st_size < state.evaluations_bytes  # it was removed
            offset = file.seek(0 if is_new else state.evaluations_bytes)
            raw_lines = file.read().splitlines(keepends=True)
    except FileNotFoundError:
        return []
    lines = []
    for raw in raw_lines:
        offset += len(raw)
        if raw.endswith(b"\n") and (line := parse_line(raw)) is not None:
            lines.append((offset, line))
    return lines


def record_evaluation(tracker: Tracker, line: Mapping[str, Any], state: TrackingState) -> None:
    """Record one line as a run below the training run of `state`. May be repeated."""
    assert state.run_id is not None
    dataset = line["dataset"]
    run = TrackedRun(
        key=line["key"],
        name=line["name"],
        experiment=state.experiment,
        params=line["params"],
        tags={"txl.kind": "evaluation", "txl.training_run": state.run_id, **line["tags"]},
        parent=state.run_id,
        datasets=[TrackedDataset(**dataset)] if dataset else [],
        evaluates=line["model"],
    )
    milliseconds = int(line["time"] * 1000)
    points = [
        Point(name, value, line["step"], milliseconds) for name, value in line["metrics"].items()
    ]
    run_id = tracker.start(run)
    # All or none of the points were recorded, so one of them tells.
    if points and not tracker.recorded(run_id, points[0].metric):
        tracker.log(run_id, points)
    tracker.end(run_id, "finished")


def send_evaluations(tracker: Tracker, run_dir: Path, state: TrackingState) -> TrackingState:
    """Record all lines that the server lacks; returns the state with what it has."""
    for end, line in unsent_evaluations(run_dir, state):
        try:
            record_evaluation(tracker, line, state)
        except (RefusedError, *_EDITED) as error:
            log.warning("an evaluation was refused: %s", redact(str(error)))
        state = replace(state, evaluations_bytes=end)
        try:
            state.save(run_dir / STATE)
        except OSError as error:  # a full disk; the run can still be found by its key
            log.warning("%s not written: %s", STATE, error)
    return state


def deliver_evaluations(run_dirs: Sequence[Path]) -> None:
    """Record what run directories hold, in a process of its own; the caller limits the time.

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
