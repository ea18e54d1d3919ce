"""Heartbeats: small files through which ranks and launcher see what each rank is doing.

    RUN/.heartbeats/rank-N.json       rewritten every few seconds by rank N (`Heartbeat`)

The ranks read each other's (`Peers`; `waiting.py` decides what follows). Nobody waits for the only
rank of a run, or if all ranks hang at the same time: so the launcher reads them too (`HangWatch`).

Files, because a rank that waits in a collective cannot use another collective, and every rank sees
the run directory. Readers decide by the number of a heartbeat, which changes as long as the rank
lives, and by their own monotonic clock; clocks of different hosts are never compared.
"""

import contextlib
import threading
import time
from collections.abc import Sequence
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
    def identity(self) -> tuple[int, int]:
        """Differs from that of the heartbeat before, as long as the rank lives."""
        return self.pid, self.number

    @property
    def process(self) -> str:
        """`rank 1 (host a, pid 42)`."""
        return f"rank {self.rank} (host {self.host}, pid {self.pid})"

    @property
    def place(self) -> str:
        """`step 12, data wait`."""
        return self.activity if self.activity == self.span else f"{self.activity}, {self.span}"


class HeartbeatFile:
    """The heartbeat of one rank, as it writes it. An OSError never reaches the caller."""

    def __init__(self, run: Path, *, rank: int) -> None:
        self._path = _path(run, rank)

    def write(self, beat: Heartbeat) -> None:
        """Replace this rank's heartbeat."""
        # On a full disk the others see a rank without a heartbeat.
        with contextlib.suppress(OSError):
            self._path.parent.mkdir(exist_ok=True)  # somebody may have cleaned up
            overwrite_page(self._path, beat.model_dump_json())

    def remove(self) -> None:
        """Remove this rank's heartbeat, because it ends."""
        with contextlib.suppress(OSError):
            self._path.unlink()


def _path(run: Path, rank: int) -> Path:
    return run / ".heartbeats" / f"rank-{rank}.json"


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
            beat, known = _read(_path(self._run, rank)), self._beats.get(rank)
            if beat is not None and (known is None or known.identity != beat.identity):
                self._beats[rank], self._changed_at[rank] = beat, self._read_at

    def describe(self, activity: str) -> str:
        """Name the ranks that are not in a collective, and what they do.

        Ranks without a changed heartbeat come first. Empty if nothing was read in this activity.
        """
        if activity != self._reader_activity:
            return ""
        silent = {rank: self._read_at - at for rank, at in self._changed_at.items()}
        missing = [rank for rank in self._others if rank not in self._beats]
        lines = [f"rank {rank} has no heartbeat" for rank in missing]
        lines += [
            f"{self._beats[rank].process} has not responded for {seconds:.0f} s (last in "
            f"{self._beats[rank].place})"
            for rank, seconds in silent.items()
            if seconds > self._silent_seconds
        ]
        if not lines:  # ranks that work are a consequence of a rank that does not respond
            lines = [
                f"{beat.process} has been in {beat.place} for {beat.seconds:.0f} s"
                + (f": {', called by '.join(beat.stack)}" if beat.stack else "")
                for beat in self._beats.values()
                if beat.collective is None
            ]
        if not lines and self._beats:
            waits = [
                f"rank {beat.rank} in {beat.collective} ({beat.place})"
                for beat in self._beats.values()
            ]
            return (
                f"all ranks that were read also wait: {_join(waits)}. The network between them may "
                "be cut, or another rank hangs"
            )
        return _join(lines)


def _join(lines: Sequence[str]) -> str:
    others = len(lines) - MAX_NAMED
    more = f"; and {counted(others, 'more rank')}" if others > 0 else ""
    return "; ".join(lines[:MAX_NAMED]) + more


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
            HeartbeatFile(self._run, rank=rank).remove()
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
            for rank, beat in read_heartbeats(self._run).items():
                known = self._beats.get(rank)
                if known is None or known.identity != beat.identity:
                    self.silent_seconds = 0.0
                    self._beats[rank] = beat
