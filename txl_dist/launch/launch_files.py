"""What a launch shares with its ranks, and what it prints.

A launch is one start of a run by a person; all starts of its ranks belong to it. Launcher and ranks
communicate by files of the run directory, which every node sees: a stop signal may reach only the
launcher or one rank, and a rank that died cannot report anything.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Self

from data_pipeline.system.files import try_lock, wait_for_lock, write_file
from txl_dist.errors import TxlError, error_from_json, error_to_json
from txl_dist.events import parse_event
from txl_dist.launch.group import OnLine

FOLLOW_SECONDS = 0.2
STATUS_SECONDS = 4.0
"""Before the first batch, a status line is printed after this time without output."""
TRAINING_SECONDS = 30.0
"""The same between the first batch and the first step line, which may come after many steps."""


class LaunchFiles:
    """RUN/.launch-ID.*; removed when the launch ends, or after it died by the next launch."""

    def __init__(self, run: Path, launch_id: str) -> None:
        self._base = run.resolve() / f".launch-{launch_id}"
        self.stop = self._base.with_suffix(".stop")
        """Created by the launcher, or a rank that received a signal: the ranks save and stop."""
        self.saved = self._base.with_suffix(".saved")
        """Created by rank 0 when this launch has saved its first checkpoint."""
        self._launcher = self._base.with_suffix(".launcher")
        """Locked by the launcher as long as it runs."""

    @contextmanager
    def held(self) -> Iterator[None]:
        """For the launcher: remove the files of dead launches now, and its own at the end.

        Another launch may live although no run uses the directory: its ranks start or restart.
        """
        with self._launcher.open("wb") as file:
            wait_for_lock(file.fileno(), timeout_seconds=1)  # another launcher may be testing it
            for path in self._base.parent.glob(".launch-*.launcher"):
                with suppress(FileNotFoundError), path.open("r+b") as other:  # it may just end
                    if try_lock(other.fileno(), if_unsupported=False):
                        self._remove(f"{path.stem}.*")
            try:
                yield
            finally:
                self._remove(f"{self._base.name}.*")

    def _remove(self, pattern: str) -> None:
        # ..launch-*: temporary files of killed ranks (system/files.py).
        for name in (pattern, f".{pattern}.tmp"):
            for path in self._base.parent.glob(name):
                path.unlink(missing_ok=True)

    def reset(self) -> None:
        """Remove stop request and errors of ranks that have ended; others will start."""
        self._remove(f"{self._base.name}.stop")
        self._remove(f"{self._base.name}.error-*")

    def write_error(self, rank: int, error: TxlError) -> None:
        """Called by a rank that has no pipe to the launcher, right before its process ends."""
        write_file(self._base.with_suffix(f".error-{rank}"), error_to_json(error))

    def error(self, rank: int) -> TxlError | None:
        """What the rank has written."""
        path = self._base.with_suffix(f".error-{rank}")
        return error_from_json(path.read_bytes()) if path.exists() else None


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

    If no line was printed for STATUS_SECONDS, the launcher prints what it waits for; after the
    first batch, for TRAINING_SECONDS.
    """

    def __init__(self, on_line: OnLine) -> None:
        self._on_line, self._lock = on_line, threading.Lock()
        self._began = self._last_print = time.monotonic()
        self.has_stepped = False
        """Whether the running ranks have written a step line."""
        self._is_training = False
        """Whether the first step of the running ranks has begun."""
        self.waits_for = "the ranks to start"
        """What a start waits for until its ranks are up."""

    @property
    def status_is_due(self) -> bool:
        """Whether the launch was silent for too long."""
        limit_seconds = TRAINING_SECONDS if self._is_training else STATUS_SECONDS
        return not self.has_stepped and time.monotonic() - self._last_print > limit_seconds

    def begin_ranks(self) -> None:
        """The ranks start, for the first time or again."""
        self._began = time.monotonic()
        self.has_stepped = self._is_training = False

    def print_wait(self, *, are_up: bool) -> None:
        """Print what the ranks do before their first step line."""
        seconds = f"{time.monotonic() - self._began:.0f} s"
        if not are_up:
            self.print(f"waiting {seconds} for {self.waits_for}")
        elif self._is_training:
            self.print(f"training for {seconds} until the first step line")
        else:
            self.print(
                f"still starting ({seconds}): the ranks import torch and DeepSpeed, then they load "
                "data and model"
            )

    def print(self, line: str) -> None:
        with self._lock:  # the log of rank 0 is followed in another thread
            self._last_print = time.monotonic()
            try:
                self._on_line(line)
            except OSError:  # the terminal or the reader of a pipe is gone; training goes on
                self._on_line = lambda line: None

    def take_event(self, line: str) -> None:
        """A line of events.jsonl: how far the running ranks are."""
        if (event := parse_event(line)) is None:
            return
        if event.kind == "start":
            self.has_stepped = self._is_training = False
        self._is_training |= event.kind == "first_batch"
        self.has_stepped |= event.kind == "first_line"
