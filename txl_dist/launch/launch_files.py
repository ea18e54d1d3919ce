"""What a launch shares with its ranks, and what it prints.

A launch is one start of a run by a person; all starts of its ranks belong to it. Launcher and ranks
communicate by files of the run directory, which every node sees: a stop signal may reach only the
launcher or one rank.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Self

from data_pipeline.system.files import wait_for_lock
from txl_dist.events import parse_event
from txl_dist.launch.launcher import OnLine

FOLLOW_SECONDS = 0.2
STATUS_SECONDS = 5.0
"""Before the first step line, a status line is printed after this time without output, or after a
quarter of the time since the start of the ranks, if that is longer."""


class LaunchFiles:
    """RUN/.launch-ID.*; removed when the launch ends."""

    def __init__(self, run: Path, launch_id: str) -> None:
        base = run.resolve() / f".launch-{launch_id}"
        self.stop = base.with_suffix(".stop")
        """Created by the launcher, or a rank that received a signal: the ranks save and stop."""
        self.saved = base.with_suffix(".saved")
        """Created by rank 0 when this launch has saved its first checkpoint."""
        self._launcher = base.with_suffix(".launcher")
        """Locked by the launcher as long as it runs."""

    @contextmanager
    def held(self) -> Iterator[None]:
        """For the launcher: hold its lock, and remove the files of this launch at the end.

        Other launches may live although no run uses the directory: their ranks start or restart.
        """
        with self._launcher.open("wb") as file:
            wait_for_lock(file.fileno(), timeout_seconds=1)  # `txl status` may be testing it
            try:
                yield
            finally:
                for path in (self.stop, self.saved, self._launcher):
                    path.unlink(missing_ok=True)


class FileFollower:
    """Calls `on_line` with every line appended to `path` while the context is open."""

    def __init__(self, path: Path, on_line: Callable[[str], None]) -> None:
        self._path, self._on_line = path, on_line
        self._position = path.stat().st_size if path.exists() else 0
        self._incomplete = b""
        self._read_lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._follow, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self.flush()

    def flush(self) -> None:
        """Pass on the lines that were written since the last poll."""
        with self._read_lock:
            if not self._path.exists():
                return
            with self._path.open("rb") as file:
                file.seek(self._position)
                appended = file.read()
            self._position += len(appended)
            *lines, self._incomplete = (self._incomplete + appended).split(b"\n")
            for line in lines:
                self._on_line(line.decode(errors="replace"))

    def _follow(self) -> None:
        while not self._stop.wait(FOLLOW_SECONDS):
            self.flush()


class LaunchOutput:
    """The lines of a launch, its own and those of rank 0's log, through `on_line`.

    Until the first step, a launch names its stages, and is never silent for long:

        starting 2 ranks            by the launcher    (on Ray: starting Ray, Ray is up after 9 s)
        rank 0 is up                by rank 0, which has imported its libraries
        all ranks are up: 2 ranks   the process group exists
        the model is built          with the optimizer
        first batch                 then the first step begins

    If no line was printed for STATUS_SECONDS, the launcher prints what it waits for.
    """

    def __init__(self, on_line: OnLine) -> None:
        self._on_line, self._lock = on_line, threading.Lock()
        self._began = self._last_print = time.monotonic()
        self.has_stepped = False
        """Whether the running ranks have written a step line."""

    def begin_ranks(self) -> None:
        """The ranks start, for the first time or again."""
        self._began, self.has_stepped = time.monotonic(), False

    def print_wait(self, waits_for: str) -> None:
        """Print what the launch waits for, if it was silent for too long."""
        now = time.monotonic()
        limit_seconds = max(STATUS_SECONDS, 0.25 * (now - self._began))
        if not self.has_stepped and now - self._last_print > limit_seconds:
            self.print(f"waiting {now - self._began:.0f} s for {waits_for}")

    def print(self, line: str) -> None:
        with self._lock:  # the log of rank 0 is followed in another thread
            self._last_print = time.monotonic()
            try:
                self._on_line(line)
            except OSError:  # the terminal or the reader of a pipe is gone; training goes on
                self._on_line = lambda line: None

    def take_event(self, line: str) -> None:
        """A line of events.jsonl: how far the running ranks are."""
        event = parse_event(line)
        if event is not None and event.kind in ("start", "first_line"):
            self.has_stepped = event.kind == "first_line"
