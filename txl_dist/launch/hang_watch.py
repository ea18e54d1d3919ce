"""HangWatch: notices when none of a launch's ranks changes its heartbeat any more.

A rank that waits for others in a collective names those that hang (`collective_watch.py`). Nobody
waits for the only rank of a run, or if all ranks hang at the same time, so the launcher watches.
Heartbeats are files (`heartbeat.py`), read in a thread: their file system may not respond.
"""

import threading
import time
from pathlib import Path
from typing import Self

from txl_dist.runtime.heartbeat import Heartbeat, HeartbeatFiles

POLL_SECONDS = 2.0
MARGIN_SECONDS = 10.0
"""A launcher gives ranks this much longer than `training.rank_timeout_seconds`: ranks that wait for
others know more about them."""


class HangWatch:
    """Watches the heartbeats of ranks while the context is open."""

    def __init__(self, run: Path, *, num_ranks: int, poll_seconds: float = POLL_SECONDS) -> None:
        self._files = HeartbeatFiles(run, rank=0)
        self._num_ranks, self._poll_seconds = num_ranks, poll_seconds
        self._begin = time.time()
        self._beats: dict[int, Heartbeat] = {}
        self.silent_seconds = 0.0
        """Since the last change of any heartbeat; 0 before the first one."""
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="hang-watch", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()

    def describe(self) -> str:
        """What the ranks did last."""
        return "; ".join(
            f"{beat.process} in {beat.place}" for _, beat in sorted(self._beats.items())
        )

    def _watch(self) -> None:
        while not self._closed.wait(self._poll_seconds):
            # Counted, not measured: while this process is suspended, nothing is known.
            self.silent_seconds += self._poll_seconds if self._beats else 0.0
            for rank in range(self._num_ranks):
                beat, known = self._files.read(rank), self._beats.get(rank)
                if beat is None or beat.time < self._begin:  # of an earlier process
                    continue
                if known is None or (known.pid, known.number) != (beat.pid, beat.number):
                    self._beats[rank], self.silent_seconds = beat, 0.0
