"""What the tracking processes tell each other: a request on a pipe, and the state in RUN.

`TrackingRequest` is what training wants recorded; it reaches the sender on its standard input, in
full, and RUN/logs/tracking-request.json, without secrets, for a later `--sync`. `TrackingState` is
RUN/tracking.json: which MLflow run this directory is. Only the sender writes either file.
"""

import dataclasses
import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from data_pipeline.storage.atomic_files import write_file
from txl_dist.config.redaction import HIDDEN, redact

STATE = "tracking.json"
REQUEST = "logs/tracking-request.json"
LOCK = "logs/tracking.lock"
LOG = "logs/tracking.log"

RUN_STATUSES = {
    "running": "RUNNING",
    "finished": "FINISHED",
    "preempted": "KILLED",
    "interrupted": "KILLED",
    "diverged": "FAILED",
    "failed": "FAILED",
}
"""Our word for a run's end (tag `txl.status`) and MLflow's."""


class _JsonFile:
    """A dataclass kept as one JSON file, replaced in one motion."""

    @classmethod
    def load(cls, path: Path) -> Self | None:
        """The file's content, or None if there is none that can be used."""
        try:
            return cls.from_json(path.read_bytes())
        except OSError:
            return None

    @classmethod
    def from_json(cls, text: bytes | str) -> Self | None:
        """The object of a JSON text; fields it knows nothing of are left out."""
        try:
            content = json.loads(text)
        except (ValueError, RecursionError):
            return None
        names = {item.name for item in dataclasses.fields(cls)}  # type: ignore[arg-type]
        if not isinstance(content, dict):
            return None
        try:
            return cls(**{name: item for name, item in content.items() if name in names})
        except TypeError:  # a field is missing
            return None

    def to_json(self) -> str:
        """One line."""
        return json.dumps(dataclasses.asdict(self))  # type: ignore[call-overload]

    def save(self, path: Path) -> None:
        """Put the content at `path` in one step."""
        path.parent.mkdir(parents=True, exist_ok=True)
        write_file(path, self.to_json().encode() + b"\n")


@dataclass(frozen=True, kw_only=True)
class TrackingRequest(_JsonFile):
    """What to record about a run, beside its metrics."""

    server: str | None
    """MLflow URI; None is the SQLite file beside the run directories."""
    experiment: str
    params: dict[str, str] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)
    data_manifest: str | None = None
    """File to keep as an artifact."""
    new_run_key: str | None = None
    """Set where training begins anew: go on in the MLflow run of this key, not in an older one."""

    def without_secrets(self) -> "TrackingRequest":
        return dataclasses.replace(self, server=public_server(self.server))


@dataclass(frozen=True, kw_only=True)
class TrackingState(_JsonFile):
    """Which MLflow run a run directory is."""

    key: str
    """Tag `txl.key` of the MLflow run: found again even if the answer to its creation was lost."""
    server: str | None
    """As in the request, without credentials."""
    run_id: str | None = None
    experiment_id: str | None = None
    parent_run_id: str | None = None
    """The MLflow run this one goes on from, if that one was deleted or is on another server."""
    abandoned_run_id: str | None = None
    """The MLflow run this one replaces after a rollback, until it is filed as a child of this."""
    abandoned_from_step: int | None = None
    """The first step of it that the journal no longer has."""
    status: str = "running"
    sent_step: int | None = None
    """The last step sent. For people: what was recorded is asked from the server."""
    delivered: bool = False
    """Whether everything in the journal was there when the run ended."""


def public_server(server: str | None) -> str | None:
    """The URI without its credentials."""
    return None if server is None else redact(server)


def resolve_server(server: str | None, run_dir: Path) -> str | None:
    """The URI to connect to; None if its credentials are gone and the environment has none."""
    if server is None:
        return f"sqlite:///{run_dir.resolve().parent / 'mlflow.db'}"
    if HIDDEN in server:
        return os.environ.get("MLFLOW_TRACKING_URI")
    return server


def artifact_location(server: str) -> str | None:
    """Where artifacts of a new experiment go: beside an SQLite file; else the server decides."""
    if not server.startswith("sqlite:///"):
        return None
    database = Path(server.removeprefix("sqlite:///").split("?")[0])
    return (database.resolve().parent / "mlartifacts").as_uri()


def as_text(value: Any) -> str:
    """A setting as MLflow stores it."""
    if isinstance(value, str):
        return value
    return json.dumps(value)


def child_environment() -> dict[str, str]:
    """This process's environment, in which a child finds this very package."""
    package_root = str(Path(__file__).resolve().parents[2])
    search_path = filter(None, [package_root, os.environ.get("PYTHONPATH")])
    return {**os.environ, "PYTHONPATH": os.pathsep.join(search_path)}
