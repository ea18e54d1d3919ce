"""RunDirectory: the files of one run, who may write there, and how a run is told to stop."""

import fcntl
import json
import os
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from txl_dist.checkpoint.directory import CheckpointDirectory
from txl_dist.errors import ConfigError, TxlError


class RunDirectory:
    """RUN/config.yaml, metrics.jsonl, logs/, checkpoints/, LATEST, BEST."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "config.yaml"
        self.metrics = path / "metrics.jsonl"
        self.logs = path / "logs"
        self.checkpoints = CheckpointDirectory(path)

    def log(self, rank: int) -> Path:
        return self.logs / f"rank-{rank}.log"

    def create(self) -> None:
        """Make the directories. Raises ConfigError now rather than at the first checkpoint."""
        try:
            self.logs.mkdir(parents=True, exist_ok=True)
            probe = self.path / f".writable-{os.getpid()}"
            probe.touch()
            probe.unlink()
        except OSError as error:
            raise ConfigError(
                f"directory {self.path}: a run cannot be written there ({error.strerror}). Choose "
                "another with directory=PATH, or change its permissions"
            ) from None

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the directory against a second run. The kernel lets go when this process dies."""
        descriptor = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT, 0o644)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                owner = os.pread(descriptor, 200, 0).decode(errors="replace").strip()
                raise ConfigError(
                    f"{self.path} is in use by another run ({owner or 'unknown'}). Wait for it to "
                    "end or stop that process, then run the same command again"
                ) from None
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"host {socket.gethostname()}, pid {os.getpid()}\n".encode(), 0)
            yield
        finally:
            os.close(descriptor)

    # --- how a failed rank tells the launcher why -----------------------------------------------

    def _failure(self, rank: int) -> Path:
        return self.logs / f"rank-{rank}.failure.json"

    def clear_failures(self) -> None:
        for path in self.logs.glob("rank-*.failure.json"):
            path.unlink(missing_ok=True)

    def record_failure(self, rank: int, error: TxlError) -> None:
        content = {
            "type": type(error).__name__,
            "exit_code": error.exit_code,
            "message": str(error),
        }
        self._failure(rank).write_text(json.dumps(content))

    def failure(self) -> TxlError | None:
        """The error of the lowest rank that recorded one, as an exception to raise."""
        for path in sorted(self.logs.glob("rank-*.failure.json")):
            content = json.loads(path.read_text())
            error = type(content["type"], (TxlError,), {"exit_code": content["exit_code"]})
            return error(content["message"])
        return None


class StopRequest:
    """Becomes true on SIGTERM or SIGINT to this process, or when `stop_file` appears.

    Signals can be caught in the main thread only; under Ray the launcher writes the file instead.
    """

    def __init__(self, stop_file: Path | None) -> None:
        self._stop_file = stop_file
        self._signalled = False
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._signalled:
            # Asked twice: end at once; the previous checkpoint is whole.
            os._exit(75)
        self._signalled = True

    def __bool__(self) -> bool:
        return self._signalled or (self._stop_file is not None and self._stop_file.exists())
