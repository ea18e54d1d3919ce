"""`--on ADDRESS` without a Ray cluster at ADDRESS is rejected within seconds. A private Ray can be
used by its launcher only, and leaves no process.
"""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Thread
from urllib.error import HTTPError
from urllib.request import urlopen

import psutil
import pytest

from cluster.connection import (
    RESPONSE_SECONDS,
    ray_connection,
    ray_processes,
    responds,
)
from data_pipeline.errors import ConfigError
from tests.support.commands import is_alive, wait_until


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


def assert_rejected(address: str, reason: str = "") -> None:
    message = f"no Ray cluster .* --on {address}: {reason}"
    with pytest.raises(ConfigError, match=message), ray_connection(address, num_cpus=1):
        raise AssertionError


@pytest.mark.parametrize(
    "answer", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n"], ids=["silent", "a web server"]
)
def test_a_server_that_is_not_a_ray_cluster_is_rejected_within_seconds(answer: bytes) -> None:
    with server(answer) as address:
        begin = time.monotonic()
        assert_rejected(address)
        assert time.monotonic() - begin < 2 * RESPONSE_SECONDS + 5


def test_an_address_without_a_server_or_without_a_port_is_rejected() -> None:
    with socket.create_server(("", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
    assert_rejected(address, "nothing answers")
    for malformed in ("127.0.0.1:", "host:port", "ray://127.0.0.1"):
        assert_rejected(malformed)


def test_a_grpc_server_responds() -> None:
    with server(bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))) as address:
        assert responds(address)


@pytest.mark.fault_row(43)
@pytest.mark.slow
def test_a_private_ray_listens_on_loopback_and_requires_its_token() -> None:
    with ray_connection(None, num_cpus=1):
        assert_unusable_without_token()
        processes = ray_processes()
        assert any("agent" in " ".join(process.cmdline()).lower() for process in processes)
    wait_until(lambda: not any(is_alive(process.pid) for process in processes))


def assert_unusable_without_token() -> None:
    import ray

    addresses = {
        connection.laddr.ip
        for process in (psutil.Process(), *ray_processes())
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
