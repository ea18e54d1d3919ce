"""LogFollower: passes on the lines that rank 0, another process, appends to its log."""

import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Self

POLL_SECONDS = 0.2
FIRST_BATCH = "first batch"
"""The line of rank 0 before its first step."""
RANK_IS_UP = "rank 0 is up"
"""The first line of rank 0, at each start."""
RESTART = "; restart"
"""In the line of the launcher that says why the ranks start again."""
_TIME_LEFT = re.compile(r" \| eta (\d+):(\d\d):(\d\d)")
_STEP = re.compile(r"^\S+ step (\d+) \| loss ")


class LogFollower:
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
        while not self._stop.wait(POLL_SECONDS):
            self.flush()


def step_of(line: str) -> int | None:
    """The step number of a step line; None for other lines."""
    match = _STEP.search(line)
    return int(match[1]) if match else None


def time_left(line: str) -> float | None:
    """The seconds until the end of the run that a step line expects."""
    match = _TIME_LEFT.search(line)
    return 3600.0 * int(match[1]) + 60 * int(match[2]) + int(match[3]) if match else None
