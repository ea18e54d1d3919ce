"""Object stores and web servers, all on 127.0.0.1: moto's S3 and the standard library's HTTP."""

import gzip
import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import s3fs
from moto.server import ThreadedMotoServer
from pyarrow import parquet

from data_pipeline.errors import DataError, UnfinishedError
from data_pipeline.preparation.prepare import prepare_dataset
from data_pipeline.preparation.settings import PrepareSettings
from data_pipeline.readers import Reject, find_files
from data_pipeline.storage import urls
from tests.data_pipeline.readers.reading import one_file, read, texts

LINES = [f"line {number}" for number in range(50)]
JSONL = b"".join(json.dumps({"text": line}).encode() + b"\n" for line in LINES)


def test_a_corpus_in_s3_is_prepared_as_the_same_folder_is(
    bucket: Any, txl: Callable[..., Any], tmp_path: Path
) -> None:
    folder = tmp_path / "corpus"
    (folder / "sub").mkdir(parents=True)
    (folder / "a.jsonl").write_bytes(JSONL)
    (folder / "sub" / "b.txt").write_text("café")
    (folder / "sub" / "c.jsonl.gz").write_bytes(gzip.compress(JSONL))
    (folder / ".hidden").write_text("x")
    parquet.write_table(pa.table({"text": LINES}), folder / "d.parquet")
    bucket.put(str(folder), "bucket/corpus", recursive=True)
    for source, out in ((folder, "local"), ("s3://bucket/corpus", "s3")):
        ended = txl("prepare", source, "--out", tmp_path / out, "--shuffle", "1")
        assert ended.code == 0, ended.err
    written = [
        {path.name: path.read_bytes() for path in (tmp_path / out).iterdir()}
        for out in ("local", "s3")
    ]
    assert written[0] == written[1]


def test_an_object_that_was_replaced_by_one_of_its_size_is_seen_to_have_changed(
    bucket: Any,
) -> None:
    bucket.pipe("bucket/x/a.txt", b"one")
    urls = ("s3://bucket/x/a.txt", "s3://bucket/x")
    before = [one_file(url).mark for url in urls]
    assert before == [one_file(url).mark for url in urls]
    bucket.pipe("bucket/x/a.txt", b"two")
    after = [one_file(url).mark for url in urls]
    assert all(mark and mark != old for mark, old in zip(after, before, strict=True))


def test_keys_patterns_and_failures_of_s3(bucket: Any) -> None:
    bucket.pipe({"bucket/x/a.jsonl": JSONL, "bucket/x/y/b.jsonl": JSONL, "bucket/x/c.txt": b"c"})
    file = one_file("s3://bucket/x/a.jsonl")
    assert (file.name, file.kind, file.size, file.rereadable) == (
        "a.jsonl",
        "jsonl",
        len(JSONL),
        False,
    )
    assert texts(read(file)) == LINES
    found = find_files(["s3://bucket/x/**/*.jsonl"], format="auto", exclude=Path("/nowhere"))
    assert [file.name for file in found.files] == ["a.jsonl", "y/b.jsonl"]
    with pytest.raises(DataError, match="s3://bucket/nothing: cannot be read: FileNotFoundError"):
        one_file("s3://bucket/nothing")
    bucket.rm("bucket/x/a.jsonl")
    (reject,) = read(file)
    assert isinstance(reject, Reject)
    assert "cannot be read" in reject.reason


class _Page(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    failures = 0
    """Requests still to be answered with 503."""
    cut = False

    def do_GET(self) -> None:
        if type(self).failures:
            type(self).failures -= 1
            self.send_response(503)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        if "missing" in self.path:
            self.send_error(404)
            return
        self.send_response(200)
        self.send_header("Content-Length", str(len(JSONL)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(JSONL[:100] if self.cut else JSONL)
            self.close_connection = self.cut

    do_HEAD = do_GET

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def page(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(urls, "_FIRST_WAIT_SECONDS", 0.01)
    monkeypatch.setattr(_Page, "failures", 0)
    monkeypatch.setattr(_Page, "cut", False)
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Page)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()
    thread.join()


def test_a_web_page_is_read_by_its_address(page: str) -> None:
    file = one_file(f"{page}/folder/lines.jsonl?token=secret")
    assert (file.name, file.kind) == ("lines.jsonl", "jsonl")
    assert texts(read(file)) == LINES


def test_a_server_that_fails_for_a_moment_is_asked_again(page: str) -> None:
    file = one_file(f"{page}/lines.jsonl")
    _Page.failures = 1
    assert texts(read(file)) == LINES


def test_a_server_that_goes_on_failing_is_named_without_secrets(page: str) -> None:
    _Page.failures = 1000
    with pytest.raises(DataError, match=r"lines\.jsonl: cannot be read") as caught:
        one_file(f"{page}/lines.jsonl?token=secret")
    assert "secret" not in str(caught.value)


def test_a_page_that_is_not_there_is_named(page: str) -> None:
    with pytest.raises(DataError, match=r"missing\.jsonl: cannot be read"):
        one_file(f"{page}/missing.jsonl")


def test_a_connection_that_breaks_is_no_end_of_the_file(page: str) -> None:
    file = one_file(f"{page}/lines.jsonl?token=secret")
    _Page.cut = True
    with pytest.raises(UnfinishedError, match=r"lines\.jsonl: cannot be read after 3") as caught:
        read(file)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("name", ["a.jsonl", "b.jsonl.gz", "c.parquet"])
def test_a_store_that_stops_answering_stops_the_run_and_keeps_what_is_finished(
    s3_server: ThreadedMotoServer,
    bucket: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
) -> None:
    monkeypatch.setattr(urls, "_FIRST_WAIT_SECONDS", 0.01)
    monkeypatch.setattr(s3fs.S3FileSystem, "retries", 1)  # with waits of its own
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    s3fs.S3FileSystem.clear_instance_cache()
    monkeypatch.setattr("data_pipeline.preparation.scan.MAX_PARTS", 1)
    (tmp_path / "a.jsonl").write_bytes(JSONL)
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(JSONL))
    parquet.write_table(pa.table({"text": LINES}), tmp_path / "c.parquet")
    for key in ("0.jsonl", f"1{name[1:]}"):
        bucket.put(str(tmp_path / (name if key[0] == "1" else "a.jsonl")), f"bucket/x/{key}")

    def cut_off(what: str, done: int, total: int) -> None:
        if what == "reading" and done:
            s3_server.stop()

    out = tmp_path / "out"
    with pytest.raises(UnfinishedError, match=rf"1{name[1:]}: cannot be read after 3 attempts"):
        prepare_dataset(["s3://bucket/x"], out, PrepareSettings(), progress=cut_off)
    assert len(list(out.glob(".staging.tmp/units/*.scan.json"))) == 1
