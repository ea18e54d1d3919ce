"""A real MLflow for every test: SQLite files copied from one template, and MLflow's own server
application with injected faults."""

import io
import json
import os
import shutil
import socket
import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from mlflow.tracking import MlflowClient

from txl_dist.config.data_config import DataConfig
from txl_dist.config.run_config import RunConfig
from txl_dist.config.training_config import TrackingConfig, TrainingConfig
from txl_dist.tracking.journal import MetricsJournal
from txl_dist.tracking.mlflow_tracker import MlflowTracker
from txl_dist.tracking.process import TrackingProcess
from txl_dist.tracking.sender import Sender
from txl_dist.tracking.tracker import TrackingRequest, TrackingState, UnavailableError

START = 1_700_000_000.0


@pytest.fixture(scope="session")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty MLflow database; making one takes seconds, copying it does not."""
    path = tmp_path_factory.mktemp("mlflow") / "mlflow.db"
    MlflowTracker(f"sqlite:///{path}")
    return path


@pytest.fixture
def run_dir(template: Path, tmp_path: Path) -> Path:
    """An empty run directory, with the default tracking database in its parent."""
    shutil.copy(template, tmp_path / "mlflow.db")
    path = tmp_path / "run"
    path.mkdir()
    return path


class MlflowServer:
    """MLflow's server on 127.0.0.1, in this process, with faults on request."""

    def __init__(self, app: Any, database: Path) -> None:
        self.database = database
        self._app = app
        self.fault: Callable[[str, bytes], str] | None = None
        """(path, body) -> "" | "500" | "404" | "401" | "400" | "lost response" | "swallow"."""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.uri = f"http://127.0.0.1:{self.port}"
        self._server: Any = None

    def open(self) -> None:
        """Start to listen; until then connections are refused."""
        from werkzeug.serving import WSGIRequestHandler, make_server

        class Quiet(WSGIRequestHandler):
            def log(self, type: str, message: str, *args: Any) -> None:
                pass

        self._server = make_server(
            "127.0.0.1", self.port, self._respond, threaded=True, request_handler=Quiet
        )
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def close(self) -> None:
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()

    def _respond(self, environ: dict[str, Any], start_response: Any) -> Any:
        body = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        environ["wsgi.input"] = io.BytesIO(body)
        fault = self.fault(environ["PATH_INFO"], body) if self.fault else ""
        if fault in ("", "lost response"):
            response = b"".join(self._app(environ, start_response if not fault else _ignore))
            if not fault:
                return [response]
        if fault == "swallow":
            start_response("200 OK", [("Content-Type", "application/json")])
            return [b"{}"]
        status, code = {
            "400": ("400 Bad Request", "INVALID_PARAMETER_VALUE"),
            "401": ("401 Unauthorized", "UNAUTHENTICATED"),
            "404": ("404 Not Found", "ENDPOINT_NOT_FOUND"),
        }.get(fault, ("500 Internal Server Error", "INTERNAL_ERROR"))
        start_response(status, [("Content-Type", "application/json")])
        return [json.dumps({"error_code": code, "message": "a fault of the test"}).encode()]


def _ignore(*_: Any) -> Any:
    return lambda data: None


@pytest.fixture(scope="session")
def server_app(template: Path) -> tuple[Any, Path]:
    database = template.with_name("server.db")
    shutil.copy(template, database)
    os.environ["_MLFLOW_SERVER_FILE_STORE"] = f"sqlite:///{database}"
    os.environ["_MLFLOW_SERVER_ARTIFACT_ROOT"] = str(template.parent / "artifacts")
    os.environ["_MLFLOW_SERVER_SERVE_ARTIFACTS"] = "false"
    from mlflow.server import app

    return app, database


@pytest.fixture
def server(server_app: tuple[Any, Path]) -> Iterator[MlflowServer]:
    """A server that is not listening yet."""
    result = MlflowServer(*server_app)
    yield result
    result.close()


def write_steps(run_dir: Path, steps: range, *, since: float = START, **metrics: float) -> None:
    with MetricsJournal(run_dir / "metrics.jsonl") as journal:
        for step in steps:
            line = {"step": step, "tokens": step * 10, "time": since + step, "loss": 1 / (1 + step)}
            journal.write(line | metrics)


def request_for(server: str | None = None, **changes: Any) -> TrackingRequest:
    return TrackingRequest(**{"server": server, "experiment": "tests", **changes})


def sender_for(run_dir: Path, server: str | None = None, **changes: Any) -> Sender:
    return Sender(run_dir, request_for(server, **changes))


def recorded_steps(database: Path, run_id: str, key: str = "loss") -> list[int]:
    """The steps in MLflow's own table, duplicates included."""
    with sqlite3.connect(database) as connection:
        rows = connection.execute(
            "SELECT step FROM metrics WHERE run_uuid = ? AND key = ? ORDER BY step", (run_id, key)
        )
        return [step for (step,) in rows]


def tags_of(database: Path, run_id: str) -> dict[str, str]:
    with sqlite3.connect(database) as connection:
        return dict(connection.execute("SELECT key, value FROM tags WHERE run_uuid = ?", (run_id,)))


def status_of(database: Path, run_id: str) -> str:
    with sqlite3.connect(database) as connection:
        (row,) = connection.execute("SELECT status FROM runs WHERE run_uuid = ?", (run_id,))
        return str(row[0])


def until_delivered(call: Callable[[], object]) -> None:
    """Call again as long as the server fails."""
    for _ in range(300):
        with suppress(UnavailableError):
            call()
            return
    pytest.fail("never delivered")


def state_of(run_dir: Path) -> TrackingState:
    state = TrackingState.load(run_dir / "tracking.json")
    assert state is not None
    return state


def run_id_of(run_dir: Path) -> str:
    run_id = state_of(run_dir).run_id
    assert run_id is not None
    return run_id


def client_of(run_dir: Path) -> MlflowClient:
    """Of the default database."""
    return MlflowClient(f"sqlite:///{run_dir.parent / 'mlflow.db'}")


def run_ids(database: Path, experiment: str = "tests") -> list[str]:
    with sqlite3.connect(database) as connection:
        rows = connection.execute(
            "SELECT run_uuid FROM runs WHERE experiment_id ="
            " (SELECT experiment_id FROM experiments WHERE name = ?)",
            (experiment,),
        )
        return [run_id for (run_id,) in rows]


def assert_delivered(
    database: Path, run_dir: Path, last_step: int, status: str = "FINISHED", output: str = ""
) -> None:
    """The current MLflow run has every step once, and the status."""
    run_id = run_id_of(run_dir)
    assert status_of(database, run_id) == status, output
    assert recorded_steps(database, run_id) == list(range(1, last_step + 1)), output


# --- real sender processes ------------------------------------------------------------------------


def tracking_config(run_dir: Path, uri: str | None = None, *, enabled: bool = True) -> RunConfig:
    return RunConfig(
        directory=str(run_dir),
        data=DataConfig(path="data/none"),
        training=TrainingConfig(num_steps=10),
        tracking=TrackingConfig(uri=uri, experiment="tests", enabled=enabled),
    )


def senders_of(run_dir: Path) -> list[int]:
    """The living sender processes of this run directory."""
    return [
        process.pid
        for process in psutil.process_iter(["cmdline", "status"])
        if {"txl_dist.tracking.sender", str(run_dir)} <= set(process.info["cmdline"] or ())
        and process.info["status"] != psutil.STATUS_ZOMBIE
    ]


def delivered_steps(run_dir: Path, tracker: TrackingProcess) -> list[int]:
    return recorded_steps(run_dir.parent / "mlflow.db", tracker.run_id or "")
