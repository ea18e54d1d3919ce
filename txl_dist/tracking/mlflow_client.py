"""The only module that imports mlflow: experiments, runs and metric points, each call bounded.

Every failure becomes one of three errors: `UnavailableError` (try again later), `RefusedError`
(this content will never be taken), `RunGoneError` (the run was deleted). MLflow's own retries are
off: a retry after a lost answer records a point twice, so `delivery.py` first asks what is there.
"""

import contextlib
import logging
import os
import re
import sqlite3
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

# Before the import: mlflow reads them once. A refused server blocks a call for 246 s by default.
os.environ["MLFLOW_HTTP_REQUEST_MAX_RETRIES"] = "0"
os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "20")
os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
os.environ.setdefault("MLFLOW_LOGGING_LEVEL", "ERROR")

from mlflow.entities import Metric, Param, RunTag
from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient

from txl_dist.config.redaction import redact

MAX_POINTS = 1000
MAX_ITEMS = 100
MAX_PARAM_LENGTH = 6000
MAX_KEY_LENGTH = 250

_REFUSED = {"INVALID_PARAMETER_VALUE", "BAD_REQUEST", "MALFORMED_REQUEST"}
_GONE = {"RESOURCE_DOES_NOT_EXIST"}
_LEGAL_KEY = re.compile(r"[^\w.\- :/]")

for _noisy in ("alembic", "mlflow", "urllib3"):
    logging.getLogger(_noisy).setLevel(logging.ERROR)


class UnavailableError(Exception):
    """The server cannot be reached or does not work now."""


class RefusedError(Exception):
    """The server works and does not take this content."""


class RunGoneError(Exception):
    """The run was deleted."""


@dataclass(frozen=True, slots=True)
class Point:
    """One value of one metric."""

    key: str
    value: float
    step: int
    milliseconds: int
    """Since the epoch. The journal's, so that the same point sent again is the same row."""


Recorded = set[tuple[int, int]]
"""(step, milliseconds) of every recorded point of one metric."""


@contextlib.contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    except MlflowException as error:
        text = _first_line(error)
        if error.error_code in _REFUSED:
            raise RefusedError(text) from None
        if error.error_code in _GONE:
            raise RunGoneError(text) from None
        raise UnavailableError(text) from None
    except Exception as error:  # requests, sqlalchemy and the operating system each have their own
        raise UnavailableError(f"{type(error).__name__}: {_first_line(error)}") from None


def _first_line(error: Exception) -> str:
    lines = str(error).splitlines()
    return redact(lines[0])[:300] if lines else ""  # the URI is in it, with its password


class MlflowStore:
    """One tracking server or database."""

    def __init__(self, server: str, artifact_location: str | None) -> None:
        self._artifact_location = artifact_location
        with _translated():
            if server.startswith("sqlite:///"):
                _make_database(Path(server.removeprefix("sqlite:///").split("?")[0]))
            self._client = MlflowClient(tracking_uri=server)

    def experiment(self, name: str) -> str:
        """The id of the experiment of this name, made or restored if need be."""
        with _translated():
            found = self._client.get_experiment_by_name(name)
            if found is None:
                try:
                    return str(self._client.create_experiment(name, self._artifact_location))
                except MlflowException as error:  # another run was quicker
                    found = self._client.get_experiment_by_name(name)
                    if found is None:
                        raise error
            if found.lifecycle_stage == "deleted":
                self._client.restore_experiment(found.experiment_id)
            return str(found.experiment_id)

    def find_run(self, experiment_id: str, key: str) -> str | None:
        """The run whose tag `txl.key` is `key`: made before, though its answer was lost."""
        with _translated():
            found = self._client.search_runs([experiment_id], f"tags.`txl.key` = '{key}'")
            return str(found[0].info.run_id) if found else None

    def create_run(self, experiment_id: str, name: str, tags: Mapping[str, str]) -> str:
        with _translated():
            run = self._client.create_run(experiment_id, tags=dict(tags), run_name=name)
            return str(run.info.run_id)

    def is_active(self, run_id: str) -> bool:
        """False for a run that was deleted, for good or into the bin."""
        try:
            with _translated():
                return bool(self._client.get_run(run_id).info.lifecycle_stage == "active")
        except RunGoneError:
            return False

    def set_status(self, run_id: str, status: str) -> None:
        """`RUNNING` opens the run again; any other status ends it now."""
        with _translated():
            if status == "RUNNING":
                self._client.update_run(run_id, status=status)
            else:
                self._client.set_terminated(run_id, status=status)

    def recorded(self, run_id: str, key: str) -> Recorded:
        """Every point of a metric that the run has, asked from the server."""
        with _translated():
            history = self._client.get_metric_history(run_id, key)
            return {(point.step, point.timestamp) for point in history}

    def log_points(self, run_id: str, points: Iterable[Point]) -> None:
        """At most MAX_POINTS points, all or none of them."""
        metrics = [Metric(p.key, p.value, p.milliseconds, p.step) for p in points]
        with _translated():
            self._client.log_batch(run_id, metrics=metrics)

    def set_tags(self, run_id: str, tags: Mapping[str, str]) -> None:
        items = [RunTag(clean_key(key), value) for key, value in tags.items()]
        with _translated():
            for start in range(0, len(items), MAX_ITEMS):
                self._client.log_batch(run_id, tags=items[start : start + MAX_ITEMS])

    def children(self, experiment_id: str, run_id: str) -> list[str]:
        """The runs that MLflow shows under this one."""
        with _translated():
            tag = f"tags.`mlflow.parentRunId` = '{run_id}'"
            found = self._client.search_runs([experiment_id], tag)
            return [str(run.info.run_id) for run in found]

    def rename(self, run_id: str, name: str) -> None:
        with _translated():
            self._client.update_run(run_id, name=name)

    def log_params(self, run_id: str, params: Mapping[str, str]) -> None:
        """Parameters never change in MLflow: one that differs on a resume becomes a tag."""
        wanted = dict(_split_long(params))
        with _translated():
            present = self._client.get_run(run_id).data.params
            new = [Param(key, value) for key, value in wanted.items() if key not in present]
            for start in range(0, len(new), MAX_ITEMS):
                self._client.log_batch(run_id, params=new[start : start + MAX_ITEMS])
        changed = {key: value for key, value in wanted.items() if present.get(key, value) != value}
        self.set_tags(run_id, {f"txl.changed.{key}": value for key, value in changed.items()})

    def log_text(self, run_id: str, text: str, name: str) -> None:
        with _translated():
            self._client.log_text(run_id, text, name)


def clean_key(key: str) -> str:
    """`key` as MLflow takes it: legal characters, no path that resolves to another name."""
    parts = [part for part in _LEGAL_KEY.sub("_", key).split("/") if part.strip(".")]
    return "/".join(parts)[:MAX_KEY_LENGTH].rstrip("/") or "_"


def _split_long(params: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    for key, value in params.items():
        pieces = [
            value[start : start + MAX_PARAM_LENGTH]
            for start in range(0, max(len(value), 1), MAX_PARAM_LENGTH)
        ]
        for number, piece in enumerate(pieces, start=1):
            yield clean_key(key if number == 1 else f"{key}.part{number}"), piece


def _make_database(path: Path) -> None:
    """Make a new SQLite file aside: a sender killed in the middle of it would leave one that MLflow
    never opens again."""
    if path.exists():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        MlflowClient(tracking_uri=f"sqlite:///{aside}").search_experiments(max_results=1)
        with contextlib.closing(sqlite3.connect(aside)) as database:
            database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        with contextlib.suppress(FileExistsError):  # another run was quicker
            path.hardlink_to(aside)
    finally:
        for leftover in path.parent.glob(f"{aside.name}*"):
            leftover.unlink(missing_ok=True)
