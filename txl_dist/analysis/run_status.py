"""`txl status`: what runs are doing, from the files of their directories. Reads only.

    .launch-ID.launcher, lock    locked: a launcher or rank 0 lives on this host, or the storage
                                 has locks for all hosts
    .heartbeats/rank-N.json      changes every few seconds as long as a rank lives, on any host
    logs/, goodput.json          how the last start ended

Clocks of hosts are not compared (decision 20): where no lock is seen, heartbeats are read again
until one has changed, at most SILENT_SECONDS.
"""

import math
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from data_pipeline.errors import counted
from data_pipeline.system.files import is_locked
from data_pipeline.system.progress import clock
from txl_dist.checkpoint.attempts import FOLDER, newest_record
from txl_dist.checkpoint.directory import CheckpointDirectory
from txl_dist.config.yaml_file import YamlTextError, read_yaml
from txl_dist.errors import ConfigError
from txl_dist.runtime.heartbeat import BEAT_SECONDS, SILENT_BEATS, Heartbeat, read_heartbeats
from txl_dist.tracking.journal import JOURNAL, READ_BYTES, parse_line
from txl_dist.tracking.process import page_command
from txl_dist.tracking.tracker import STATE, TrackingState
from txl_dist.training.goodput import read_goodput
from txl_dist.training.run_log import RunLog, last_error, read_log

SILENT_SECONDS = BEAT_SECONDS * SILENT_BEATS
POLL_SECONDS = 0.5

State = Literal["running", "starting", "ended", "stopped", "failed", "lost", "unreadable"]
"""`starting`: no step since the newest start. `ended`: all steps are done. `stopped`: on request.
`failed`: with an error. `lost`: without a last word, as after SIGKILL or the loss of a machine.
`unreadable`: the files of the run cannot be read here."""

T = TypeVar("T")


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
    found = {path.parent for depth in ("*", "*/*") for path in folder.glob(f"{depth}/{JOURNAL}")}
    found |= {path.parent.parent for path in folder.glob("*/logs/rank-0.log")}
    return sorted(found, key=lambda run: (_changed_at(run), run))


def _changed_at(run: Path) -> float:
    for name in (JOURNAL, "logs/rank-0.log"):
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
    unreadable: dict[Path, OSError] = {}

    def read_each(read: Callable[[Path], T]) -> dict[Path, T]:
        """`read` of all runs that could be read until now."""
        results = {}
        for run in (run for run in runs if run not in unreadable):
            try:
                results[run] = read(run)
            except OSError as error:
                unreadable[run] = error
        return results

    read_each(_require_run)
    are_alive, beats = read_each(_is_held), read_each(read_heartbeats)
    unknown = [run for run in beats if not are_alive[run] and _may_live(beats[run])]
    if unknown:
        wait(unknown)
        are_alive |= _watch(unknown, beats)
    statuses = read_each(lambda run: _status(run, beats[run], is_alive=are_alive[run]))
    for run, error in unreadable.items():
        reason = f"{error.filename or run} cannot be read: {error.strerror or error}"
        statuses[run] = RunStatus(run=str(run), state="unreadable", doing=reason)
    return [statuses[run] for run in runs]


def _require_run(run: Path) -> None:
    if not any((run / name).exists() for name in ("config.yaml", JOURNAL, "logs")):
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
    log = read_log(run)
    last, goodput = _last_values(run / JOURNAL), read_goodput(run / "goodput.json")
    # Step lines may be many steps apart, and a stop writes none.
    steps = [int(last["step"])] if "step" in last else []
    steps += [goodput.step] if goodput else []
    attempt = newest_record(run / FOLDER)
    state = _state(log, is_alive=is_alive)
    checkpoints = CheckpointDirectory(run)
    newest = checkpoints.newest_step()
    is_bad = state in ("failed", "lost")
    error = last_error(run) if is_bad else None
    rank_zero = beats.get(0)
    return RunStatus(
        run=str(run),
        state=state,
        doing=_doing(state, log, rank_zero),
        step=max(steps, default=None),
        num_steps=_num_steps(run),
        loss=last.get("loss"),
        tokens_per_second=last.get("tokens_per_second"),
        seconds_left=log.seconds_left if state == "running" else None,
        restarts=goodput.restarts if goodput else None,
        checkpoint=None if newest is None else str(checkpoints.at(newest)),
        checkpoint_seconds=None if newest is None else _age_seconds(checkpoints.at(newest)),
        host=rank_zero.host if rank_zero else attempt.host if attempt else None,
        attempt=attempt.number if attempt else None,
        error=error[0] if error else None,
        log=str(error[1] if error else run / "logs" / "rank-0.log") if is_bad else None,
        **_mlflow(run),
    )


def _state(log: RunLog, *, is_alive: bool) -> State:
    if log.last_word.startswith("finished"):  # its launcher may deliver the last metrics
        return "ended"
    if is_alive:
        return "running" if log.has_stepped and not log.last_word else "starting"
    if log.last_word.startswith("stopped on request"):
        return "stopped"
    return "failed" if log.last_word else "lost"


def _doing(state: State, log: RunLog, rank_zero: Heartbeat | None) -> str:
    if state == "running" and rank_zero is not None:
        waits = f", waits for other ranks in {rank_zero.collective}" if rank_zero.collective else ""
        # Without the number of the step that it has begun: `RunStatus.step` is the last one.
        is_step = rank_zero.activity.startswith("step ")
        return f"{rank_zero.span if is_step else rank_zero.place}{waits}"
    if state in ("running", "starting"):
        # Without the time of day.
        return log.events[-1].partition(" ")[2] if log.events else "no rank has begun"
    return log.last_word or ("no last word in the log" if log.starts else "no rank has begun")


def _last_values(journal: Path) -> dict[str, float]:
    """The newest value of every metric, from the end of the journal."""
    last: dict[str, float] = {}
    with suppress(OSError), journal.open("rb") as file:
        file.seek(max(0, journal.stat().st_size - READ_BYTES))
        for line in map(parse_line, file):
            values = (line or {}).items()
            last |= {name: value for name, value in values if isinstance(value, int | float)}
    return last


def _num_steps(run: Path) -> int | None:
    with suppress(OSError, UnicodeDecodeError, YamlTextError, TypeError, KeyError):
        steps = read_yaml((run / "config.yaml").read_text(encoding="utf-8")).value["training"][
            "num_steps"
        ]
        return steps if isinstance(steps, int) else None
    return None


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
    if status.step is not None:
        of = f" of {status.num_steps:,}" if status.num_steps else ""
        share = f" ({status.step / status.num_steps:.0%})" if status.num_steps else ""
        yield f"step {status.step:,}{of}{share}"
    if status.loss is not None:
        yield f"loss {status.loss:.4f}"
    if status.tokens_per_second is not None and status.state == "running":
        yield f"{status.tokens_per_second:,.0f} tokens/s"
    if status.seconds_left is not None:
        yield f"{duration(status.seconds_left)} left"


def duration(seconds: float) -> str:
    """`3:12:44`, or `2 days 3:12:44`."""
    days, rest = divmod(round(seconds), 86_400)
    return f"{counted(days, 'day')} {clock(rest)}" if days else clock(rest)
