"""What a launch prints: its own lines and those of rank 0's log, and when it was silent too long.

Until the first step, a launch names its stages:

    starting 2 ranks            by the launcher
    rank 0 is up                by rank 0, which has imported its libraries
    all ranks are up: 2 ranks   the process group exists
    the model is built          with the optimizer
    first batch                 then the first step begins
"""

import time
from contextlib import suppress
from pathlib import Path

from txl_dist.events import parse_event
from txl_dist.launch.rank_group import OnLine
from txl_dist.training.spec import RunDirectory

STATUS_SECONDS = 5.0
"""Before the first step line, a status line is printed after this time without output, or after a
quarter of the time since the start of the ranks, if that is longer."""


class LaunchOutput:
    """The lines of a launch, its own and those of rank 0's log, in the order of their arrival."""

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
        except OSError:  # the terminal or the reader of the pipe is gone; training continues
            self._on_line = lambda line: None


class _NewLines:
    """The lines that are completed in a file from now on."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._position = path.stat().st_size if path.exists() else 0

    def read(self) -> list[str]:
        # Also of a file server that fails for a moment: the ranks train on.
        with suppress(OSError):
            if self._path.exists() and self._path.stat().st_size != self._position:
                with self._path.open("rb") as file:
                    file.seek(self._position)
                    *lines, incomplete = file.read().split(b"\n")
                    self._position = file.tell() - len(incomplete)
                return [line.decode(errors="replace") for line in lines]
        return []
