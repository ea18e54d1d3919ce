"""Attempts of a run, of which only the newest may change its checkpoints (fencing).

A lock of the run directory excludes a second process on one host only. Two attempts can run at the
same time on two hosts: a job that a scheduler starts again before the first one has ended, a host
that was cut off and is back, a network file system without locks, two directories with copies at
one URL. So each time the ranks are started, they record an attempt with the next number:

    RUN/attempts/attempt-00000003.8c5ea1b2.json   number and random id; content: who, where, when
    URL/attempts/...                              the same file, with `training.checkpoint_url`

The newest attempt is the one with the highest number, and among equal numbers (two starts at the
same time) the one with the highest id; the files of the others are for people. All processes that
list the folder agree on it, so the storage needs no locks and no conditional writes. An attempt
that finds a newer one stops with a FencedError. The manifest of a checkpoint has the number of the
attempt that wrote it.

A check and the rename after it are not one operation. An attempt that is suspended between the two
can publish one more checkpoint; `CheckpointDirectory` checks right before each change. NFS shows
new files to other hosts with a delay (`acdirmax`, by default 60 seconds).
"""

import os
import re
import secrets
import socket
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from pydantic import Field

from data_pipeline.errors import printable
from data_pipeline.system.files import write_file
from data_pipeline.system.remote_path import DatasetPath
from data_pipeline.system.strict import StrictModel
from txl_dist.errors import FencedError

FOLDER = "attempts"
_NAME = re.compile(r"attempt-(\d{8,})\.([0-9a-f]{8})\.json")


class AttemptRecord(StrictModel):
    """The content of a file in the folder of attempts."""

    number: int = Field(ge=1)
    id: str = Field(pattern=r"^[0-9a-f]{8}\z")
    host: str
    pid: int
    """Process id of rank 0."""
    started: str
    """UTC, for people: `2026-11-22 11:15:03`."""
    launch_id: str
    """`TrainSpec.launch_id`: all attempts that one `txl train` command starts are of one launch."""

    @classmethod
    def of_this_process(cls, *, number: int, launch_id: str) -> "AttemptRecord":
        return cls(
            number=number,
            id=secrets.token_hex(4),
            host=socket.gethostname(),
            pid=os.getpid(),
            started=datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S"),
            launch_id=launch_id,
        )

    @property
    def file_name(self) -> str:
        return f"attempt-{self.number:08d}.{self.id}.json"

    def __str__(self) -> str:
        process = f"host {printable(self.host)}, pid {self.pid}"
        return f"attempt {self.number} ({process}, started {printable(self.started)} UTC)"


@dataclass(frozen=True, slots=True)
class Attempt:
    """This attempt, in one folder of attempts."""

    record: AttemptRecord
    folder: DatasetPath
    previous: AttemptRecord | None = None
    """The previous attempt in this run directory, if it was of the same launch."""

    def add(self) -> None:
        """Write the record: older attempts stop at their next check. Raises OSError.

        Raises FencedError if another launch has begun an attempt since the previous one of this
        launch, or another process has taken the same or a higher number meanwhile.
        """
        if self.previous is not None:
            replace(self, record=self.previous).require_newest()
        path, data = self.folder / self.record.file_name, self.record.model_dump_json().encode()
        if isinstance(path, Path):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_file(path, data)
        else:
            path.write_bytes(data)
        self.require_newest()

    def require_newest(self) -> None:
        """Raise FencedError if the folder has a newer attempt, OSError if it cannot be listed."""
        attempts = _attempts(self.folder)
        if not attempts or attempts[-1][:2] <= (self.record.number, self.record.id):
            return
        number, _, path = attempts[-1]
        # If the file cannot be read, its number alone is reason enough.
        successor = newest_record(self.folder) or f"attempt {number} ({path.name})"
        raise FencedError(
            f"this process, {self.record}, was replaced: {successor} took "
            f"over this run ({self.folder}). Stopping without touching its checkpoints. Both ran "
            "at the same time: check why the scheduler started a second one, why this host was cut "
            "off, or whether another run has the same training.checkpoint_url. Nothing has to be "
            "repaired"
        )


def newest_number(folder: DatasetPath) -> int:
    """The highest number of an attempt in a folder; 0 without any. Raises OSError."""
    return max((number for number, *_ in _attempts(folder)), default=0)


def newest_record(folder: DatasetPath, *, launch_id: str | None = None) -> AttemptRecord | None:
    """The newest attempt of a folder; None without any, or if its file cannot be read.

    With `launch_id`: None also if it is of another launch.
    """
    with suppress(OSError, ValueError, IndexError):
        *_, path = _attempts(folder)[-1]
        record = AttemptRecord.model_validate_json(path.read_bytes())
        return record if launch_id in (None, record.launch_id) else None
    return None


def _attempts(folder: DatasetPath) -> list[tuple[int, str, DatasetPath]]:
    """Number, id and file of the attempts in a folder, the newest last."""
    try:
        matches = [(_NAME.fullmatch(path.name), path) for path in folder.iterdir()]
    except FileNotFoundError:  # no attempt has been recorded
        return []
    attempts = [(int(match[1]), match[2], path) for match, path in matches if match]
    return sorted(attempts, key=lambda attempt: attempt[:2])
