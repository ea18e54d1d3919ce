"""`txl status`: what runs are doing, from the files of their directories. Reads only.

locks, .heartbeats/      whether it lives (`live_runs`)
events.jsonl             how the last start ended (txl_dist/events.py)
metrics.jsonl            the newest step line
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from data_pipeline.errors import clock, counted
from txl_dist.checkpoint.directory import CheckpointDirectory
from txl_dist.errors import ConfigError
from txl_dist.events import (
    ENDS,
    EVENTS,
    Event,
    WallTime,
    last_start,
    newest_attempt,
    of_kind,
    read_events,
)
from txl_dist.runtime.waiting import Heartbeat, read_heartbeats
from txl_dist.tracking.journal import JOURNAL, read_metrics
from txl_dist.tracking.process import page_command
from txl_dist.tracking.tracker import STATE, TrackingState
from txl_dist.training.spec import live_runs

State = Literal["running", "starting", "ended", "stopped", "failed", "lost"]
"""`starting`: no step since the newest start. `ended`: all steps are done. `stopped`: on request.
`failed`: with an error. `lost`: without a last word, as after SIGKILL or the loss of a machine."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunStatus:
    """One run; None for what is not known."""

    run: str
    state: State
    doing: str
    """What rank 0 is doing, how the run ended, or the error that ended it."""
    step: int | None
    """The last step that was trained, as far as its files say."""
    num_steps: int | None
    loss: float | None
    tokens_per_second: float | None
    seconds_left: float | None
    """Loss, speed and time left are those of the newest step line; the last two of a running run
    only."""
    restarts: int
    """After failures."""
    checkpoint: str | None
    origin: str | None
    """The stored model from whose weights it started, and its digest; None: random weights."""
    host: str | None
    attempt: int | None
    log: str | None
    mlflow_run_id: str | None
    mlflow_page: str | None
    """The command that opens the page of MLflow, or the address of its server."""

    def to_json(self) -> dict[str, Any]:
        """With null for the loss of a diverged run, because JSON has no NaN."""
        return {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in asdict(self).items()
        }


def find_runs(folder: Path) -> list[Path]:
    """The run directories below a folder, at most two levels deep, the newest last."""
    events = [*folder.glob(f"*/{EVENTS}"), *folder.glob(f"*/*/{EVENTS}")]
    return [path.parent for path in sorted(events, key=lambda path: path.stat().st_mtime)]


def read_status(runs: Sequence[Path]) -> list[RunStatus]:
    """The status of each run, which takes up to SILENT_SECONDS if no lock shows whether it lives.

    Raises ConfigError for a directory that is no run.
    """
    for run in runs:
        if not any((run / name).exists() for name in ("config.yaml", JOURNAL, EVENTS, "logs")):
            raise ConfigError(
                f"{run} is not a run directory. Give the `directory` of a config that `txl train` "
                "has run, or nothing for those below runs/"
            )
    alive = live_runs(runs)
    return [_status(run, is_alive=run in alive) for run in runs]


# --- what it does ---------------------------------------------------------------------------------


def _status(run: Path, *, is_alive: bool) -> RunStatus:
    all_events = read_events(run)
    # From the end of metrics.jsonl.
    lines = list(read_metrics(run / JOURNAL, newest=True))
    pairs = (pair for line in lines for pair in line.items())
    values = {name: value for name, value in pairs if isinstance(value, int | float)}
    events, rank_zero = last_start(all_events), read_heartbeats(run).get(0)
    start = newest_attempt(all_events)
    state = _state({event.kind for event in events}, is_alive=is_alive)
    # The last line may be a late score of an older step. Step lines may be many steps apart, and a
    # stop writes none.
    steps = [line["step"] for line in lines]
    rollbacks = [number for number, event in enumerate(events) if event.kind == "rollback"]
    kept = events[rollbacks[-1] :] if rollbacks else events
    kept = of_kind(kept, "rollback", "save", *ENDS)
    steps += [event.step for event in kept if event.step is not None]
    checkpoints = CheckpointDirectory(run)
    newest = checkpoints.newest_step()
    # An error because another rank was lost is the answer only if no rank has another one.
    errors = [*of_kind(events, "error"), *of_kind(events, "rank_lost")]
    error = errors[0] if errors and state in ("failed", "lost") else None
    log = run / "logs" / f"rank-{error.rank if error and error.rank else 0}.log"
    tracking = TrackingState.load(run / STATE)
    return RunStatus(
        run=str(run),
        state=state,
        doing=error.text if error else _doing(state, events, rank_zero),
        step=max(steps, default=None),
        num_steps=start.num_steps if start else None,
        loss=values.get("loss"),
        tokens_per_second=values.get("tokens_per_second") if state == "running" else None,
        seconds_left=values.get("seconds_left") if state == "running" else None,
        restarts=WallTime.of(all_events).restarts,
        checkpoint=None if newest is None else str(checkpoints.at(newest)),
        origin=start.origin or None if start else None,
        host=rank_zero.host if rank_zero else start.host if start else None,
        attempt=all_events[-1].attempt if all_events else None,
        log=str(log) if state in ("failed", "lost") else None,
        mlflow_run_id=tracking.run_id if tracking else None,
        mlflow_page=page_command(run, tracking.server) if tracking else None,
    )


def _state(kinds: set[str], *, is_alive: bool) -> State:
    """`kinds`: of the events since the newest start."""
    if "finished" in kinds:
        return "ended"  # its launcher may deliver the last metrics
    if is_alive:
        # A run of an earlier version has no events.
        has_stepped = "first_line" in kinds or not kinds
        return "running" if has_stepped and kinds.isdisjoint(ENDS) else "starting"
    if "stopped" in kinds:
        return "stopped"
    return "failed" if {"failed", "error"} & kinds else "lost"


def _doing(state: State, events: Sequence[Event], rank_zero: Heartbeat | None) -> str:
    if state == "running" and rank_zero is not None:
        waits = f", waits for other ranks in {rank_zero.collective}" if rank_zero.collective else ""
        # Without the number of the step that it has begun: `RunStatus.step` is the last one.
        is_step = rank_zero.activity.startswith("step ")
        return f"{rank_zero.span if is_step else rank_zero.place}{waits}"
    if not events:
        return f"no {EVENTS}: the run has not begun, or an older version wrote it; see its logs"
    # The end that the launcher has written, which knows all ranks, is the last one.
    ends = of_kind(events, *ENDS) if state not in ("running", "starting") else []
    silent = "no last word after: " if state == "lost" else ""
    return ends[-1].text if ends else f"{silent}{events[-1].text}"


# --- for people -----------------------------------------------------------------------------------


def status_lines(status: RunStatus) -> Iterator[str]:
    """`RUN: running, step 14 of 50 (28%), loss 3.7095, 3,579 tokens/s, 0:00:21 left`, and more."""
    parts = [f"{status.run}: {status.state}"]
    if status.step is not None:
        step, total = status.step, status.num_steps
        parts.append(f"step {step:,}" + (f" of {total:,} ({step / total:.0%})" if total else ""))
    if status.loss is not None:
        parts.append(f"loss {status.loss:.4f}")
    if status.tokens_per_second is not None:
        parts.append(f"{status.tokens_per_second:,.0f} tokens/s")
    if status.seconds_left is not None:
        parts.append(f"{clock(status.seconds_left)} left")
    yield ", ".join(parts)
    if status.attempt and status.host:
        restarts = counted(status.restarts, "restart")
        yield f"  attempt {status.attempt} on {status.host}, {restarts} after failures"
    yield f"  {status.doing}"
    if status.origin is not None:
        yield f"  started from the weights of {status.origin}"
    if status.checkpoint is not None:
        yield f"  checkpoint: {status.checkpoint}"
    if status.log is not None:
        yield f"  log: {status.log}"
    if status.mlflow_run_id is not None:
        yield f"  MLflow run {status.mlflow_run_id}: {status.mlflow_page}"
