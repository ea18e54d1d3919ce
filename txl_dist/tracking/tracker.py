"""Tracker: the interface of a tracking server, and what is stored about it in a run directory.

`mlflow_tracker.py` is the tracker of this package. Another one is a class in any installed package,
called with (uri, run_dir), and registered under the scheme of its `tracking.uri`:

    [project.entry-points."txl.trackers"]
    mine = "my_package.tracker:MyTracker"         # for tracking.uri=mine://HOST/PATH

Trackers are called only in the processes of `sender.py`: they may block for as long as they want.
Only the sender writes the files `TrackingRequest` (what to record, without secrets) and
`TrackingState` (which run of the server belongs to the run directory).
"""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any, Protocol, Self

from pydantic import BaseModel, ConfigDict

from data_pipeline.system.files import write_file
from txl_dist.config.redaction import HIDDEN, redact

STATE = "tracking.json"
REQUEST = "logs/tracking-request.json"
LOCK = "logs/tracking.lock"
"""Held while a sender lives. Never written, so its time of change identifies the directory."""
LOG = "logs/tracking.log"


def server_of(uri: str | None, run_dir: Path) -> str:
    """`tracking.uri`; without one, the SQLite file mlflow.db in the parent of the run directory.

    A stored URI has no credentials. Then it is MLFLOW_TRACKING_URI; raises UnavailableError if that
    is not set.
    """
    if uri is not None and HIDDEN in uri:
        if "MLFLOW_TRACKING_URI" not in os.environ:
            raise UnavailableError("its credentials are not stored; set MLFLOW_TRACKING_URI")
        return os.environ["MLFLOW_TRACKING_URI"]
    return uri or default_server(run_dir)


def default_server(run_dir: Path) -> str:
    return sqlite_uri(run_dir.resolve().parent / "mlflow.db")


def sqlite_uri(path: Path) -> str:
    """The address of an SQLite file, also below a folder whose name has a `%` or `?`."""
    if not {"%", "?"} & {*str(path)}:
        return f"sqlite:///{path}"
    from sqlalchemy.engine.url import URL  # comes with mlflow; its versions escape differently

    # With the driver, or MLflow creates an empty folder of the escaped name.
    return URL.create("sqlite+pysqlite", database=str(path)).render_as_string()


def whole_path(uri: str | None) -> str | None:
    """`tracking.uri`; of an SQLite file with a relative path, the address of the whole path.

    The config keeps what is written there. Without this, a later command that is run elsewhere
    would create another database.
    """
    scheme, _, path = (uri or "").partition(":///")
    is_file = path and not path.startswith((":memory:", "file:"))
    if scheme not in ("sqlite", "sqlite+pysqlite") or not is_file or path.startswith("/"):
        return uri
    return f"{sqlite_uri(Path.cwd())}/{path}"


class UnavailableError(Exception):
    """The server cannot be reached or reports a failure: try again later."""


class RefusedError(Exception):
    """The server works and will never accept this content."""


class RunGoneError(Exception):
    """The run was deleted on the server."""


@dataclass(frozen=True, slots=True)
class Point:
    """One value of one metric; may be NaN or infinite."""

    metric: str
    value: float
    step: int
    milliseconds: int
    """Since the epoch, from the journal: the same point sent twice has the same timestamp."""


def points_of(line: Mapping[str, Any]) -> Iterator[Point]:
    """The metrics of one journal line, including infinities and NaN.

    The `tokens` of an evaluation are those of its step, whose own line has them already.
    """
    milliseconds = int(line.get("time", 0) * 1000)
    is_evaluation = any(name.endswith("/tokens_scored") for name in line)
    left_out = ("step", "time", "tokens") if is_evaluation else ("step", "time")
    for name, value in line.items():
        if name not in left_out and type(value) in (int, float):
            yield Point(name, float(value), line["step"], milliseconds)


Recorded = set[tuple[int, int]]
"""(step, milliseconds) of every recorded point of one metric."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrackedDataset:
    """One split of a dataset, as an input of a run."""

    name: str
    """The dataset and the split, `books/valid`: a server may identify an input by name and digest,
    and one dataset is often used for training and for evaluation."""
    digest: str
    """Hex sha256 of the manifest."""
    source: str
    """Path or URL, without secrets."""
    context: str
    """`training` or `evaluation`."""
    profile: Mapping[str, Any] = field(default_factory=dict)
    """Sizes, such as `tokens` and `documents`, and the `dtype` of the token ids."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrackedRun:
    """A run as a server shows it."""

    key: str
    """Identifies the run, also if the response to its creation was lost."""
    name: str
    experiment: str
    note: str = ""
    """Description of a new run, in Markdown. People may edit it on the server."""
    params: Mapping[str, str] = field(default_factory=dict)
    tags: Mapping[str, str] = field(default_factory=dict)
    parent: str | None = None
    """Id of the run below which it is shown, in whose experiment it is: that of a score is its
    training run."""
    previous: str | None = None
    """Id of the run that it continues, for the description of a new run."""
    supersedes: str | None = None
    """Id of a run with superseded steps; it ends, and is shown below this one."""
    datasets: Sequence[TrackedDataset] = ()


class Tracker(Protocol):
    """Runs on one server. A method that has failed is called again.

    Methods raise UnavailableError, RefusedError or RunGoneError. The text of an error contains no
    secret of the URI.
    """

    def start(self, run: TrackedRun) -> str:
        """Find the run with this key or create it, describe it, and mark it as running.

        Returns its id on the server.
        """

    def recorded(self, run_id: str, metric: str) -> Recorded:
        """Every point of a metric that the server has: those are not sent again."""

    def log(self, run_id: str, points: Sequence[Point]) -> None:
        """Record at most MAX_POINTS points, all or none."""

    def end(self, run_id: str, status: str) -> None:
        """Record how a run ended: finished, preempted, interrupted, diverged or failed, or running
        if another process continues it."""


MAX_POINTS = 1000
GROUP, OURS = "txl.trackers", "txl_dist.tracking.mlflow_tracker:MlflowTracker"
"""Entry points by the scheme of the address, and the tracker of any other address."""


def open_tracker(uri: str | None, run_dir: Path) -> Tracker:
    """The tracker of a `TrackingRequest` or `TrackingState`. Raises UnavailableError."""
    server = server_of(uri, run_dir)
    for entry in entry_points(group=GROUP, name=server.partition("://")[0]):
        tracker: Tracker = entry.load()(server, run_dir)
        return tracker
    ours: Tracker = EntryPoint("mlflow", OURS, GROUP).load()(server)
    return ours


class _JsonFile(BaseModel):
    """The content of a JSON file. Fields of other versions are ignored."""

    model_config = ConfigDict(frozen=True)

    @classmethod
    def load(cls, path: Path) -> Self | None:
        """The content of the file; None if it does not exist or is damaged."""
        try:
            return cls.model_validate_json(path.read_bytes())
        except (OSError, ValueError):
            return None

    def save(self, path: Path) -> None:
        """Replace the file atomically. A directory that was renamed does not come back."""
        write_file(path, self.model_dump_json().encode() + b"\n")


class TrackingRequest(_JsonFile):
    """What to record about a run, except its metrics."""

    server: str | None
    """As `tracking.uri`, with the whole path of an SQLite file."""
    experiment: str
    params: dict[str, str] = {}
    tags: dict[str, str] = {}
    datasets: tuple[TrackedDataset, ...] = ()

    def without_secrets(self) -> "TrackingRequest":
        """A copy without the credentials in the server URI."""
        return self.model_copy(update={"server": self.server and redact(self.server)})


class TrackingState(_JsonFile):
    """Which run of a server belongs to a run directory."""

    key: str
    server: str | None
    """As in the request, without credentials."""
    experiment: str
    directory: str | None = None
    """`directory_identity` of the run directory that the run belongs to. None: the next one that
    uses this file takes it over (it is from a checkpoint URL)."""
    run_id: str | None = None
    previous: str | None = None
    """The previous run, if it was deleted or superseded, is on another server, or belongs to the
    directory that this one is a copy of."""
    supersedes: str | None = None
    status: str = "running"
    delivered: bool = False
    """Whether the run ended and the server has every point of the journal."""
    evaluations: tuple[str, ...] = ()
    """Names of the results of `txl eval` that the server has below the run `run_id`."""
    superseded: tuple[str, ...] = ()
    """Of scored checkpoints that a resume has superseded (`superseded_saves`): no new run gets
    their scores."""

    def changed(self, run_dir: Path, **changes: Any) -> "TrackingState":
        """A copy with other values, written to the file of the run. Raises OSError."""
        state = self.model_copy(update=changes)
        state.save(run_dir / STATE)
        return state


def directory_identity(run_dir: Path) -> str:
    """Distinguishes a run directory from its copies, also on other hosts, but not from itself after
    it was renamed: the time at which the inode of LOCK was changed last, which is its creation.

    No program can set this time, so no copy has it. `chmod`, `chown` and a move to another file
    system change it too, and then the directory counts as a copy.
    """
    os.close(open_lock(run_dir))
    return str((run_dir / LOCK).stat().st_ctime_ns)


def open_lock(run_dir: Path) -> int:
    """A descriptor of LOCK, which is created if necessary. The caller takes the lock."""
    (run_dir / LOCK).parent.mkdir(parents=True, exist_ok=True)
    # Not Path.touch, which changes the time of a file that exists.
    return os.open(run_dir / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)


def dataset_name(source: str, split: str) -> str:
    """`TrackedDataset.name` of a split of the dataset at a path or URL."""
    return f"{source.rstrip('/').rpartition('/')[2]}/{split}"


def as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)
