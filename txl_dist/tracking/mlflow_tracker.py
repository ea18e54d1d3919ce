"""MlflowTracker: runs in MLflow. Only this module imports mlflow.

A parameter of MLflow cannot change: a value that differs after a resume becomes a tag
`txl.changed.*`. MLflow cannot delete points: the run with superseded steps ends, and becomes a
child of the run that supersedes it (decision 52).
"""

import contextlib
import json
import logging
import math
import os
import re
import sqlite3
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from urllib.parse import urlsplit

# Before the import, because mlflow reads these variables only once. Its own retries are off: a
# refused connection would block a call for 246 s, and a retry after a lost response records a point
# twice. `sender.py` retries instead, after a comparison with the points that the server has.
os.environ["MLFLOW_HTTP_REQUEST_MAX_RETRIES"] = "0"
os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "20")
os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
os.environ.setdefault("MLFLOW_LOGGING_LEVEL", "ERROR")

from mlflow.entities import Dataset, DatasetInput, InputTag, Metric, Param, RunTag
from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient
from mlflow.tracking.context.registry import resolve_tags
from sqlalchemy.engine import make_url

from data_pipeline.system.files import open_descriptor, wait_for_lock
from txl_dist.config.redaction import redact
from txl_dist.tracking.tracker import (
    Point,
    Recorded,
    RefusedError,
    RunGoneError,
    TrackedDataset,
    TrackedRun,
    UnavailableError,
    sqlite_uri,
)

# The limits of MLflow's REST API for one request and one parameter.
MAX_ITEMS = 100
MAX_PARAM_LENGTH = 6000
MAX_KEY_LENGTH = 250
MAX_DIGEST_LENGTH = 36
"""Of a dataset. The whole digest is in its profile."""
_ILLEGAL_IN_KEY = re.compile(r"[^\w.\- :/]")

_STATUSES = {
    "running": "RUNNING",
    "finished": "FINISHED",
    "preempted": "KILLED",
    "interrupted": "KILLED",
    "diverged": "FAILED",
    "failed": "FAILED",
}
"""Our status of a run (tag `txl.status`) -> MLflow's, which has no word for a preemption."""
_REFUSED = {"INVALID_PARAMETER_VALUE", "BAD_REQUEST", "MALFORMED_REQUEST"}

log = logging.getLogger(__name__)

for _name in ("alembic", "mlflow", "urllib3"):
    logging.getLogger(_name).setLevel(logging.ERROR)


@contextlib.contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    except (RefusedError, RunGoneError, UnavailableError):
        raise
    except Exception as error:  # requests, sqlalchemy and the operating system have other classes
        code = error.error_code if isinstance(error, MlflowException) else ""
        # The first line only: the rest is a stack trace. It may contain the URI and its password.
        text = redact(str(error).partition("\n")[0])[:300]
        if code in _REFUSED:
            raise RefusedError(text) from None
        if code == "RESOURCE_DOES_NOT_EXIST":
            raise RunGoneError(text) from None
        raise UnavailableError(text if code else f"{type(error).__name__}: {text}") from None


@_translated()
def require_server(uri: str) -> None:
    """Raises UnavailableError if no MLflow server answers at `uri` with our credentials."""
    MlflowClient(tracking_uri=uri).search_experiments(max_results=1)


class MlflowTracker:
    """One tracking server or database: a `Tracker`."""

    @_translated()
    def __init__(self, server: str) -> None:
        self._artifact_location: str | None = None  # the server decides
        if server.startswith("sqlite"):
            database = Path(make_url(server).database or "")
            self._artifact_location = (database.resolve().parent / "mlartifacts").as_uri()
            _create_database(database)
        self._client = MlflowClient(tracking_uri=server)
        self._key = self._run_id = ""
        self._to_describe: list[Callable[[], None]] = []

    def start(self, run: TrackedRun) -> str:
        if self._key != run.key:
            run_id = self._run_id = self._find_or_create(run)
            self._to_describe = [
                lambda: self._set_status(run_id, "running"),
                lambda: self._set_tags(run_id, {"txl.status": "running", **run.tags}),
                lambda: self._log_params(run_id, run.params),
                lambda: self._adopt(run, run_id),
                lambda: self._log_inputs(run_id, run.datasets),
            ]
            self._key = run.key
        while self._to_describe:  # one call at a time: a failure repeats only that one
            try:
                self._to_describe[0]()
            except RefusedError as error:
                log.warning("tags, parameters or inputs not recorded: %s", error)
            del self._to_describe[0]
        return self._run_id

    @_translated()
    def recorded(self, run_id: str, metric: str) -> Recorded:
        return {
            (point.step, point.timestamp)
            for point in self._client.get_metric_history(run_id, clean_key(metric))
        }

    def log(self, run_id: str, points: Sequence[Point]) -> None:
        finite = [
            Metric(clean_key(point.metric), point.value, point.milliseconds, point.step)
            for point in points
            if math.isfinite(point.value)
        ]
        # MLflow would store infinity as 1.8e308.
        tags = {
            clean_key(f"txl.not_finite.{point.metric}"): f"at step {point.step}"
            for point in points
            if not math.isfinite(point.value)
        }
        try:
            with _translated():
                items = [RunTag(key, text) for key, text in tags.items()]
                self._client.log_batch(run_id, metrics=finite, tags=items)
        except RefusedError as error:
            # MLflow reports a deleted run in a batch as an invalid parameter.
            if not self._is_active(run_id):
                raise RunGoneError(str(error)) from error
            raise

    def end(self, run_id: str, status: str) -> None:
        self._set_tags(run_id, {"txl.status": status})
        self._set_status(run_id, status)

    @_translated()
    def _find_or_create(self, run: TrackedRun) -> str:
        parent = self._client.get_run(run.parent) if run.parent else None
        experiment_id = parent.info.experiment_id if parent else self._experiment(run.experiment)
        for found in self._client.search_runs([experiment_id], f"tags.`txl.key` = '{run.key}'"):
            return str(found.info.run_id)
        tags = {
            "txl.key": run.key,
            "mlflow.source.name": "txl eval" if run.parent else "txl train",
            "mlflow.note.content": run.note,
        }
        if run.previous:
            tags["txl.parent"] = run.previous
        if run.parent:
            tags["mlflow.parentRunId"] = run.parent
        # Also the user and the commit of the code. The address of its repository may have a token.
        tags = {name: redact(text) for name, text in resolve_tags(tags).items()}
        created = self._client.create_run(experiment_id, tags=tags, run_name=run.name)
        return str(created.info.run_id)

    def _experiment(self, name: str) -> str:
        """The id of the experiment `name`; creates or restores it if necessary."""
        experiment = self._client.get_experiment_by_name(name)
        if experiment is None:
            return str(self._client.create_experiment(name, self._artifact_location))
        if experiment.lifecycle_stage == "deleted":
            self._client.restore_experiment(experiment.experiment_id)
        return str(experiment.experiment_id)

    @_translated()
    def _adopt(self, run: TrackedRun, run_id: str) -> None:
        superseded = run.supersedes
        if superseded is not None and self._is_active(superseded):
            tags = {"mlflow.parentRunId": run_id, "txl.status": "superseded"}
            self._set_tags(superseded, tags)
            self._set_status(superseded, "interrupted")
            self._client.update_run(superseded, name=f"{run.name} (superseded)")

    @_translated()
    def _log_inputs(self, run_id: str, datasets: Sequence[TrackedDataset]) -> None:
        """Record what a run reads. MLflow ignores inputs that the run has."""
        inputs = [
            DatasetInput(_dataset(each), [InputTag("mlflow.data.context", each.context)])
            for each in datasets
        ]
        try:
            self._client.log_inputs(run_id, inputs)
        except MlflowException as error:
            if error.error_code == "ENDPOINT_NOT_FOUND":
                raise RefusedError("the server is too old for datasets") from None
            raise

    def _is_active(self, run_id: str) -> bool:
        """False for a run that was deleted, also if it can still be restored."""
        try:
            with _translated():
                return bool(self._client.get_run(run_id).info.lifecycle_stage == "active")
        except RunGoneError:
            return False

    @_translated()
    def _set_status(self, run_id: str, status: str) -> None:
        if status == "running":
            self._client.update_run(run_id, status=_STATUSES[status])
        else:  # records the end time too, which update_run does not
            self._client.set_terminated(run_id, status=_STATUSES[status])

    @_translated()
    def _set_tags(self, run_id: str, tags: Mapping[str, str]) -> None:
        items = [RunTag(clean_key(key), value) for key, value in tags.items()]
        for start in range(0, len(items), MAX_ITEMS):
            self._client.log_batch(run_id, tags=items[start : start + MAX_ITEMS])

    @_translated()
    def _log_params(self, run_id: str, params: Mapping[str, str]) -> None:
        wanted = {clean_key(key): value[:MAX_PARAM_LENGTH] for key, value in params.items()}
        present = self._client.get_run(run_id).data.params
        new = [Param(key, value) for key, value in wanted.items() if key not in present]
        for start in range(0, len(new), MAX_ITEMS):
            self._client.log_batch(run_id, params=new[start : start + MAX_ITEMS])
        changed = {key: value for key, value in wanted.items() if present.get(key, value) != value}
        self._set_tags(run_id, {f"txl.changed.{key}": value for key, value in changed.items()})


def clean_key(key: str) -> str:
    """`key` with the characters that MLflow allows, and without `.` and `..` as path components."""
    parts = [part for part in _ILLEGAL_IN_KEY.sub("_", key).split("/") if part.strip(".")]
    return "/".join(parts)[:MAX_KEY_LENGTH].rstrip("/") or "_"


def _dataset(dataset: TrackedDataset) -> Dataset:
    scheme = urlsplit(dataset.source).scheme or "local"
    return Dataset(
        name=dataset.name,
        digest=dataset.digest[:MAX_DIGEST_LENGTH],
        source_type="http" if scheme == "https" else scheme,
        # MLflow reads one of the two, by type.
        source=json.dumps({"uri": dataset.source, "url": dataset.source}),
        profile=json.dumps({**dataset.profile, "sha256": dataset.digest}),
    )


def _create_database(path: Path) -> None:
    """Create the SQLite file and its tables under a temporary name, then link it to `path`.

    A kill during the creation would leave a database that MLflow cannot open.
    """
    if path.exists():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        MlflowClient(tracking_uri=sqlite_uri(temporary)).search_experiments(max_results=1)
        # The link covers only the main file, so move the write-ahead log into it first.
        with contextlib.closing(sqlite3.connect(temporary)) as database:
            database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        try:
            path.hardlink_to(temporary)
        except FileExistsError:  # another run has created it in the meantime
            pass
        except OSError:  # a file system without hard links
            lock = path.with_name(f".{path.name}.lock")
            with open_descriptor(lock, os.O_RDWR | os.O_CREAT) as descriptor:
                wait_for_lock(descriptor, timeout_seconds=1)
                if not path.exists():
                    temporary.rename(path)
    finally:
        for leftover in path.parent.glob(f"{temporary.name}*"):
            leftover.unlink(missing_ok=True)
