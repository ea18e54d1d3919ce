"""The only module that imports mlflow: experiments, runs and metric points, each call bounded.

Every failure becomes one of three errors: `UnavailableError` (try again later), `RefusedError`
(the server will never accept this content), `RunGoneError` (the run was deleted).
"""

import contextlib
import logging
import os
import re
import sqlite3
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

# Before the import, because mlflow reads these variables only once. Its own retries are off: a
# refused connection would block a call for 246 s, and a retry after a lost response records a point
# twice. `delivery.py` retries instead, after a comparison with the points that the server has.
os.environ["MLFLOW_HTTP_REQUEST_MAX_RETRIES"] = "0"
os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "20")
os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
os.environ.setdefault("MLFLOW_LOGGING_LEVEL", "ERROR")

from mlflow.entities import Metric, Param, RunTag
from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient

from txl_dist.config.redaction import HIDDEN, redact

# The limits of MLflow's REST API for one request, one parameter and one name.
MAX_POINTS = 1000
MAX_ITEMS = 100
MAX_PARAM_LENGTH = 6000
MAX_KEY_LENGTH = 250

_REFUSED = {"INVALID_PARAMETER_VALUE", "BAD_REQUEST", "MALFORMED_REQUEST"}
_GONE = {"RESOURCE_DOES_NOT_EXIST"}
_ILLEGAL_IN_KEY = re.compile(r"[^\w.\- :/]")
_SQLITE = "sqlite:///"

for _name in ("alembic", "mlflow", "urllib3"):
    logging.getLogger(_name).setLevel(logging.ERROR)


class UnavailableError(Exception):
    """The server cannot be reached or reports a failure."""


class RefusedError(Exception):
    """The server works and rejects this content."""


class RunGoneError(Exception):
    """The run was deleted."""


@dataclass(frozen=True, slots=True)
class Point:
    """One value of one metric."""

    key: str
    value: float
    step: int
    milliseconds: int
    """Since the epoch, from the journal: the same point sent twice has the same timestamp."""


Recorded = set[tuple[int, int]]
"""(step, milliseconds) of every recorded point of one metric."""


@contextlib.contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    except Exception as error:  # requests, sqlalchemy and the operating system have other classes
        code = error.error_code if isinstance(error, MlflowException) else ""
        # The first line only: the rest is a stack trace. It may contain the URI and its password.
        text = redact(str(error).partition("\n")[0])[:300]
        if code in _REFUSED:
            raise RefusedError(text) from None
        if code in _GONE:
            raise RunGoneError(text) from None
        raise UnavailableError(text if code else f"{type(error).__name__}: {text}") from None


def connect(server: str | None, run_dir: Path) -> "MlflowStore":
    """The server of a `TrackingRequest` or `TrackingState`."""
    if server is None:
        server = f"{_SQLITE}{run_dir.resolve().parent / 'mlflow.db'}"
    elif HIDDEN in server:
        server = os.environ.get("MLFLOW_TRACKING_URI")
        if server is None:
            raise UnavailableError("its credentials are not stored; set MLFLOW_TRACKING_URI")
    return MlflowStore(server)


class MlflowStore:
    """One tracking server or SQLite database."""

    @_translated()
    def __init__(self, server: str) -> None:
        self._artifact_location: str | None = None  # the server decides
        if server.startswith(_SQLITE):
            database = Path(server.removeprefix(_SQLITE).split("?")[0])
            self._artifact_location = (database.resolve().parent / "mlartifacts").as_uri()
            _create_database(database)
        self._client = MlflowClient(tracking_uri=server)

    @_translated()
    def experiment(self, name: str) -> str:
        """The id of the experiment `name`; creates or restores it if necessary."""
        experiment = self._client.get_experiment_by_name(name)
        if experiment is None:
            try:
                return str(self._client.create_experiment(name, self._artifact_location))
            except MlflowException:
                experiment = self._client.get_experiment_by_name(name)
                if experiment is None:  # else another run has created it in the meantime
                    raise
        if experiment.lifecycle_stage == "deleted":
            self._client.restore_experiment(experiment.experiment_id)
        return str(experiment.experiment_id)

    @_translated()
    def runs_with_tag(self, experiment_id: str, tag: str, value: str) -> list[str]:
        """The ids of the active runs whose `tag` is `value`."""
        runs = self._client.search_runs([experiment_id], f"tags.`{tag}` = '{value}'")
        return [str(run.info.run_id) for run in runs]

    @_translated()
    def create_run(self, experiment_id: str, name: str, tags: Mapping[str, str]) -> str:
        run = self._client.create_run(experiment_id, tags=dict(tags), run_name=name)
        return str(run.info.run_id)

    def is_active(self, run_id: str) -> bool:
        """False for a run that was deleted, also if it can still be restored."""
        try:
            with _translated():
                return bool(self._client.get_run(run_id).info.lifecycle_stage == "active")
        except RunGoneError:
            return False

    @_translated()
    def set_status(self, run_id: str, status: str) -> None:
        """`RUNNING` reopens the run; any other status ends it now."""
        if status == "RUNNING":
            self._client.update_run(run_id, status=status)
        else:  # records the end time too, which update_run does not
            self._client.set_terminated(run_id, status=status)

    @_translated()
    def recorded(self, run_id: str, key: str) -> Recorded:
        """Every point of a metric that the server has."""
        history = self._client.get_metric_history(run_id, key)
        return {(point.step, point.timestamp) for point in history}

    @_translated()
    def log_points(self, run_id: str, points: Iterable[Point]) -> None:
        """Record at most MAX_POINTS points atomically."""
        metrics = [Metric(p.key, p.value, p.milliseconds, p.step) for p in points]
        self._client.log_batch(run_id, metrics=metrics)

    @_translated()
    def set_tags(self, run_id: str, tags: Mapping[str, str]) -> None:
        items = [RunTag(clean_key(key), value) for key, value in tags.items()]
        for start in range(0, len(items), MAX_ITEMS):
            self._client.log_batch(run_id, tags=items[start : start + MAX_ITEMS])

    @_translated()
    def rename(self, run_id: str, name: str) -> None:
        self._client.update_run(run_id, name=name)

    def log_params(self, run_id: str, params: Mapping[str, str]) -> None:
        """MLflow parameters cannot change: a value that differs after a resume becomes a tag."""
        wanted = dict(_split_long(params))
        with _translated():
            present = self._client.get_run(run_id).data.params
            new = [Param(key, value) for key, value in wanted.items() if key not in present]
            for start in range(0, len(new), MAX_ITEMS):
                self._client.log_batch(run_id, params=new[start : start + MAX_ITEMS])
        changed = {key: value for key, value in wanted.items() if present.get(key, value) != value}
        self.set_tags(run_id, {f"txl.changed.{key}": value for key, value in changed.items()})

    @_translated()
    def log_text(self, run_id: str, text: str, name: str) -> None:
        self._client.log_text(run_id, text, name)


def clean_key(key: str) -> str:
    """`key` with the characters that MLflow allows, and without `.` and `..` as path components."""
    parts = [part for part in _ILLEGAL_IN_KEY.sub("_", key).split("/") if part.strip(".")]
    return "/".join(parts)[:MAX_KEY_LENGTH].rstrip("/") or "_"


def _split_long(params: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Values longer than MAX_PARAM_LENGTH become several parameters: x, x.part2, ..."""
    for key, value in params.items():
        yield clean_key(key), value[:MAX_PARAM_LENGTH]
        for start in range(MAX_PARAM_LENGTH, len(value), MAX_PARAM_LENGTH):
            part = f"{key}.part{start // MAX_PARAM_LENGTH + 1}"
            yield clean_key(part), value[start : start + MAX_PARAM_LENGTH]


def _create_database(path: Path) -> None:
    """Create the SQLite file and its tables under a temporary name, then link it to `path`.

    A kill during the creation would leave a database that MLflow cannot open.
    """
    if path.exists():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        MlflowClient(tracking_uri=f"{_SQLITE}{temporary}").search_experiments(max_results=1)
        # The link covers only the main file, so move the write-ahead log into it first.
        with contextlib.closing(sqlite3.connect(temporary)) as database:
            database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        with contextlib.suppress(FileExistsError):  # another run has created it in the meantime
            path.hardlink_to(temporary)
    finally:
        for leftover in path.parent.glob(f"{temporary.name}*"):
            leftover.unlink(missing_ok=True)
