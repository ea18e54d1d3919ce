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
    stopped, failed                                          launcher: the end of a launch
    finished, stopped, failed   the last one     seconds     rank 0: the end of an attempt

Each process appends its lines. `txl status`, `txl report`, the goodput, model cards and the
launcher read them. Readers skip a line that a kill or a full disk has cut off, kinds of other
versions, and what an attempt writes after a newer one has begun (checkpoint/attempts.py).
"""

import logging
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeAlias

from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationError

from data_pipeline.errors import clock, counted, printable
from txl_dist.runtime.process import STEP_SPANS, Activity, Span

log = logging.getLogger(__name__)


EVENTS = "events.jsonl"
Kind: TypeAlias = Literal[
    "ranks_started", "start", "first_batch", "first_line", "save", "score", "divergence",
    "rollback", "error", "rank_lost", "restart", "finished", "stopped", "failed",
]  # fmt: skip
ENDS: tuple[Kind, ...] = ("finished", "stopped", "failed")
Text: TypeAlias = Annotated[str, AfterValidator(printable)]
"""May quote a path or an error with any bytes: the file is UTF-8, and terminals show it."""


class AttemptStart(BaseModel):
    """What an attempt trains, and on what."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    host: Text
    num_steps: int
    """Of the whole run."""
    num_parameters: int
    num_ranks: int
    device: str
    """Of a rank: `cpu` or `cuda`."""
    computation: str
    """`ZeRO stage 1 | bf16 | triton`."""
    machine: Text
    process_seconds: float = 0.0
    """Since the process of rank 0 has started."""
    origin: Text = ""
    """The stored model from whose weights the run started, and its digest; empty without one."""


class Event(BaseModel):
    """One line. Fields that its kind does not have are left out."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    kind: Kind
    time: float
    """Wall clock of the host of the process."""
    attempt: int
    """Number of the attempt (`AttemptRecord.number`); before the first one 0."""
    text: Text
    step: int | None = None
    reached_step: int = 0
    """Of a start or a rollback: the last step that is known to have been trained before."""
    seconds: Mapping[str, float] | None = None
    """Of the process of rank 0 until now, by cause (`process_seconds`)."""
    rank: int | None = None
    start: AttemptStart | None = None


class EventLog:
    """Appends events to a file. An OSError never reaches the caller."""

    def __init__(self, path: Path, attempt: Callable[[], int]) -> None:
        """`attempt()` is the number of the attempt at that moment."""
        self.path, self._attempt = path, attempt

    def write(self, kind: Kind, text: str, **fields: Any) -> Event:
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


STEPS = "steps"
LOST, DOWN = "lost steps", "down"
LOSSES = (
    Span.START_UP.value, Span.EVALUATION.value, Span.SAVE_WAIT.value, Span.DATA_WAIT.value,
    LOST, DOWN, Span.OTHER.value,
)  # fmt: skip


class WallTime:
    """The seconds of a run by cause, until the last event that has sums; those of rank 0.

    Productive (STEPS) are the seconds of the steps that are part of the final trajectory. Goodput
    is their share of the wall time since the first start. The rest is lost to

        start-up    from the start of a rank to the end of its first step
        data wait, save wait, evaluation    the time for which they blocked the training loop
        lost steps  steps that were trained again, and a step that never ended
        down        between the end of a process and the start of the next one
        other       the rest of the loop, such as logging

    What follows the last sums of a killed process is lost until its launcher or another rank has
    noticed, and then down. Only that is the difference of two wall clocks; a negative one is 0.
    """

    def __init__(self) -> None:
        self.restarts = 0
        """Starts after a failure: not the first, and not those after a stop request or the end."""
        self.lost_steps = 0
        self.productive: dict[int, float] = {}
        """Productive seconds up to a checkpoint, by step."""
        self._earlier: defaultdict[str, float] = defaultdict(float)
        """Of earlier processes, and corrections of this one for lost steps."""
        self._process: Mapping[str, float] = {}
        """Of the newest process, at its last event with sums."""
        self._known_at: float | None = None
        """Wall clock of that event; None: there was no attempt."""
        self._noticed_at = 0.0
        """Wall clock of the newest event at which the process lived, or its end was noticed."""
        self._step = 0
        self._has_begun = self._has_ended = self._is_stopped = self._is_complete = False
        """Of the newest attempt: whether a step has begun, whether it has given its last sums,
        whether it was stopped on request, and whether no step is left."""

    @classmethod
    def of(cls, events: Iterable[Event]) -> Self:
        time = cls()
        for event in events:
            time.take(event)
        return time

    @property
    def seconds(self) -> Mapping[str, float]:
        """Seconds by cause since the first start; 0 for a cause that it does not have."""
        return self.with_process(self._process)

    def with_process(self, process: Mapping[str, float]) -> Mapping[str, float]:
        """The same with newer sums of the newest process."""
        seconds = self._earlier.copy()
        for cause, spent in process.items():
            seconds[cause] += spent
        return seconds

    def __str__(self) -> str:
        """`3 restarts, 41 steps lost | goodput 96.2% of 312:08:10 | start-up 0.4% | down 1.2%`."""
        wall_seconds = max(1e-9, sum(self.seconds.values()))
        shares = {cause: self.seconds.get(cause, 0.0) / wall_seconds for cause in LOSSES}
        return " | ".join(
            (
                f"{counted(self.restarts, 'restart')}, {counted(self.lost_steps, 'step')} lost",
                f"goodput {goodput_of(self.seconds):.1%} of {clock(wall_seconds)}",
                *(f"{cause} {share:.1%}" for cause, share in shares.items() if share >= 5e-4),
            )
        )

    def take(self, event: Event) -> None:
        """Continue with the next event of the run."""
        if event.kind not in ("ranks_started", "start"):
            self._noticed_at = event.time
        if event.start is not None:
            self._begin(event, event.start)
        self._has_begun |= event.kind == "first_batch"
        # A run that was finished already stays as it is.
        if event.seconds is not None and (self._has_begun or not self._is_complete):
            self._process, self._known_at = event.seconds, event.time
            if event.kind == "rollback":
                self._step = event.reached_step
                self._rewind(event.step or 0, event.reached_step)
            elif event.kind == "save":
                self.productive[event.step or 0] = self.seconds[STEPS]
            else:
                self._is_complete, self._has_ended = event.kind == "finished", True
            self._step = event.step or 0
        self._is_stopped |= event.kind == "stopped"

    def _begin(self, event: Event, start: AttemptStart) -> None:
        began, step = event.time - start.process_seconds, event.step or 0
        if self._known_at is not None and not self._is_complete:
            self.restarts += not self._is_stopped
            ended_at = self._known_at
            if not self._has_ended:
                ended_at = max(ended_at, min(self._noticed_at, began))
            lost = LOST if self._has_begun else Span.START_UP.value
            self._earlier[lost] += ended_at - self._known_at
            self._earlier[DOWN] += max(0.0, began - ended_at)
        self._earlier, self._process = defaultdict(float, self.seconds), {}
        self._rewind(step, max(event.reached_step, self._step))
        self._is_complete &= step >= start.num_steps
        self._has_begun = self._has_ended = self._is_stopped = False
        self._known_at = event.time
        self._process = {} if self._is_complete else {Span.START_UP: start.process_seconds}
        self.productive.setdefault(step, self._earlier[STEPS])

    def _rewind(self, step: int, reached_step: int) -> None:
        """The run goes back to `step`: the time of the steps after it was lost."""
        if step < reached_step:
            self.lost_steps += reached_step - step
            productive = self.seconds.get(STEPS, 0.0)
            # If its event was lost: by the mean time of a step.
            kept = self.productive.get(step, productive * step / max(step, self._step, 1))
            self._earlier[STEPS] -= productive - kept
            self._earlier[LOST] += productive - kept
            self.productive = {s: p for s, p in self.productive.items() if s <= step}
        self._step = step


def goodput_of(seconds: Mapping[str, float]) -> float:
    """The share of the productive seconds of all `seconds` by cause."""
    return seconds.get(STEPS, 0.0) / max(1e-9, sum(seconds.values()))


def process_seconds(activity: Activity) -> dict[str, float]:
    """The seconds of a process until now by cause; its unfinished step is lost."""
    seconds: defaultdict[str, float] = defaultdict(float)
    for span, spent in activity.seconds().items():
        seconds[STEPS if span in STEP_SPANS else span.value] += spent
    seconds[STEPS] -= activity.unfinished_seconds
    lost = LOST if activity.num_steps else Span.START_UP.value
    seconds[lost] += activity.unfinished_seconds
    return dict(seconds)
