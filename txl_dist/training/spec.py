"""What a run is given, where it is stored, and whether it lives; without torch.

On one host a lock allows one process. Between hosts, each attempt is recorded with a number, and
only the newest attempt may change checkpoints (`txl_dist/checkpoint/attempts.py`).
"""

import errno
import logging
import os
import socket
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from data_pipeline.errors import printable
from data_pipeline.system.files import is_locked, try_lock, wait_for_lock
from data_pipeline.system.path_kind import PathKind, kind_of
from data_pipeline.system.remote_path import RemotePath
from txl_dist.checkpoint.attempts import (
    FOLDER,
    Attempt,
    AttemptRecord,
    newest_number,
    newest_record,
)
from txl_dist.checkpoint.copies import CheckpointCopies
from txl_dist.checkpoint.directory import CheckpointDirectory
from txl_dist.config.data_config import PathText
from txl_dist.config.run_config import RunConfig
from txl_dist.errors import ConfigError
from txl_dist.events import EVENTS, EventLog
from txl_dist.runtime.waiting import BEAT_SECONDS, SILENT_BEATS, read_heartbeats

if TYPE_CHECKING:
    from txl_dist.runtime.world import World

log = logging.getLogger(__name__)

SILENT_SECONDS = BEAT_SECONDS * SILENT_BEATS
"""A run whose heartbeats do not change for so long has no living rank."""
POLL_SECONDS = 0.5  # between two looks at heartbeats
SECONDS_TO_END = 5.0
"""Time for the ranks of a killed launcher to end and release the lock."""
LEASE_SECONDS = 180.0
"""File servers keep the locks of a lost host for so long at most: NFS 4 for 90 s, Lustre 150 s."""
PROBE_BYTES = 64 * 1024
"""More than the config, the pointers and the first lines of the logs."""


class TrainSpec(BaseModel):
    """Everything a rank needs to take part in a run; sent as JSON, equal on all ranks."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    config: RunConfig
    resume: PathText = "auto"
    """auto: resume from the newest intact checkpoint of the run directory, if there is one.
    never: refuse a directory that has checkpoints. Otherwise the path of a checkpoint; the same
    spec then continues from its own checkpoints."""
    allow_change: tuple[str, ...] = ()
    allow_data_change: bool = False
    strict: bool = False
    """Do not fall back to an older checkpoint when the newest is damaged."""
    force_unlock: bool = False
    """Start although another run holds the lock of the directory; that run is lost, or stops."""
    launch_id: str = Field(default_factory=lambda: uuid.uuid4().hex[:12])
    """Identifies this start of the run. The supervisor's restarts of ranks keep the id."""
    saved_file: str | None = None
    """Appears once this launch has saved a checkpoint; a restart then resumes from the newest."""
    stop_file: str | None = None
    """When this file appears, the ranks save and exit with code 75."""

    @model_validator(mode="after")
    def _require_paths_of_text(self) -> Self:
        """Ranks get the spec as JSON, which has no bytes that are not UTF-8."""
        paths = {"directory=": self.run_path}
        if self.resume not in ("auto", "never"):
            paths["--resume "] = Path(self.resume)
        for option, path in paths.items():
            absolute = str(path.absolute())
            try:
                absolute.encode()
            except UnicodeEncodeError:
                raise ConfigError(
                    f"{option}{printable(absolute)}: this path is not UTF-8, which ranks and the "
                    "files of a run need. Probably another system or an archive named a folder of "
                    f"it. Rename that folder (mv), or give another absolute path: {option}PATH"
                ) from None
        return self

    @property
    def run_path(self) -> Path:
        return self.config.run_path

    def lock_of(
        self,
        directory: "RunDirectory",
        *,
        timeout_seconds: float,
        lease_seconds: float = LEASE_SECONDS,
    ) -> AbstractContextManager[None]:
        """The lock of the run directory. See `RunDirectory.locked`."""
        force = "by --force-unlock" if self.force_unlock else ""
        if force:
            timeout_seconds = min(timeout_seconds, SECONDS_TO_END)
        return directory.locked(
            timeout_seconds=timeout_seconds,
            lease_seconds=lease_seconds,
            force=force,
            launch_id=self.launch_id,
        )

    def to_json(self) -> str:
        return self.model_dump_json()

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """A spec that another process has sent. Raises ConfigError if it is invalid."""
        try:
            return cls.model_validate_json(text)
        except ValueError as error:
            raise ConfigError(f"not a TrainSpec: {error}") from None


class RunDirectory:
    """RUN/config.yaml, metrics.jsonl, events.jsonl, logs/, events/, checkpoints/, LATEST, BEST,
    attempts/.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "config.yaml"
        self.metrics = path / "metrics.jsonl"
        self.logs = path / "logs"
        self.events = path / "events"  # files about steps that have diverged
        self.checkpoints = CheckpointDirectory(path)
        self.event_log = EventLog(path / EVENTS, self._attempt_number)

    def log(self, rank: int) -> Path:
        return self.logs / f"rank-{rank}.log"

    def _attempt_number(self) -> int:
        attempt = self.checkpoints.attempt
        return attempt.record.number if attempt else newest_number(self.path / FOLDER)

    def require_usable(self) -> None:
        """Raises ConfigError for the place of other files or without permission. Writes nothing."""
        is_run = self.checkpoints.path.exists()
        if not is_run and (kind := kind_of(self.path)) in (PathKind.DATASET, PathKind.CHECKPOINT):
            raise ConfigError(
                f"directory {self.path} is {kind}: the files of a run would lie between its files. "
                "Choose another with directory=PATH"
            )
        existing = next(path for path in (self.path, *self.path.parents) if path.exists())
        if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
            is_read_only = os.statvfs(existing).f_flag & os.ST_RDONLY
            refused = errno.EROFS if is_read_only else errno.EACCES
            code = refused if existing.is_dir() else errno.ENOTDIR
            raise self._unusable(OSError(code, os.strerror(code)))

    def create(self) -> None:
        """Create the directories. Raises ConfigError if files cannot be written in them."""
        self.require_usable()
        try:
            self.logs.mkdir(parents=True, exist_ok=True)
            # Not a process number: ranks in containers have the same ones.
            probe = self.path / f".writable-{uuid.uuid4().hex}"
            try:
                probe.write_bytes(b"\0" * PROBE_BYTES)  # an empty file fits on a full disk
            finally:
                probe.unlink(missing_ok=True)
        except OSError as error:
            raise self._unusable(error) from None

    def _unusable(self, error: OSError) -> ConfigError:
        return ConfigError(
            f"directory {self.path}: a run cannot be written there ({error.strerror}). Choose "
            "another with directory=PATH, free some space, or change its permissions"
        )

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
    def locked(
        self,
        *,
        timeout_seconds: float = 0.0,
        lease_seconds: float = 0.0,
        force: str = "",
        launch_id: str = "",
    ) -> Iterator[None]:
        """Hold the lock of the directory. The kernel releases it when this process ends.

        A file server may keep the lock of a host that is lost, cut off or suspended. So if the
        owner is on another host and its run shows no life, this waits `lease_seconds` after
        `timeout_seconds`. If the same launch has started the owner, which it has given up, or if
        `force` gives a reason, the context begins without the lock. A thread then takes the lock
        when it is released. An owner that still runs stops at its next checkpoint, because it is
        an older attempt (`attempts.py`).

        Raises ConfigError naming the owner if the lock is not released in time.
        """
        # Not truncated while opening: the file names the owner if the lock is taken.
        descriptor = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT, 0o644)
        ended = threading.Event()
        arguments = (descriptor, launch_id, ended)
        late = threading.Thread(target=self._lock_late, args=arguments, daemon=True)
        try:
            is_free = wait_for_lock(descriptor, timeout_seconds=timeout_seconds)
            owner = os.pread(descriptor, 400, 0).decode(errors="replace").strip()
            if launch_id and owner.endswith(f", launch {launch_id}"):
                force = force or "because the same command has started that process"
            is_here = f", boot {_boot_id()}," in owner
            owner = owner.partition(", boot ")[0]
            if lease_seconds and not (is_free or force or is_here):
                is_free = self._wait_for_lease(descriptor, lease_seconds, owner)
            if not (is_free or force):
                raise ConfigError(
                    f"{self.path} is in use by another run ({owner or 'unknown'}). Wait until "
                    "it has ended or stop that process, then run the same command again. If "
                    "it is lost on a host that does not respond: --force-unlock"
                )
            if is_free:
                _write_owner(descriptor, launch_id)
            else:
                log.warning("%s is in use (%s); continued %s", self.path, owner, force)
                late.start()
            yield
        finally:
            ended.set()
            if late.ident is not None:
                late.join()
            os.close(descriptor)

    def _wait_for_lease(self, descriptor: int, seconds: float, owner: str) -> bool:
        """Whether the lock of another host is released, unless its run lives."""
        log.warning(
            "%s is in use (%s); waiting for up to %.0f s, because a file server keeps the lock of "
            "a lost host for some time", self.path, owner, seconds,
        )  # fmt: skip
        beats, deadline = read_heartbeats(self.path), time.monotonic() + seconds
        while time.monotonic() < deadline and read_heartbeats(self.path) == beats:
            if wait_for_lock(descriptor, timeout_seconds=min(BEAT_SECONDS, seconds)):
                return True
        return False

    def _lock_late(self, descriptor: int, launch_id: str, ended: threading.Event) -> None:
        while not ended.wait(POLL_SECONDS):
            if try_lock(descriptor):
                _write_owner(descriptor, launch_id)
                return


def _write_owner(descriptor: int, launch_id: str) -> None:
    started = datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    place = f"host {socket.gethostname()}, pid {os.getpid()}, since {started}"
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"{place}, boot {_boot_id()}, launch {launch_id}\n".encode(), 0)


def _boot_id() -> str:
    """Of this start of this machine: containers on different machines may have one host name."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()[:8]
    return socket.gethostname()


class LaunchFiles:
    """RUN/.launch-ID.*, by which a launcher and its ranks communicate; removed when it ends.

    A launch is one start of a run by a person; all starts of its ranks belong to it. Files, because
    a stop signal may reach only the launcher or one rank, and every node sees the run directory.
    """

    def __init__(self, run: Path, launch_id: str) -> None:
        # Not resolved: a link of this host may lead elsewhere on those of the ranks.
        base = run.absolute() / f".launch-{launch_id}"
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


def live_runs(runs: Sequence[Path]) -> set[Path]:
    """Those that a launcher or a rank works on, also while ranks are restarted.

    They hold locks, as far as locks are seen from here. Otherwise a heartbeat changes, on any host:
    that takes up to SILENT_SECONDS. Clocks of hosts are not compared (decision 20).
    """
    locks = {run: (*run.glob(".launch-*.launcher"), run / "lock") for run in runs}
    alive = {run for run in runs if any(is_locked(path) for path in locks[run])}
    # Processes of this host are looked up, so that dead ones are not waited for.
    here = socket.gethostname()
    first = {run: read_heartbeats(run) for run in runs if run not in alive}
    waiting = {
        run
        for run, beats in first.items()
        if any(beat.host != here or Path(f"/proc/{beat.pid}").exists() for beat in beats.values())
    }
    deadline = time.monotonic() + SILENT_SECONDS
    while waiting and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
        for run in [*waiting]:
            beats = read_heartbeats(run)
            if any(beat != first[run].get(rank) for rank, beat in beats.items()):
                waiting.remove(run)
                alive.add(run)
    return alive


def begin_attempt(
    spec: TrainSpec, directory: RunDirectory, world: "World", *, run_id: str
) -> Attempt:
    """Record the next attempt in the run directory, which ends older ones. Collective.

    The attempt is recorded at `training.checkpoint_url` later, by `Uploader.open`: until then this
    start may be refused. Raises StoreError if the URL cannot be read, except at a restart by the
    same launch, and ConfigError if it has checkpoints of another run.
    """

    def begin() -> Attempt:
        folder = directory.path / FOLDER
        previous = newest_record(folder, launch_id=spec.launch_id)
        numbers = [newest_number(folder)]
        if (manifest := directory.checkpoints.newest_manifest()) is not None:
            numbers.append(manifest.attempt)
        if url := spec.config.training.checkpoint_url:
            copies = CheckpointCopies(RemotePath(url))
            try:
                copies.require_run(run_id)
                numbers.append(newest_number(copies.url / FOLDER))
            except OSError as error:
                # At a restart, an attempt elsewhere is found when this one is recorded at the URL.
                if previous is None:
                    raise copies.unreachable(error) from error
        number, launch_id = 1 + max(numbers), spec.launch_id
        record = AttemptRecord.of_this_process(number=number, launch_id=launch_id)
        attempt = Attempt(record, folder, previous)
        attempt.add()
        log.info("%s", record)
        return attempt

    attempt = world.run_on_all(lambda: begin() if world.is_rank_zero else None)[0]
    assert attempt is not None
    return attempt
