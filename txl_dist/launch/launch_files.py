"""What a launch shares with its ranks, and what it prints.

A launch is one start of a run by a person; all starts of its ranks belong to it. Launcher and ranks
communicate by files of the run directory, which every node sees: a stop signal may reach only the
launcher or one rank.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from data_pipeline.system.files import wait_for_lock
from txl_dist.events import parse_event
from txl_dist.launch.launcher import OnLine
from txl_dist.training.spec import RunDirectory

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


class _NewLines:
    """The lines that are appended to a file from now on."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._position = path.stat().st_size if path.exists() else 0
        self._incomplete = b""

    def read(self) -> list[str]:
        """The lines that were completed since the last call."""
        if not self._path.exists() or self._path.stat().st_size == self._position:
            return []
        with self._path.open("rb") as file:
            file.seek(self._position)
            appended = file.read()
        self._position += len(appended)
        *lines, self._incomplete = (self._incomplete + appended).split(b"\n")
        return [line.decode(errors="replace") for line in lines]


class LaunchOutput:
    """The lines of a launch, its own and those of rank 0's log, through `on_line`.

    Until the first step, a launch names its stages, and is never silent for long:

        starting 2 ranks            by the launcher
        rank 0 is up                by rank 0, which has imported its libraries
        all ranks are up: 2 ranks   the process group exists
        the model is built          with the optimizer
        first batch                 then the first step begins

    If no line was printed for STATUS_SECONDS, the launcher prints what it waits for.
    """

    def __init__(self, on_line: OnLine, directory: RunDirectory) -> None:
        self._on_line = on_line
        self._log = _NewLines(directory.log(0))
        self._events = _NewLines(directory.event_log.path)
        self._began = self._last_print = time.monotonic()
        self.has_stepped = False
        """Whether the running ranks have written a step line."""

    def begin_ranks(self) -> None:
        """The ranks start, for the first time or again."""
        self._began, self.has_stepped = time.monotonic(), False

    def follow(self) -> None:
        """Print what rank 0 has logged since the last call, and note how far the ranks are."""
        for line in self._log.read():
            self.print(line)
        for event in map(parse_event, self._events.read()):
            if event is not None and event.kind in ("start", "first_line"):
                self.has_stepped = event.kind == "first_line"

    def print_wait(self, waits_for: str) -> None:
        """Print what the launch waits for, if it was silent for too long."""
        now = time.monotonic()
        limit_seconds = max(STATUS_SECONDS, 0.25 * (now - self._began))
        if not self.has_stepped and now - self._last_print > limit_seconds:
            self.print(f"waiting {now - self._began:.0f} s for {waits_for}")

    def print(self, line: str) -> None:
        self._last_print = time.monotonic()
        try:
            self._on_line(line)
        except OSError:  # the terminal or the reader of a pipe is gone; training goes on
            self._on_line = lambda line: None
