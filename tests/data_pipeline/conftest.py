"""Small corpora and datasets on disk, and the command line in this process."""

import os
import re
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import s3fs
from moto.server import ThreadedMotoServer

from data_pipeline.preparation.prepare import prepare_dataset
from data_pipeline.shards.manifest import PrepareSettings, ShardManifest

SENTENCE = "Gathering, the grey sea; 潮は満ちる. "


class Ended(NamedTuple):
    code: int
    out: str
    err: str


@pytest.fixture(autouse=True)
def _no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """A killed process loses nothing that was written; only a power cut would, untested here."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.fixture
def txl(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., Ended]:
    """txl("prepare", path, ...) runs the command line and returns how it ended."""

    def run(*arguments: object) -> Ended:
        from txl_dist.cli.app import main

        monkeypatch.setattr(sys, "argv", ["txl", *map(str, arguments)])
        capsys.readouterr()
        code = 0
        try:
            main()
        except SystemExit as end:
            code = int(end.code or 0)
        return Ended(code, *capsys.readouterr())

    return run


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """Eleven text files of different lengths in two folders, one longer than a small block."""
    folder = tmp_path / "corpus"
    (folder / "sub").mkdir(parents=True)
    for number in range(11):
        place = folder / ("sub" if number % 2 else "") / f"{number:02d}.txt"
        place.write_text(f"[{number}] " + SENTENCE * (3 + 7 * number), encoding="utf-8")
    return folder


@pytest.fixture
def dataset(corpus: Path, tmp_path: Path) -> tuple[Path, ShardManifest]:
    """The corpus in three train shards and one of valid, each of several blocks and frames."""
    out = tmp_path / "data"
    settings = PrepareSettings(split={"valid": 0.3}, shard_bytes=8_000, block_bytes=3_000)
    return out, prepare_dataset([corpus], out, settings).manifest


@pytest.fixture
def s3_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[ThreadedMotoServer]:
    """An S3 on 127.0.0.1 that fsspec finds by the environment, as a user sets it."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    reset = urllib.request.Request(f"http://{host}:{port}/moto-api/reset", method="POST")
    urllib.request.urlopen(reset).close()  # moto's buckets outlive its servers
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "nobody")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "nothing")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    s3fs.S3FileSystem.clear_instance_cache()
    yield server
    s3fs.S3FileSystem.clear_instance_cache()
    server.stop()


@pytest.fixture
def bucket(s3_server: ThreadedMotoServer) -> Any:
    """A file system with one bucket, `bucket`."""
    system = s3fs.S3FileSystem(use_listings_cache=False)
    system.mkdir("bucket")
    return system


class WebFiles(SimpleHTTPRequestHandler):
    """Static files with byte ranges; every answer is noted."""

    sent: list[tuple[str, int, int]]
    """Name, first byte, number of bytes."""
    broken: int = 0
    """Requests still to be cut short."""
    ranges: bool = True
    honest: bool = False
    """Whether a broken answer says how short it is, as some proxies do."""
    breaks: Callable[[str, bool], bool] = staticmethod(lambda name, is_range: True)
    """(name, whether a range is asked for) -> whether the answer may be broken."""

    is_down: bool = False
    """Whether every request is answered with 503."""

    def do_GET(self) -> None:
        if self.is_down:
            self.send_error(503)
            return
        path = Path(self.translate_path(self.path.partition("?")[0]))
        if not path.is_file():
            self.send_error(404)
            return
        data, first = path.read_bytes(), 0
        wanted = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if wanted and self.ranges:
            first = int(wanted[1])
            data = data[first : int(wanted[2]) + 1]
        cut = self.command == "GET" and type(self).broken > 0
        cut = cut and self.breaks(path.name, bool(wanted))
        type(self).broken -= cut
        sent = data[: len(data) // 2] if cut else data
        self.send_response(206 if wanted and self.ranges else 200)
        self.send_header("Content-Length", str(len(sent if self.honest else data)))
        self.end_headers()
        if self.command == "GET":
            self.sent.append((path.name, first, len(data)))
            self.wfile.write(sent)

    do_HEAD = do_GET

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def web(tmp_path: Path) -> Iterator[tuple[str, type[WebFiles]]]:
    """The address of the test's directory, and the class of its handler."""
    handler = type("_TestFiles", (WebFiles,), {"sent": [], "broken": 0})
    server = ThreadingHTTPServer(
        ("127.0.0.1", 0), lambda *arguments: handler(*arguments, directory=str(tmp_path))
    )
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}", handler
    server.shutdown()
    server.server_close()
    thread.join()
