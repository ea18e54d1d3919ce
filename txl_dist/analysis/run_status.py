"""`txl status`: what runs are doing, from the files of their directories. Reads only.

    .launch-ID.launcher, lock    locked: a launcher or rank 0 lives on this host, or the storage
                                 has locks for all hosts
    .heartbeats/rank-N.json      changes every few seconds as long as a rank lives, on any host
    events.jsonl                 how the last start ended (txl_dist/events.py)

Clocks of hosts are not compared (decision 20): where no lock is seen, heartbeats are read again
until one has changed, at most SILENT_SECONDS.
"""

import math
import socket
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from data_pipeline.errors import counted
from data_pipeline.system.files import is_locked
from data_pipeline.system.progress import clock
from txl_dist.checkpoint.attempts import FOLDER, newest_record
from txl_dist.checkpoint.directory import CheckpointDirectory
from txl_dist.errors import ConfigError
from txl_dist.events import ENDS, EVENTS, Event, last_start, of_kind, read_events
from txl_dist.runtime.heartbeat import BEAT_SECONDS, SILENT_BEATS, Heartbeat, read_heartbeats
from txl_dist.tracking.journal import JOURNAL, READ_BYTES, parse_line
from txl_dist.tracking.process import page_command
from txl_dist.tracking.tracker import STATE, TrackingState
from txl_dist.training.goodput import WallTime

SILENT_SECONDS = BEAT_SECONDS * SILENT_BEATS
POLL_SECONDS = 0.5

State = Literal["running", "starting", "ended", "stopped", "failed", "lost", "unreadable"]
"""`starting`: no step since the newest start. `ended`: all steps are done. `stopped`: on request.
`failed`: with an error. `lost`: without a last word, as after SIGKILL or the loss of a machine.
`unreadable`: the files of the run cannot be read here."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunStatus:
    """One run; None for what is not known."""

    run: str
    state: State
    doing: str
    """What rank 0 is doing, how the run ended, or why it cannot be read."""
    step: int | None = None
    """The last step that was trained, as far as its files say."""
    num_steps: int | None = None
    loss: float | None = None
    tokens_per_second: float | None = None
    seconds_left: float | None = None
    """Loss, speed and time left are those of the newest step line."""
    restarts: int | None = None
    checkpoint: str | None = None
    checkpoint_seconds: float | None = None
    """Since the newest checkpoint was written, by the clock of the storage and of this host."""
    host: str | None = None
    attempt: int | None = None
    error: str | None = None
    """How the newest start ended, if not as it should."""
    log: str | None = None
    """The file to read about it."""
    mlflow_run_id: str | None = None
    mlflow_command: str | None = None
    """Opens the page of MLflow; None without tracking, or for a server (`mlflow_server`)."""
    mlflow_server: str | None = None

    def to_json(self) -> dict[str, Any]:
        """With null for the loss of a diverged run, because JSON has no NaN."""
        return {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in asdict(self).items()
        }


def find_runs(folder: Path) -> list[Path]:
    """The run directories below a folder, at most two levels deep, the newest last."""
    names = (f"{depth}/{name}" for depth in ("*", "*/*") for name in (JOURNAL, EVENTS))
    found = {path.parent for name in names for path in folder.glob(name)}
    return sorted(found, key=lambda run: (_changed_at(run), run))


def _changed_at(run: Path) -> float:
    for name in (JOURNAL, EVENTS):
        with suppress(OSError):
            return (run / name).stat().st_mtime
    return 0.0


def read_status(
    runs: Sequence[Path], *, wait: Callable[[Sequence[Path]], None] = lambda silent: None
) -> list[RunStatus]:
    """The status of each run. Raises ConfigError for a directory that is no run.

    `wait(runs)` is called before the heartbeats of runs that no lock shows are watched, which takes
    up to SILENT_SECONDS.
    """
    statuses: dict[Path, RunStatus] = {}
    beats: dict[Path, dict[int, Heartbeat]] = {}
    are_alive: dict[Path, bool] = {}
    for run in runs:
        with _noting_unreadable(run, statuses):
            _require_run(run)
            are_alive[run] = _is_held(run)
            beats[run] = read_heartbeats(run)
    unknown = [run for run in beats if not are_alive[run] and _may_live(beats[run])]
    if unknown:
        wait(unknown)
        are_alive |= _watch(unknown, beats)
    for run, found in beats.items():
        with _noting_unreadable(run, statuses):
            statuses[run] = _status(run, found, is_alive=are_alive[run])
    return [statuses[run] for run in runs]


@contextmanager
def _noting_unreadable(run: Path, statuses: dict[Path, RunStatus]) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        reason = f"{error.filename or run} cannot be read: {error.strerror or error}"
        statuses[run] = RunStatus(run=str(run), state="unreadable", doing=reason)


def _require_run(run: Path) -> None:
    if not any((run / name).exists() for name in ("config.yaml", JOURNAL, EVENTS, "logs")):
        raise ConfigError(
            f"{run} is not a run directory. Give the `directory` of a config that `txl train` "
            "has run, or nothing for those below runs/"
        )


# --- is it alive? ---------------------------------------------------------------------------------


def _is_held(run: Path) -> bool:
    """Whether a launcher or a rank holds one of its locks, as far as they are seen from here."""
    return any(is_locked(path) for path in (*run.glob(".launch-*.launcher"), run / "lock"))


def _may_live(beats: dict[int, Heartbeat]) -> bool:
    """Whether a rank may live: those of this host are looked up."""
    here = socket.gethostname()
    return any(beat.host != here or Path(f"/proc/{beat.pid}").exists() for beat in beats.values())


def _watch(runs: Sequence[Path], beats: dict[Path, dict[int, Heartbeat]]) -> dict[Path, bool]:
    """Whether a heartbeat of each run changes; `beats` are those of the first look."""
    first = {run: {rank: beat.identity for rank, beat in beats[run].items()} for run in runs}
    changed: dict[Path, bool] = dict.fromkeys(runs, False)
    deadline = time.monotonic() + SILENT_SECONDS
    while not all(changed.values()) and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
        for run in (run for run in runs if not changed[run]):
            now = read_heartbeats(run)
            changed[run] = any(beat.identity != first[run].get(rank) for rank, beat in now.items())
            beats[run] = now or beats[run]
    return changed


# --- what it does ---------------------------------------------------------------------------------


def _status(run: Path, beats: dict[int, Heartbeat], *, is_alive: bool) -> RunStatus:
    all_events = read_events(run)
    events, values = last_start(all_events), last_values(run / JOURNAL)
    starts = [event.start for event in all_events if event.start]
    num_steps = starts[-1].num_steps if starts else None
    # Step lines may be many steps apart, and a stop writes none.
    steps = [int(values["step"])] if "step" in values else []
    steps += [event.step for event in of_kind(events, "save", *ENDS) if event.step is not None]
    checkpoints, attempt = CheckpointDirectory(run), newest_record(run / FOLDER)
    newest, rank_zero = checkpoints.newest_step(), beats.get(0)
    state = _state({event.kind for event in events}, is_alive=is_alive)
    # An error because another rank was lost is the answer only if no rank has another one.
    errors = [*of_kind(events, "error"), *of_kind(events, "rank_lost")]
    is_bad = state in ("failed", "lost")
    error = errors[0] if errors and is_bad else None
    log = run / "logs" / f"rank-{error.rank if error and error.rank else 0}.log"
    return RunStatus(
        run=str(run),
        state=state,
        doing=_doing(state, events, rank_zero),
        step=max(steps, default=None),
        num_steps=num_steps,
        loss=values.get("loss"),
        tokens_per_second=values.get("tokens_per_second"),
        seconds_left=values.get("seconds_left") if state == "running" else None,
        restarts=WallTime.of(all_events).restarts if all_events else None,
        checkpoint=None if newest is None else str(checkpoints.at(newest)),
        checkpoint_seconds=None if newest is None else _age_seconds(checkpoints.at(newest)),
        host=rank_zero.host if rank_zero else attempt.host if attempt else None,
        attempt=attempt.number if attempt else None,
        error=error.text if error else None,
        log=str(log) if is_bad else None,
        **_mlflow(run),
    )


def _state(kinds: Collection[str], *, is_alive: bool) -> State:
    """`kinds`: of the events since the newest start."""
    if "finished" in kinds:
        return "ended"  # its launcher may deliver the last metrics
    if is_alive:
        # A run of an earlier version has no events.
        has_stepped = "first_line" in kinds or not kinds
        return "running" if has_stepped and not {*ENDS} & {*kinds} else "starting"
    if "stopped" in kinds:
        return "stopped"
    return "failed" if {"failed", "error"} & {*kinds} else "lost"


def _doing(state: State, events: Sequence[Event], rank_zero: Heartbeat | None) -> str:
    if state == "running" and rank_zero is not None:
        waits = f", waits for other ranks in {rank_zero.collective}" if rank_zero.collective else ""
        # Without the number of the step that it has begun: `RunStatus.step` is the last one.
        is_step = rank_zero.activity.startswith("step ")
        return f"{rank_zero.span if is_step else rank_zero.place}{waits}"
    if not events:
        return f"no {EVENTS}: the run has not begun, or an older version wrote it; see its logs"
    if state in ("running", "starting"):
        return events[-1].text
    # That of the launcher, which knows all ranks, is the last one.
    words = of_kind(events, *ENDS, "error", "rank_lost")
    return words[-1].text if words else f"no last word after: {events[-1].text}"


def last_values(journal: Path) -> dict[str, float]:
    """The newest value of every metric, from the end of metrics.jsonl."""
    last: dict[str, float] = {}
    with suppress(OSError), journal.open("rb") as file:
        file.seek(max(0, journal.stat().st_size - READ_BYTES))
        for line in map(parse_line, file):
            values = (line or {}).items()
            last |= {name: value for name, value in values if isinstance(value, int | float)}
    return last


def _age_seconds(checkpoint: Path) -> float | None:
    with suppress(OSError):  # just removed
        return max(0.0, time.time() - checkpoint.stat().st_mtime)
    return None


def _mlflow(run: Path) -> dict[str, str | None]:
    state = TrackingState.load(run / STATE)
    server = state.server if state else None
    is_file = state is not None and (server is None or server.startswith("sqlite"))
    return {
        "mlflow_run_id": state.run_id if state else None,
        "mlflow_command": page_command(run, server) if is_file else None,
        "mlflow_server": None if is_file else server,
    }


# --- for people -----------------------------------------------------------------------------------


def status_lines(status: RunStatus) -> Iterator[str]:
    """A few lines about one run."""
    yield ", ".join([f"{status.run}: {status.state}", *_progress(status)])
    if status.attempt is not None:
        place = f" on {status.host}" if status.host else ""
        restarts = (
            f", {counted(status.restarts, 'restart')} after failures" if status.restarts else ""
        )
        yield f"  attempt {status.attempt}{place}{restarts}"
    yield f"  {status.doing}"
    if status.checkpoint is not None:
        seconds = status.checkpoint_seconds
        age = "" if seconds is None else f", {duration(seconds)} old"
        yield f"  checkpoint: {status.checkpoint}{age}"
    if status.error is not None and status.error != status.doing:
        yield f"  error: {status.error}"
    if status.log is not None:
        yield f"  log: {status.log}"
    if status.mlflow_run_id is not None:
        where = status.mlflow_command or f"at {status.mlflow_server}"
        yield f"  MLflow run {status.mlflow_run_id}: {where}"


def _progress(status: RunStatus) -> Iterator[str]:
    values = {
        "step": status.step,
        "loss": status.loss,
        "tokens_per_second": status.tokens_per_second if status.state == "running" else None,
        "seconds_left": status.seconds_left,
    }
    known = {name: value for name, value in values.items() if value is not None}
    yield from progress_text(known, status.num_steps)


def progress_text(values: Mapping[str, float], num_steps: int | None) -> Iterator[str]:
    """`step 14 of 50 (28%)`, `loss 3.7095`, `3,579 tokens/s`, `0:00:21 left`, as far as known.

    `values`: metrics of the newest step line.
    """
    if "step" in values:
        step = values["step"]
        of = f" of {num_steps:,} ({step / num_steps:.0%})" if num_steps else ""
        yield f"step {step:,.0f}{of}"
    if "loss" in values:
        yield f"loss {values['loss']:.4f}"
    if "tokens_per_second" in values:
        yield f"{values['tokens_per_second']:,.0f} tokens/s"
    if "seconds_left" in values:
        yield f"{duration(values['seconds_left'])} left"


def duration(seconds: float) -> str:
    """`3:12:44`, or `2 days 3:12:44`."""
    days, rest = divmod(round(seconds), 86_400)
    return f"{counted(days, 'day')} {clock(rest)}" if days else clock(rest)
