"""The events of a run, for programs: RUN/events.jsonl. (RUN/logs are for people.)

    kind            step                         and         written by
    ranks_started                                            launcher
    start           where the attempt begins     start       rank 0, after it has loaded the run
    first_batch                                              rank 0
    first_line      that of the line                         rank 0, at its first step line
    save            that is going to be saved    seconds     rank 0
    score           that was evaluated                       rank 0
    divergence      that has diverged                        rank 0
    rollback        to which the run returns     seconds     rank 0
    error                                        rank        a rank that its own error has stopped
    rank_lost                                    rank        launcher or rank 0, which has noticed
    restart                                                  launcher
    finished, stopped, failed                                launcher: the end of a launch
    finished, stopped, failed   the last one     seconds     rank 0: the end of an attempt

Each process appends its lines. `txl status`, `txl report`, the goodput, model cards and the
launcher read them. Readers skip a line that a kill or a full disk has cut off, kinds of other
versions, and what an attempt writes after a newer one has begun (checkpoint/attempts.py).
"""

import logging
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, ValidationError

EVENTS = "events.jsonl"
Kind: TypeAlias = Literal[
    "ranks_started", "start", "first_batch", "first_line", "save", "score", "divergence",
    "rollback", "error", "rank_lost", "restart", "finished", "stopped", "failed",
]  # fmt: skip
ENDS: tuple[Kind, ...] = ("finished", "stopped", "failed")

log = logging.getLogger(__name__)


class AttemptStart(BaseModel):
    """What an attempt trains, and on what."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    host: str
    num_steps: int
    """Of the whole run."""
    num_parameters: int
    num_ranks: int
    device: str
    """Of a rank: `cpu` or `cuda`."""
    computation: str
    """`ZeRO stage 1 | bf16 | triton`."""
    machine: str
    """Of rank 0."""
    process_seconds: float = 0.0
    """Since the process of rank 0 has started."""
    origin: str = ""
    """The stored model from whose weights the run started, and its digest; empty without one."""


class Event(BaseModel):
    """One line. Fields that its kind does not have are left out."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    kind: Kind
    time: float
    """Wall clock of the host of the process."""
    attempt: int
    """Number of the attempt (`AttemptRecord.number`); before the first one 0."""
    text: str
    """What happened, for people."""
    step: int | None = None
    reached_step: int = 0
    """Of a start or a rollback: the last step that is known to have been trained before."""
    seconds: Mapping[str, float] | None = None
    """Of the process of rank 0 until now, by cause (training/goodput.py)."""
    rank: int | None = None
    start: AttemptStart | None = None


class EventLog:
    """Appends events to a file. An OSError never reaches the caller."""

    def __init__(self, path: Path, attempt: Callable[[], int]) -> None:
        """`attempt()` is the number of the attempt at that moment."""
        self.path, self._attempt = path, attempt

    def write(self, kind: Kind, text: str, **fields: Any) -> Event:
        """Append an event; returns it."""
        now, attempt = time.time(), self._attempt()
        event = Event(kind=kind, time=now, attempt=attempt, text=text, **fields)
        line = event.model_dump_json(exclude_defaults=True).encode() + b"\n"
        try:
            # Opened for each event: launcher and rank 0 may be on different hosts.
            with self.path.open("a+b", buffering=0) as file:
                size = file.tell()
                is_cut_off = size > 0 and os.pread(file.fileno(), 1, size - 1) != b"\n"
                file.write(b"\n" * is_cut_off + line)
        except OSError as error:
            log.warning(
                "%s cannot be written (%s): the run continues, and txl status and txl report do "
                "not know: %s",
                self.path,
                error.strerror,
                text,
            )
        return event


def read_events(run: Path) -> list[Event]:
    """The events of a run, oldest first; none without the file. Raises OSError."""
    try:
        lines = (run / EVENTS).read_bytes().split(b"\n")
    except FileNotFoundError:
        return []
    events: list[Event] = []
    newest = 0
    for event in filter(None, map(parse_event, lines)):
        if event.attempt >= newest:  # not what a replaced attempt still writes
            newest = event.attempt
            events.append(event)
    return events


def parse_event(line: bytes | str) -> Event | None:
    """The event in a line; None for anything else."""
    try:
        return Event.model_validate_json(line)
    except ValidationError:
        return None


def of_kind(events: Iterable[Event], *kinds: Kind) -> list[Event]:
    """The events of these kinds."""
    return [event for event in events if event.kind in kinds]


def newest_attempt(events: Sequence[Event]) -> AttemptStart | None:
    """What the newest attempt trains; None if none has begun."""
    return next((event.start for event in reversed(events) if event.start), None)


def last_start(events: Sequence[Event]) -> Sequence[Event]:
    """The events since the ranks were started last."""
    starts = [n for n, event in enumerate(events) if event.kind in ("ranks_started", "start")]
    if not starts:
        return events
    *before, last = starts
    # A launcher starts the ranks, and then rank 0 begins an attempt.
    if before and events[before[-1]].kind == "ranks_started" and events[last].kind == "start":
        last = before[-1]
    return events[last:]
