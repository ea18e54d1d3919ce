"""A network that truncates answers: its datasets are reported as unread, not as damaged."""

import json
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import s3fs
from moto.server import ThreadedMotoServer

from data_pipeline.shards.data_commands import push_dataset
from data_pipeline.shards.manifest import ShardManifest
from data_pipeline.system import sources
from tests.data_pipeline.conftest import corpus, dataset, s3_server, txl  # noqa: F401 - fixtures

URL = "s3://bucket/data"
pytestmark = pytest.mark.fault


class CuttingProxy:
    """Forwards connections. Sends half of the answer to a request for which `cuts` is true."""

    def __init__(self, host: str, port: int) -> None:
        self.target = (host, port)
        self.cuts: Callable[[bytes], bool] = lambda request: False
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._thread = threading.Thread(target=self._accept)
        self._thread.start()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        """Forward one request, send its answer or the header and half of the body, and close."""
        with client, socket.create_connection(self.target) as server:
            request = b""
            while b"\r\n\r\n" not in request:
                request += client.recv(2**16)
            server.sendall(request.replace(b"\r\n", b"\r\nConnection: close\r\n", 1))
            answer = b"".join(iter(lambda: server.recv(2**16), b""))
            head, blank, body = answer.partition(b"\r\n\r\n")
            if self.cuts(request.partition(b"\r\n")[0]):
                body = body[: len(body) // 2]
            client.sendall(head + blank + body)


@pytest.fixture
def proxy(
    s3_server: ThreadedMotoServer,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[CuttingProxy]:
    proxy = CuttingProxy(*s3_server.get_host_and_port())
    monkeypatch.setattr(sources, "_FIRST_WAIT_SECONDS", 0.01)
    monkeypatch.setattr(s3fs.S3FileSystem, "retries", 1)
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    yield proxy
    proxy.close()


@pytest.mark.fault_row(19)
@pytest.mark.parametrize("cut", [b".tar.zst", b".index.safetensors", b"tokenizer.json", b"GET /"])
def test_verify_reports_truncated_responses_as_unread(
    proxy: CuttingProxy,
    dataset: tuple[Path, ShardManifest],  # noqa: F811
    txl: Callable[..., Any],  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    cut: bytes,
) -> None:
    s3fs.S3FileSystem().mkdir("bucket")
    push_dataset(dataset[0], URL)
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{proxy.port}")
    s3fs.S3FileSystem.clear_instance_cache()
    assert txl("data", "verify", URL).code == 0
    proxy.cuts = lambda request: request.startswith(b"GET") and cut in request
    ended = txl("data", "verify", URL)
    assert ended.code == 1, ended.err
    assert "could not be read now" in ended.err
    assert "Restore" not in ended.err
    if cut != b"GET /":
        result = json.loads(txl("data", "verify", URL, "--json").out)
        assert (result["ok"], result["problems"]) == (False, [])
        assert len(result["unread"]) == (1 if cut == b"tokenizer.json" else 4)
    proxy.cuts = lambda request: False
    assert txl("data", "verify", URL).code == 0
