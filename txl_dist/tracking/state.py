"""What the tracking processes exchange: a request over a pipe, and the state in the run directory.

`TrackingRequest`: what to record. Training sends it to the sender's standard input; a copy without
secrets in RUN/logs/tracking-request.json serves a later `--sync`. `TrackingState`, in
RUN/tracking.json: which MLflow run belongs to the run directory. Only the sender writes the files.
"""

import dataclasses
import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from data_pipeline.system.files import write_file
from txl_dist.config.redaction import redact

STATE = "tracking.json"
REQUEST = "logs/tracking-request.json"
LOCK = "logs/tracking.lock"
"""Held by the sender. Never written, so its time of change identifies the directory."""
LOG = "logs/tracking.log"

RUN_STATUSES = {
    "running": "RUNNING",
    "finished": "FINISHED",
    "preempted": "KILLED",
    "interrupted": "KILLED",
    "diverged": "FAILED",
    "failed": "FAILED",
}
"""Our status of a run (tag `txl.status`) -> MLflow's, which has no word for a preemption."""


class _JsonFile:
    """A dataclass in one JSON file."""

    @classmethod
    def load(cls, path: Path) -> Self | None:
        """The content of the file; None if it does not exist or is damaged."""
        try:
            return cls.from_json(path.read_bytes())
        except OSError:
            return None

    @classmethod
    def from_json(cls, text: bytes | str) -> Self | None:
        """Ignores unknown fields, which a newer version may have written."""
        names = {item.name for item in dataclasses.fields(cls)}  # type: ignore[arg-type]
        try:
            content = dict(json.loads(text))
            return cls(**{name: item for name, item in content.items() if name in names})
        # Not JSON or too deep; not an object, or a required field is missing.
        except (ValueError, TypeError, RecursionError):
            return None

    def to_json(self) -> str:
        """JSON on one line."""
        return json.dumps(dataclasses.asdict(self))  # type: ignore[call-overload]

    def save(self, path: Path) -> None:
        """Replace the file atomically."""
        path.parent.mkdir(parents=True, exist_ok=True)
        write_file(path, self.to_json().encode() + b"\n")


@dataclass(frozen=True, kw_only=True)
class TrackingRequest(_JsonFile):
    """What to record about a run, except its metrics."""

    server: str | None
    """MLflow URI; None: the SQLite file mlflow.db in the parent of the run directory."""
    experiment: str
    params: dict[str, str] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)
    data_manifest: str | None = None
    """Path of a file to record as an artifact."""
    new_run_key: str | None = None
    """Set if training starts without a checkpoint: use the MLflow run with this key, not the
    previous one of the run directory. A restarted sender finds the same run by it."""

    def without_secrets(self) -> "TrackingRequest":
        """A copy without the credentials in the server URI."""
        return dataclasses.replace(self, server=self.server and redact(self.server))


@dataclass(frozen=True, kw_only=True)
class TrackingState(_JsonFile):
    """Which MLflow run belongs to a run directory."""

    key: str
    """Tag `txl.key` of the MLflow run. Finds the run if the response to its creation was lost."""
    server: str | None
    """As in the request, without credentials."""
    directory: str | None = None
    """`directory_identity` of the run directory that the MLflow run belongs to. None: the next one
    that uses this file takes it over (it is from an older version, or from a checkpoint URL)."""
    run_id: str | None = None
    experiment_id: str | None = None
    parent_run_id: str | None = None
    """The previous MLflow run, if it was deleted, is on another server, was started over, or
    belongs to the directory that this one is a copy of."""
    abandoned_run_id: str | None = None
    """The MLflow run that this one replaces after a rollback, until it is made a child of it."""
    abandoned_from_step: int | None = None
    """The first step in the abandoned run that the journal no longer has."""
    status: str = "running"
    sent_step: int | None = None
    """The last step sent. For display only; the delivery queries the server."""
    delivered: bool = False
    """Whether the run ended and the server has every point of the journal."""


def directory_identity(run_dir: Path) -> str:
    """Distinguishes a run directory from its copies, also on other hosts, but not from itself after
    it was renamed: the time at which the inode of LOCK was changed last, which is its creation.

    No program can set this time, so no copy has it. `chmod`, `chown` and a move to another file
    system change it too, and then the directory counts as a copy.
    """
    (run_dir / LOCK).parent.mkdir(parents=True, exist_ok=True)
    # Not Path.touch, which changes the time of a file that exists.
    descriptor = os.open(run_dir / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        return str(os.fstat(descriptor).st_ctime_ns)
    finally:
        os.close(descriptor)


def as_text(value: Any) -> str:
    """A setting as text, which is all that MLflow parameters can hold."""
    return value if isinstance(value, str) else json.dumps(value)


def child_environment() -> dict[str, str]:
    """The environment of this process; a child process imports this same copy of the package."""
    package_root = str(Path(__file__).resolve().parents[2])
    search_path = filter(None, [package_root, os.environ.get("PYTHONPATH")])
    return {**os.environ, "PYTHONPATH": os.pathsep.join(search_path)}
