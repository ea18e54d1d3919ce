"""`--on ADDRESS` without a Ray cluster at ADDRESS is rejected within seconds. A private Ray can be
used by its launcher only, and the next launcher cleans up.
"""

import errno
import fcntl
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from urllib.error import HTTPError
from urllib.request import urlopen

import psutil
import pytest

from cluster.connection import (
    RESPONSE_SECONDS,
    TOKEN_VARIABLE,
    access_token,
    clean_up_dead_launchers,
    ray_connection,
    ray_processes,
    responds,
)
from data_pipeline.errors import ConfigError
from tests.support.commands import ENVIRONMENT, is_alive


@contextmanager
def server(answer: bytes) -> Iterator[str]:
    """A server that reads one request, sends `answer`, and keeps the connection open."""
    connections = []

    def serve() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            connections.append(connection)
            connection.recv(100)
            connection.sendall(answer)

    with socket.create_server(("", 0)) as listener:
        Thread(target=serve, daemon=True).start()
        yield f"127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)
    for connection in connections:
        connection.close()


@pytest.mark.parametrize(
    "answer", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n"], ids=["silent", "a web server"]
)
def test_a_server_that_is_not_a_ray_cluster_is_rejected_within_seconds(answer: bytes) -> None:
    with server(answer) as address:
        begin = time.monotonic()
        with pytest.raises(ConfigError, match=f"no Ray cluster .* --on {address}"):  # noqa: SIM117
            with ray_connection(address, num_cpus=1):
                raise AssertionError
        assert time.monotonic() - begin < 2 * RESPONSE_SECONDS + 5


def test_an_address_without_a_server_is_rejected() -> None:
    with socket.create_server(("", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
    with pytest.raises(ConfigError, match=f"no Ray cluster .* --on {address}: nothing answers"):  # noqa: SIM117
        with ray_connection(address, num_cpus=1):
            raise AssertionError


@pytest.mark.parametrize("address", ["127.0.0.1:", "host:port", "ray://127.0.0.1"])
def test_a_malformed_address_is_rejected(address: str) -> None:
    with pytest.raises(ConfigError, match=f"--on {address}"), ray_connection(address, num_cpus=1):
        raise AssertionError


def test_a_grpc_server_responds() -> None:
    with server(bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))) as address:
        assert responds(address)


LAUNCHER = (
    "import time; from cluster.connection import access_token; print(access_token(), flush=True); "
    "time.sleep(600)"
)


@pytest.fixture
def launcher(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """A process with its token folder in `tmp_path`."""
    with subprocess.Popen(
        [sys.executable, "-c", LAUNCHER],
        stdout=subprocess.PIPE,
        text=True,
        env={**ENVIRONMENT, "TMPDIR": str(tmp_path)},
    ) as process:
        assert process.stdout is not None
        yield process, Path(process.stdout.readline().strip())
        process.kill()


def start(title: str, token: Path) -> subprocess.Popen[bytes]:
    """A process called `title` that was started with `token`."""
    return subprocess.Popen(
        [title, "600"],
        executable=shutil.which("sleep"),
        env={**ENVIRONMENT, TOKEN_VARIABLE: str(token)},
    )


def test_the_token_folder_and_the_ray_processes_of_a_killed_launcher_are_removed(
    launcher: tuple[subprocess.Popen[str], Path], tmp_path: Path
) -> None:
    process, token = launcher
    assert token.parent.parent == tmp_path
    assert token.stat().st_mode & 0o077 == 0
    agent, sender = start("ray::DashboardAgent", token), start("tracking-sender", token)
    stranger = start("ray::DashboardAgent", tmp_path / "token")
    unrelated = tmp_path / "txl-ray-of-somebody"
    unrelated.mkdir()
    try:
        clean_up_dead_launchers(tmp_path)
        assert token.exists(), "the launcher is alive"
        assert all(is_alive(one.pid) for one in (agent, sender, stranger))
        process.kill()
        process.wait()
        clean_up_dead_launchers(tmp_path)
        assert not is_alive(agent.pid)
        assert [path.name for path in tmp_path.iterdir()] == [unrelated.name]
        assert is_alive(sender.pid), "not a process of Ray"
        assert is_alive(stranger.pid), "started with another token"
    finally:
        for one in (agent, sender, stranger):
            one.kill()
            one.wait()


@pytest.mark.fault_row(43)
@pytest.mark.slow
def test_a_private_ray_listens_on_loopback_and_requires_its_token() -> None:
    with ray_connection(None, num_cpus=1):
        assert_unusable_without_token()


def assert_unusable_without_token() -> None:
    import ray

    launcher = psutil.Process()
    addresses = {
        connection.laddr.ip
        for process in (launcher, *ray_processes(access_token()))
        for connection in process.net_connections()
        if connection.status == psutil.CONN_LISTEN
    }
    assert addresses == {"127.0.0.1", "::ffff:127.0.0.1"}
    context = ray.get_runtime_context()
    for path in ("api/version", "api/jobs/", "nodes?view=summary"):
        with pytest.raises(HTTPError, match="401"):
            urlopen(f"http://{ray._private.worker.get_dashboard_url()}/{path}")
    program = f"from ray._raylet import GcsClient; GcsClient(address='{context.gcs_address}')"
    environment = {name: text for name, text in os.environ.items() if not name.startswith("RAY_")}
    ended = subprocess.run(
        [sys.executable, "-c", program],
        check=False,
        capture_output=True,
        text=True,
        env={**environment, "HOME": "/nonexistent"},
    )
    assert ended.returncode == 1
    assert "AuthenticationError" in ended.stderr


def test_without_locks_no_launcher_is_taken_for_dead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    folder = tmp_path / "txl-ray-live"
    folder.mkdir()
    for name in ("lock", "token"):
        (folder / name).touch()
    monkeypatch.setattr(fcntl, "flock", refuse)
    clean_up_dead_launchers(tmp_path)
    assert (folder / "token").exists()
