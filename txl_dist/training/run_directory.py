"""RunDirectory: the files of one run, and the lock that allows one process to write them."""

import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

from data_pipeline.system.files import wait_for_lock
from txl_dist.checkpoint.directory import CheckpointDirectory
from txl_dist.errors import ConfigError

log = logging.getLogger(__name__)

SECONDS_TO_END = 5.0
"""Time for the ranks of a killed launcher to end and release the lock."""
PROBE_BYTES = 64 * 1024
"""More than the config, the pointers and the first lines of the logs."""


class RunDirectory:
    """RUN/config.yaml, metrics.jsonl, goodput.json, logs/, events/, checkpoints/, LATEST, BEST,
    attempts/.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "config.yaml"
        self.metrics = path / "metrics.jsonl"
        self.goodput = path / "goodput.json"
        self.logs = path / "logs"
        self.events = path / "events"
        self.checkpoints = CheckpointDirectory(path)

    def log(self, rank: int) -> Path:
        """The log file of a rank."""
        return self.logs / f"rank-{rank}.log"

    def create(self) -> None:
        """Create the directories. Raises ConfigError if files cannot be written in them."""
        try:
            self.logs.mkdir(parents=True, exist_ok=True)
            probe = self.path / f".writable-{os.getpid()}"
            try:
                probe.write_bytes(b"\0" * PROBE_BYTES)  # an empty file fits on a full disk
            finally:
                probe.unlink(missing_ok=True)
        except OSError as error:
            raise ConfigError(
                f"directory {self.path}: a run cannot be written there ({error.strerror}). Choose "
                "another with directory=PATH, free some space, or change its permissions"
            ) from None

    @property
    def stop_file(self) -> Path:
        """Tells the ranks of this attempt of a stop request, if no launcher has a file for that."""
        attempt = self.checkpoints.attempt
        assert attempt is not None
        return self.path / f".stop-{attempt.record.id}"

    def remove_stop_files(self) -> None:
        """Remove those of killed processes. Only with the lock."""
        for path in self.path.glob(".stop-*"):
            path.unlink(missing_ok=True)

    @contextmanager
    def locked(self, *, timeout_seconds: float = 0.0, force: bool = False) -> Iterator[None]:
        """Hold the lock of the directory. The kernel releases it when this process ends.

        Raises ConfigError naming the owner if it is not released within `timeout_seconds`. With
        `force` it waits SECONDS_TO_END at most and goes on without the lock: the owner, if it is
        still running, stops at its next checkpoint, because it is an older attempt (`attempts.py`).
        """
        if force:
            timeout_seconds = min(timeout_seconds, SECONDS_TO_END)
        # Not truncated while opening: the file names the owner if the lock is taken.
        descriptor = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT, 0o644)
        try:
            if not wait_for_lock(descriptor, timeout_seconds=timeout_seconds):
                owner = os.pread(descriptor, 200, 0).decode(errors="replace").strip()
                if not force:
                    raise ConfigError(
                        f"{self.path} is in use by another run ({owner or 'unknown'}). Wait until "
                        "it has ended or stop that process, then run the same command again. If "
                        "it is lost on a host that does not respond: --force-unlock"
                    )
                log.warning("%s is in use (%s); continued by --force-unlock", self.path, owner)
                yield
                return
            started = datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
            owner = f"host {socket.gethostname()}, pid {os.getpid()}, since {started}\n"
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, owner.encode(), 0)
            yield
        finally:
            os.close(descriptor)
