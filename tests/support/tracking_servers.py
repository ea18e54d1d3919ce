"""MLflow's server as an administrator starts it, on a real PostgreSQL that a test can stop.

PostgreSQL listens only on a Unix socket in a new directory. It refuses to run as root, so its
processes get the user of Debian's package, or an unprivileged one.
"""

import os
import pwd
import shutil
import signal
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from tests.support.commands import ENVIRONMENT, wait_until
from tests.support.nodes import free_port

USERS = ("postgres", "nobody")
DATABASE = "postgres"
"""Exists in every server."""


class PostgresServer:
    """One server. `uri` is its address for `mlflow server --backend-store-uri`."""

    def __init__(self, programs: Path, directory: Path, user: str | None) -> None:
        self._programs, self._directory, self._user = programs, directory, user
        self._log = directory / "log"
        self._process: subprocess.Popen[bytes] | None = None
        self.uri = f"postgresql+psycopg2://admin@/{DATABASE}?host={directory}"

    def create(self) -> None:
        """Create an empty database cluster. No password: only its user and root see the socket."""
        words = ("--username=admin", "--auth=trust", "--no-sync", "--encoding=UTF8")
        made = self._start("initdb", f"--pgdata={self._directory / 'data'}", *words)
        assert made.wait(timeout=60) == 0, self._log.read_text()

    def start(self) -> None:
        """Return when connections are accepted."""
        # fsync off: the test stops the server, not the machine.
        options = ("listen_addresses=", f"unix_socket_directories={self._directory}", "fsync=off")
        words = [word for option in options for word in ("-c", option)]
        self._process = self._start("postgres", "-D", str(self._directory / "data"), *words)
        wait_until(self._responds, timeout_seconds=60)

    def stop(self, how: signal.Signals = signal.SIGINT) -> None:
        """SIGINT disconnects all clients; SIGQUIT also skips the checkpoint, as a crash does."""
        if self._process is not None:
            self._process.send_signal(how)
            self._process.wait(timeout=60)
            self._process = None

    def query(self, sql: str, *values: object) -> list[tuple[Any, ...]]:
        import psycopg2

        connection = psycopg2.connect(host=str(self._directory), user="admin", dbname=DATABASE)
        try:
            with connection.cursor() as cursor:
                cursor.execute(sql, values)
                return list(cursor.fetchall())
        finally:
            connection.close()

    def _responds(self) -> bool:
        import psycopg2

        assert self._process is not None
        assert self._process.poll() is None, self._log.read_text()
        try:
            return bool(self.query("SELECT 1"))
        except psycopg2.OperationalError:
            return False

    def _start(self, program: str, *words: str) -> subprocess.Popen[bytes]:
        identity: dict[str, Any] = {}
        if self._user is not None:
            group = pwd.getpwnam(self._user).pw_gid
            identity = {"user": self._user, "group": group, "extra_groups": []}
        with self._log.open("ab") as log:
            return subprocess.Popen(
                [self._programs / program, *words],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self._directory,
                **identity,
            )


@contextmanager
def postgres_server() -> Iterator[PostgresServer]:
    """An empty server that runs. Skips the test if PostgreSQL is not installed."""
    pytest.importorskip("psycopg2", reason="psycopg2-binary is not installed")
    programs = _programs(sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True))
    user = _unprivileged_user() if os.geteuid() == 0 else None
    # Not in tmp_path: its parents are closed to other users, and paths of sockets are limited.
    directory = Path(tempfile.mkdtemp(prefix="txl-postgresql-", dir="/tmp"))
    server = PostgresServer(programs, directory, user)
    try:
        if user is not None:
            shutil.chown(directory, user)
        server.create()
        server.start()
        yield server
    finally:
        server.stop(signal.SIGQUIT)
        shutil.rmtree(directory)


def _programs(debian: Sequence[Path]) -> Path:
    """The directory of `initdb` and `postgres`; on Debian it is not in PATH."""
    if debian:
        return debian[0]
    if (program := shutil.which("postgres")) is None:
        pytest.skip("PostgreSQL is not installed (Debian: apt install postgresql)")
    return Path(program).resolve().parent


def _unprivileged_user() -> str:
    for name in USERS:
        try:
            return pwd.getpwnam(name).pw_name
        except KeyError:
            continue
    pytest.skip("PostgreSQL refuses to run as root, and no other user exists")


@contextmanager
def mlflow_server(database_uri: str, directory: Path) -> Iterator[str]:
    """`mlflow server` on 127.0.0.1; yields its URI once it responds. Its files are in `directory`.

    It creates its tables first, which takes seconds.
    """
    port = free_port()
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
