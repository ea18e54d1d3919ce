"""MLflow's server as an administrator starts it, on a database of the test."""

import os
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.support.commands import ENVIRONMENT, wait_until


@contextmanager
def mlflow_server(database_uri: str, directory: Path) -> Iterator[str]:
    """`mlflow server` on 127.0.0.1; yields its URI once it responds. Its files are in `directory`.

    It creates its tables first, which takes seconds.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    uri = f"http://127.0.0.1:{port}"
    log = directory / "mlflow.log"
    command = (
        *(sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port)),
        *("--workers", "1", "--default-artifact-root", str(directory / "artifacts")),
        *("--backend-store-uri", database_uri),
    )
    environment = {**ENVIRONMENT, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}  # 8 processes
    with log.open("wb") as file:
        server = subprocess.Popen(
            command, stdout=file, stderr=file, env=environment, start_new_session=True
        )
    try:
        wait_until(lambda: _responds(uri, server, log), timeout_seconds=120, poll_seconds=0.25)
        yield uri
    finally:
        with suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)  # it starts its workers in the same group
        server.wait()


def _responds(uri: str, server: subprocess.Popen[bytes], log: Path) -> bool:
    assert server.poll() is None, log.read_text()
    try:
        with urllib.request.urlopen(f"{uri}/health", timeout=5) as response:
            return bool(response.status == 200)
    except OSError:
        return False
