"""What a rank is doing: its activity, and the heartbeat files through which others see it.

At any moment the main thread of a rank is in exactly one span (`data wait`, `forward`, ...), so the
seconds of all spans add up to the time since `reset`. The times are those of the host, from the
monotonic clock. GPU kernels run asynchronously: their time is in the span that waits for their
results. That is `optimizer`, where the loss and the gradient norm are read; with several ranks
DeepSpeed also waits at the end of `backward`.

    RUN/.heartbeats/rank-N.json       rewritten every few seconds by rank N (`waiting.py`)

The ranks read each other's (`Peers`; `waiting.py` decides what follows). Nobody waits for the only
rank of a run, or if all ranks hang at the same time: so the launcher reads them too (`HangWatch`).

Files, because a rank that waits in a collective cannot use another collective, and every rank sees
the run directory. Readers decide by the number of a heartbeat, which changes as long as the rank
lives, and by their own monotonic clock; clocks of different hosts are never compared.
"""

import contextlib
import threading
import time
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Self

from pydantic import ValidationError

from data_pipeline.errors import counted
from data_pipeline.system.files import overwrite_page
from data_pipeline.system.strict import StrictModel

BEAT_SECONDS = 5.0
"""Between two heartbeats of a rank; less if `training.rank_timeout_seconds` is short."""
SILENT_BEATS = 3
"""A rank does not respond if its heartbeat has not changed for this many intervals."""
NUM_READERS = 8
"""Only this many ranks read the heartbeats of all others; the rest reads theirs. This limits the
load of the storage."""
MAX_NAMED = 4
"""Ranks that one message describes."""
POLL_SECONDS = 2.0
MARGIN_SECONDS = 10.0
"""A launcher gives ranks this much longer than `training.rank_timeout_seconds`: ranks that wait for
others know more about them."""
START_SECONDS = 600.0
"""Time limit for the first heartbeat of any rank. Imports from a busy file server take minutes."""


class Span(StrEnum):
    """A kind of work of the main thread."""

    START_UP = "start-up"
    """Until the end of the first step of this process, which compiles and allocates."""
    DATA_WAIT = "data wait"
    FORWARD = "forward"
    BACKWARD = "backward"
    """Contains the reduction of the gradients, and so the wait for slower ranks."""
    REDUCE = "reduce"
    """The collective of the step, which sums the losses."""
    OPTIMIZER = "optimizer"
    SAVE_WAIT = "save wait"
    EVALUATION = "evaluation"
    OTHER = "other"
    """Everything else in the loop, such as logging."""


STEP_SPANS = (Span.FORWARD, Span.BACKWARD, Span.REDUCE, Span.OPTIMIZER)


def _zeros() -> dict[Span, float]:
    return dict.fromkeys(Span, 0.0)


@dataclass(slots=True)
class Activity:
    """`name` is for messages: `start-up`, `step 12`, `checkpoint of step 12`, ..."""

    name: str = "start-up"
    span: Span = Span.START_UP
    num_steps: int = 0
    """Steps that this process has done since `reset`."""
    num_collectives: int = 0
    """Collectives of `World` that this process has begun."""
    unfinished_seconds: float = 0.0
    """Of the step in progress, in STEP_SPANS."""
    _seconds: dict[Span, float] = field(default_factory=_zeros, repr=False)
    _since: float = field(default_factory=time.monotonic, repr=False)

    def reset(self) -> None:
        """Begin with the start-up of a run, at 0 seconds."""
        self.name, self.span, self.num_steps = "start-up", Span.START_UP, 0
        self._seconds, self._since = _zeros(), time.monotonic()
        self.unfinished_seconds = 0.0

    def enter(self, span: Span) -> Span:
        """End the current span and begin `span`; returns the one that has ended."""
        now = time.monotonic()
        self._seconds[self.span] += now - self._since
        if self.span in STEP_SPANS:
            self.unfinished_seconds += now - self._since
        previous, self.span, self._since = self.span, span, now
        return previous

    def end_step(self) -> None:
        """Call at the end of each step. The first one belongs to the start-up."""
        self.enter(Span.OTHER)
        self.unfinished_seconds = 0.0
        self.num_steps += 1
        if self.num_steps == 1:
            for span in STEP_SPANS:
                self._seconds[Span.START_UP] += self._seconds[span]
                self._seconds[span] = 0.0

    def seconds(self) -> dict[Span, float]:
        """Seconds in each span until now."""
        self.enter(self.span)
        return self._seconds.copy()


# --- heartbeats -----------------------------------------------------------------------------------


class Heartbeat(StrictModel):
    """What a rank is doing."""

    rank: int
    host: str
    pid: int
    number: int
    """Counts the heartbeats of a process."""
    time: float
    """Wall clock, for people."""
    activity: str
    span: str
    collective: str | None
    """The collective in which the rank waits for others; None: it does its own work."""
    seconds: float
    """How long it has been in this collective or span."""
    stack: tuple[str, ...]
    """Innermost calls of its main thread: `txl_dist/training/loop.py:118 in _next_segment`."""

    @property
    def process(self) -> str:
        """`rank 1 (host a, pid 42)`."""
        return f"rank {self.rank} (host {self.host}, pid {self.pid})"

    @property
    def place(self) -> str:
        """`step 12, data wait`."""
        return self.activity if self.activity == self.span else f"{self.activity}, {self.span}"


def heartbeat_path(run: Path, rank: int) -> Path:
    """The file of a rank's heartbeat."""
    return run / ".heartbeats" / f"rank-{rank}.json"


def write_heartbeat(run: Path, beat: Heartbeat) -> None:
    """Replace a rank's heartbeat."""
    # On a full disk the others see a rank without a heartbeat.
    with contextlib.suppress(OSError):
        path = heartbeat_path(run, beat.rank)
        path.parent.mkdir(exist_ok=True)  # somebody may have cleaned up
        overwrite_page(path, beat.model_dump_json())


def remove_heartbeat(run: Path, rank: int) -> None:
    """Remove the heartbeat of a rank that has ended."""
    with contextlib.suppress(OSError):
        heartbeat_path(run, rank).unlink()


def _read(path: Path) -> Heartbeat | None:
    """Return a heartbeat; None if there is none, or it is being written."""
    try:
        return Heartbeat.model_validate_json(path.read_bytes())
    except (OSError, ValidationError):
        return None


def read_heartbeats(run: Path) -> dict[int, Heartbeat]:
    """Return the heartbeats of a run by rank."""
    beats = map(_read, sorted(run.glob(".heartbeats/rank-*.json")))
    return {beat.rank: beat for beat in beats if beat is not None}


class Peers:
    """The heartbeats of the other ranks, as a rank reads them that waits for these."""

    def __init__(self, run: Path, *, rank: int, num_ranks: int, beat_seconds: float) -> None:
        self._run, self._silent_seconds = run, SILENT_BEATS * beat_seconds
        readable = range(num_ranks if rank < NUM_READERS else NUM_READERS)
        self._others = [other for other in readable if other != rank]
        self._reader_activity, self._read_at = "", 0.0
        self._beats: dict[int, Heartbeat] = {}
        self._changed_at: dict[int, float] = {}
        """When this heartbeat of a rank was first read."""

    def read(self, activity: str) -> None:
        """Read the heartbeats during this rank's `activity`. Call again at intervals."""
        self._read_at, self._reader_activity = time.monotonic(), activity
        for rank in self._others:
            beat = _read(heartbeat_path(self._run, rank))
            if beat is not None and beat != self._beats.get(rank):
                self._beats[rank], self._changed_at[rank] = beat, self._read_at

    def describe(self, activity: str) -> str:
        """Name the ranks that do not respond, or else those that are not in a collective.

        Empty if there are none, or if nothing was read in this activity.
        """
        if activity != self._reader_activity:
            return ""
        lines = [
            f"rank {rank} has no heartbeat" for rank in self._others if rank not in self._beats
        ]
        for rank, beat in self._beats.items():
            silent_seconds = self._read_at - self._changed_at[rank]
            if silent_seconds > self._silent_seconds:
                lines.append(
                    f"{beat.process} has not responded for {silent_seconds:.0f} s (last in "
                    f"{beat.place})"
                )
        if not lines:  # ranks that work are a consequence of a rank that does not respond
            lines = [
                f"{beat.process} has been in {beat.place} for {beat.seconds:.0f} s"
                + (f": {', called by '.join(beat.stack)}" if beat.stack else "")
                for beat in self._beats.values()
                if beat.collective is None
            ]
        if len(lines) > MAX_NAMED:
            lines[MAX_NAMED:] = [f"and {counted(len(lines) - MAX_NAMED, 'more rank')}"]
        return "; ".join(lines)


class HangWatch:
    """Watches the heartbeats of ranks while the context is open; open it before they start.

    Files are read in a thread, because their file system may not respond.
    """

    def __init__(self, run: Path, *, poll_seconds: float = POLL_SECONDS) -> None:
        self._run, self._poll_seconds = run, poll_seconds
        self._beats: dict[int, Heartbeat] = {}
        self.silent_seconds = 0.0
        """Since the last change of any heartbeat, or since the start of the ranks."""
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="hang-watch", daemon=True)

    def __enter__(self) -> Self:
        for rank in read_heartbeats(self._run):  # of earlier processes
            remove_heartbeat(self._run, rank)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()

    def hang(self, *, timeout_seconds: float) -> str | None:
        """What is known about the ranks if all of them hang, else None."""
        has_begun = bool(self._beats)  # before the seconds: the thread sets them in the other order
        seconds = self.silent_seconds
        if not has_begun:
            is_late = seconds > START_SECONDS
            return f"no rank has begun within {START_SECONDS:.0f} s" if is_late else None
        if seconds <= timeout_seconds + MARGIN_SECONDS:
            return None
        last_seen = "; ".join(
            f"{beat.process} in {beat.place}" for _, beat in sorted(self._beats.items())
        )
        return (
            f"no rank has responded for {seconds:.0f} s (training.rank_timeout_seconds); last "
            f"seen: {last_seen}"
        )

    def _watch(self) -> None:
        while not self._closed.wait(self._poll_seconds):
            # Count polls instead of reading a clock, so that time spent suspended (Ctrl-Z) is not
            # blamed on the ranks.
            self.silent_seconds += self._poll_seconds
            beats = self._beats | read_heartbeats(self._run)
            if beats != self._beats:
                self.silent_seconds, self._beats = 0.0, beats
