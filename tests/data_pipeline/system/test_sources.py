"""Reading local files and URLs: addresses, retries, errors, and streams of decompressed bytes."""

import bz2
import gzip
import json
import lzma
import struct
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import s3fs
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from moto.server import ThreadedMotoServer
from pyarrow import parquet

from data_pipeline.errors import DataError, UnfinishedError
from data_pipeline.preparation.prepare import prepare_dataset
from data_pipeline.readers import Reject
from data_pipeline.shards.manifest import PrepareSettings
from data_pipeline.system import sources
from data_pipeline.system.sources import (
    SourceError,
    UnreachableError,
    file_system,
    is_read_failure,
    is_transient,
    reject_reason,
    retry_request,
    shown,
)
from tests.data_pipeline.conftest import WebFiles
from tests.data_pipeline.readers.reading import one_file, read, split_at_reject, texts
from tests.support.web_server import web_server

LINES = [f"line {number} " + "é" * number for number in range(600)]
"""Some 370 KB: three blocks of zstd."""

PLAIN = "".join(line + "\n" for line in LINES).encode()

COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    "bz2": bz2.compress,
    "gz": lambda raw: gzip.compress(raw, mtime=0),
    "xz": lzma.compress,
    "zst": zstandard.ZstdCompressor(write_checksum=True).compress,
}


class Requests:
    """A request that raises the given errors, one per attempt, and then returns 7."""

    def __init__(self, *errors: BaseException) -> None:
        self.attempts = 0
        self._errors: Iterator[BaseException] = iter(errors)

    def __call__(self) -> int:
        self.attempts += 1
        for error in self._errors:
            raise error
        return 7


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "_FIRST_WAIT_SECONDS", 0.001)


@pytest.mark.fault_row(19)
def test_a_request_is_retried_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    monkeypatch.setattr(time, "sleep", waits.append)
    requests = Requests(OSError(5, "reset"), ValueError("a client library's own error"))
    assert retry_request(requests) == 7
    assert requests.attempts == 3
    assert waits == [0.001, 0.002]


@pytest.mark.fault_row(19)
def test_the_third_failure_is_an_unreachable_error_without_secrets() -> None:
    requests = Requests(*[RuntimeError("GET https://me:secret@host/a?token=secret failed")] * 3)
    with pytest.raises(UnreachableError, match=r"3 attempts failed: GET https://host/a failed$"):
        retry_request(requests)
    assert requests.attempts == 3


@pytest.mark.parametrize("error", [FileNotFoundError(), PermissionError(), IsADirectoryError()])
def test_a_missing_or_forbidden_object_is_not_retried(error: OSError) -> None:
    requests = Requests(error)
    with pytest.raises(type(error), match=r"no such object|access denied|is a folder") as raised:
        retry_request(requests)
    assert (requests.attempts, raised.value.__cause__) == (1, error)


@pytest.mark.parametrize(
    ("status", "kind", "text"),
    [
        (404, FileNotFoundError, "no such object"),
        (403, PermissionError, "access denied"),
        (500, UnreachableError, "3 attempts failed"),
        (None, UnreachableError, "3 attempts failed"),
    ],
    ids=str,
)
def test_only_what_a_web_server_says_is_certain(
    status: int | None, kind: type[Exception], text: str
) -> None:
    """fsspec calls every failure "not found", also that of a server that is down (None)."""
    with ExitStack() as stack:
        url = stack.enter_context(web_server(lambda request: (status or 200, "")))
        if status is None:
            stack.close()
        with pytest.raises(kind, match=text):
            retry_request(lambda: file_system(url).info(f"{url}/a.txt"))


@pytest.mark.fault_row(44)
def test_passwords_queries_and_control_characters_are_not_displayed() -> None:
    assert shown("https://me:secret@host/a?token=secret") == "https://host/a"
    assert shown("s3://b/\x1b[2J") == r"s3://b/\x1b[2J"


@pytest.mark.parametrize(
    ("error", "transient", "read_failure"),
    [
        (UnreachableError("the connection broke"), True, True),
        (OSError(5, "Input/output error"), True, True),
        (SourceError("damaged gzip stream"), False, True),
        (PermissionError(13, "Permission denied"), False, True),
        (FileNotFoundError(2, "No such file"), False, False),
        (IsADirectoryError(21, "Is a directory"), False, False),
        (OSError(22, "Invalid argument"), False, True),
        (ValueError("wrong content"), False, False),
        (None, False, False),
    ],
)
def test_an_error_and_what_it_caused_are_classified_alike(
    error: Exception | None, transient: bool, read_failure: bool
) -> None:
    wrapped = ValueError("raised from it")
    wrapped.__cause__ = error
    for each in (error, wrapped):
        assert is_transient(each) == transient
        assert is_read_failure(each) == read_failure


def test_the_reason_of_an_os_error_is_readable() -> None:
    assert reject_reason(SourceError("truncated gzip stream")) == "truncated gzip stream"
    assert reject_reason(OSError(5, "Input/output error")) == "cannot be read: Input/output error"
    assert reject_reason(TimeoutError()) == "cannot be read: TimeoutError"


def jsonl(*texts: str) -> bytes:
    return b"".join(json.dumps({"text": text}).encode() + b"\n" for text in texts)


@pytest.mark.parametrize("suffix", COMPRESS)
@pytest.mark.parametrize("format_", ["text", "lines", "jsonl", "wikitext"])
def test_a_compressed_file_reads_as_the_plain_one(
    tmp_path: Path, suffix: str, format_: str
) -> None:
    plain = {
        "jsonl": jsonl(*LINES),
        "wikitext": b" = T = \n x \n = U = \n y",
    }.get(format_, PLAIN)
    (tmp_path / "in").write_bytes(plain)
    compress = COMPRESS[suffix]
    packed = compress(plain[:100]) + compress(b"") + compress(plain[100:])  # three in one file
    (tmp_path / f"in.{suffix}").write_bytes(packed)
    file = one_file(tmp_path / f"in.{suffix}", format_)
    assert file.compression == suffix
    expected = [(r.text, r.line) for r in read(one_file(tmp_path / "in", format_))]
    assert [(r.text, r.line) for r in read(file)] == expected


@pytest.mark.parametrize("suffix", COMPRESS)
def test_a_truncated_file_gives_its_intact_records_and_a_reject(
    tmp_path: Path, suffix: str
) -> None:
    packed = COMPRESS[suffix](PLAIN)
    path = tmp_path / f"in.{suffix}"
    path.write_bytes(packed)
    file = one_file(path, "lines")
    assert texts(read(file)) == LINES
    for size in [*range(0, len(packed), 37), *range(len(packed) - 12, len(packed))]:
        path.write_bytes(packed[:size])
        before, reject = split_at_reject(read(one_file(path, "lines")))
        assert before == LINES[: len(before)]
        assert "truncated" in reject.reason
        if before:
            assert reject.line == len(before) + 1
            assert reject.byte == sum(len(line.encode()) + 1 for line in LINES[: len(before)])
    # The end mark alone is cut. zstd gives its last block, of 128 KiB at most, only with it.
    assert len(before) == len(LINES) if suffix == "gz" else len(before) > len(LINES) / 2


@pytest.mark.parametrize("suffix", COMPRESS)
def test_half_a_text_and_bytes_that_are_no_stream_are_rejected(tmp_path: Path, suffix: str) -> None:
    path, packed = tmp_path / f"in.txt.{suffix}", COMPRESS[suffix](PLAIN)
    # Longer than the header of an xz stream.
    for content, reason in ((packed[:-9], "truncated"), (b"text that is plain", "damaged")):
        path.write_bytes(content)
        (record,) = read(one_file(path))
        assert isinstance(record, Reject)
        assert reason in record.reason
    path.write_bytes(packed + b"garbage, and more of it")
    before, reject = split_at_reject(read(one_file(path, "lines")))
    assert before == LINES
    assert reject.line == len(LINES) + 1
    assert "damaged" in reject.reason


@pytest.mark.parametrize("suffix", COMPRESS)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_a_flipped_bit_is_rejected_or_changes_no_text(
    tmp_path_factory: pytest.TempPathFactory, suffix: str, data: st.DataObject
) -> None:
    packed = bytearray(COMPRESS[suffix](PLAIN))
    # Ten bytes of a gzip header say when and where it was made: no data depends on them.
    bit = data.draw(st.integers(80 if suffix == "gz" else 0, len(packed) * 8 - 1))
    packed[bit // 8] ^= 1 << bit % 8
    path = tmp_path_factory.mktemp("flipped") / f"in.{suffix}"
    path.write_bytes(packed)
    records = read(one_file(path, "lines"))
    # Some bits of zstd decide nothing; then the checksum agrees and the text is right.
    assert any(isinstance(record, Reject) for record in records) or texts(records) == LINES


def test_skippable_frames_of_zstd_are_ignored(tmp_path: Path) -> None:
    foreign = struct.pack("<II", 0x184D2A53, 5) + b"12345"
    packed = foreign + COMPRESS["zst"](PLAIN) + foreign
    (tmp_path / "in.zst").write_bytes(packed)
    assert texts(read(one_file(tmp_path / "in.zst", "lines"))) == LINES


@pytest.mark.fault_row(20)
@pytest.mark.parametrize(
    ("descriptor", "rest", "reason"),
    [
        (0b1110_0000, struct.pack("<Q", 100 * 2**30), "requires too much memory"),
        (0b1100_0000, bytes([0x60]) + struct.pack("<Q", 100 * 2**30), "truncated"),
        (0b0000_0000, bytes([0x90]), "requires too much memory"),
        (0b0000_0000, bytes([0xFF]), "requires too much memory"),
    ],
)
def test_a_frame_of_zstd_that_claims_100_gigabytes_takes_no_memory(
    tmp_path: Path, descriptor: int, rest: bytes, reason: str
) -> None:
    (tmp_path / "in.zst").write_bytes(b"\x28\xb5\x2f\xfd" + bytes([descriptor]) + rest)
    tracemalloc.start()
    (records,) = read(one_file(tmp_path / "in.zst"))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert isinstance(records, Reject)
    assert reason in records.reason
    assert peak < 4 * 2**20


@pytest.mark.parametrize("suffix", ["bz2", "xz"])
def test_a_bomb_is_refused_without_being_expanded(
    tmp_path: Path, suffix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("data_pipeline.system.sources.MIN_BYTES", 2**20)
    (tmp_path / f"in.{suffix}").write_bytes(COMPRESS[suffix](b"x" * 2**24))
    (reject,) = read(one_file(tmp_path / f"in.{suffix}"))
    assert "refused as a decompression bomb" in str(reject)


def test_a_padding_of_xz_may_be_longer_than_a_read(tmp_path: Path) -> None:
    packed = lzma.compress(b"one\n") + bytes(2**19) + lzma.compress(b"two\n") + bytes(2**19)
    (tmp_path / "in.xz").write_bytes(packed)
    assert [record.text for record in read(one_file(tmp_path / "in.xz", "lines"))] == ["one", "two"]


WEB_LINES = [f"line {number}" for number in range(50)]

WEB_JSONL = jsonl(*WEB_LINES)


@pytest.fixture
def page(web: tuple[str, type[WebFiles]], tmp_path: Path) -> str:
    """The address of a JSONL file with a secret in its query."""
    (tmp_path / "lines.jsonl").write_bytes(WEB_JSONL)
    return f"{web[0]}/lines.jsonl?token=secret"


def test_a_web_page_is_read_by_its_address(page: str) -> None:
    file = one_file(page)
    assert (file.name, file.kind) == ("lines.jsonl", "jsonl")
    assert texts(read(file)) == WEB_LINES


@pytest.mark.fault_row(19)
def test_a_server_that_keeps_failing_and_a_missing_page_are_named_without_secrets(
    page: str, web: tuple[str, type[WebFiles]]
) -> None:
    web[1].is_down = True
    with pytest.raises(DataError, match=r"lines\.jsonl: 3 attempts failed: 503") as caught:
        one_file(page)
    assert "secret" not in str(caught.value)
    web[1].is_down = False
    with pytest.raises(DataError, match=r"missing\.jsonl: cannot be read: no such object"):
        one_file(f"{web[0]}/missing.jsonl")


def test_a_connection_that_breaks_is_not_the_end_of_the_file(
    page: str, web: tuple[str, type[WebFiles]]
) -> None:
    file = one_file(page)
    web[1].broken = 10**6
    with pytest.raises(UnfinishedError, match=r"lines\.jsonl: 3 attempts failed") as caught:
        read(file)
    assert "secret" not in str(caught.value)


def test_a_corpus_in_s3_is_prepared_as_the_same_folder_is(
    bucket: Any, txl: Callable[..., Any], tmp_path: Path
) -> None:
    folder = tmp_path / "corpus"
    (folder / "sub").mkdir(parents=True)
    (folder / "a.jsonl").write_bytes(WEB_JSONL)
    (folder / "sub" / "b.txt").write_text("café")
    (folder / "sub" / "c.jsonl.gz").write_bytes(gzip.compress(WEB_JSONL))
    (folder / ".hidden").write_text("x")
    parquet.write_table(pa.table({"text": WEB_LINES}), folder / "d.parquet")
    bucket.put(str(folder), "bucket/corpus", recursive=True)
    for source, out in ((folder, "local"), ("s3://bucket/corpus", "s3")):
        ended = txl("prepare", source, "--out", tmp_path / out, "--shuffle", "1")
        assert ended.code == 0, ended.err
    written = [
        {path.name: path.read_bytes() for path in (tmp_path / out).iterdir()}
        for out in ("local", "s3")
    ]
    assert written[0] == written[1]


@pytest.mark.parametrize("name", ["a.jsonl", "b.jsonl.gz", "c.parquet"])
def test_a_store_that_stops_answering_stops_the_run_and_keeps_what_is_finished(
    s3_server: ThreadedMotoServer,
    bucket: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
) -> None:
    monkeypatch.setattr(s3fs.S3FileSystem, "retries", 1)  # with waits of its own
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    s3fs.S3FileSystem.clear_instance_cache()
    monkeypatch.setattr("data_pipeline.preparation.scan.MAX_RANGES_PER_UNIT", 1)
    (tmp_path / "a.jsonl").write_bytes(WEB_JSONL)
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(WEB_JSONL))
    parquet.write_table(pa.table({"text": WEB_LINES}), tmp_path / "c.parquet")
    for key in ("0.jsonl", f"1{name[1:]}"):
        bucket.put(str(tmp_path / (name if key[0] == "1" else "a.jsonl")), f"bucket/x/{key}")

    def cut_off(stage: str, done: int, total: int) -> None:
        if stage == "reading" and done:
            s3_server.stop()

    out = tmp_path / "out"
    with pytest.raises(UnfinishedError, match=rf"1{name[1:]}: 3 attempts failed"):
        prepare_dataset(["s3://bucket/x"], out, PrepareSettings(), progress=cut_off)
    assert len(list(out.glob(".staging.tmp/units/*.scan.json"))) == 1
