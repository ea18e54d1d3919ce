"""HangWatch: notices when none of a launch's ranks changes its heartbeat any more, or has one.

A rank that waits for others in a collective names those that hang (`collective_watch.py`). Nobody
waits for the only rank of a run, or if all ranks hang at the same time, so the launcher watches.
Heartbeats are files (`heartbeat.py`), read in a thread: their file system may not respond.
"""

import threading
from pathlib import Path
from typing import Self

from txl_dist.runtime.heartbeat import Heartbeat, HeartbeatFiles

POLL_SECONDS = 2.0
MARGIN_SECONDS = 10.0
"""A launcher gives ranks this much longer than `training.rank_timeout_seconds`: ranks that wait for
others know more about them."""
START_SECONDS = 600.0
"""Time limit for the first heartbeat of any rank. Imports from a busy file server take minutes."""


class HangWatch:
    """Watches the heartbeats of ranks while the context is open; open it before they start."""

    def __init__(self, run: Path, *, num_ranks: int, poll_seconds: float = POLL_SECONDS) -> None:
        self._files = HeartbeatFiles(run, rank=0)
        self._num_ranks, self._poll_seconds = num_ranks, poll_seconds
        self._beats: dict[int, Heartbeat] = {}
        self.silent_seconds = 0.0
        """Since the last change of any heartbeat, or since the start of the ranks."""
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="hang-watch", daemon=True)

    def __enter__(self) -> Self:
        self._files.remove_all()
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
            # Counted, not measured: while this process is suspended, nothing is known.
            self.silent_seconds += self._poll_seconds
            for rank in range(self._num_ranks):
                beat, known = self._files.read(rank), self._beats.get(rank)
                if beat is None:
                    continue
                if known is None or (known.pid, known.number) != (beat.pid, beat.number):
                    self.silent_seconds = 0.0
                    self._beats[rank] = beat
