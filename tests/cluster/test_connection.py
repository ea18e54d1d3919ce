"""`--on ADDRESS` without a Ray cluster at ADDRESS is rejected within seconds."""

import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Thread

import pytest

from cluster.connection import RESPONSE_SECONDS, ray_connection, responds
from data_pipeline.errors import ConfigError


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
