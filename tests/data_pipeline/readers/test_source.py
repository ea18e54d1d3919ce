"""Chunks, long lines and long documents: bounded memory, no lost or split characters."""

import gzip
import hashlib
import io
import subprocess
import sys
from pathlib import Path

import pytest
import zstandard

from data_pipeline.readers import InputFile, Reject, Source
from data_pipeline.readers.source import CHUNK_BYTES, MAX_RECORD_BYTES, lines_of
from tests.data_pipeline.readers.reading import Document, one_file, only_reject, read, texts


class CountsBytes(io.BytesIO):
    read_bytes = 0

    def readline(self, size: int | None = -1) -> bytes:
        raw = super().readline(size)
        self.read_bytes += len(raw)
        return raw


def test_a_line_of_many_ranges_is_read_twice_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("data_pipeline.readers.source.CHUNK_BYTES", 8)
    content = b"x" * 2000
    stream = CountsBytes(content + b"\nend")
    records = []
    for start in range(0, len(content), 20):
        stream.seek(0)
        source = Source(InputFile("in", "in"), "text", start, start + 20, stream=stream)
        records += [line.offset for line in lines_of(source)]
    assert stream.read_bytes < 2.5 * len(content)
    assert records == [0]


@pytest.mark.parametrize("format_", ["text", "wikitext"])
def test_a_document_of_many_chunks_is_checked_and_written(tmp_path: Path, format_: str) -> None:
    body = "é😀x" * (3 * CHUNK_BYTES // 7 + 100)  # no chunk ends between characters
    raw = " = T = \n" * (format_ == "wikitext") + body
    path = tmp_path / "in.txt"
    path.write_text("short\n" * (format_ != "text") + raw)
    record = read(one_file(path, format_))[-1]
    assert isinstance(record, Document)
    assert record.text == raw
    assert record.sha256 == hashlib.sha256(raw.encode()).digest()


TORN = b"x" * (2 * CHUNK_BYTES - 1) + "é".encode()
BAD_BYTES = {
    "inside": (b"x" * 1_500_000 + b"\xc3\x28", 1_500_000),
    "second half of a character": (TORN[:-1] + b"\xff", len(TORN) - 2),
    "half a character at the end": (TORN[:-1], len(TORN) - 2),
    "after a split character": (TORN + b"\xff", len(TORN)),
    "NUL": (TORN + b"\0", len(TORN)),
}


@pytest.mark.parametrize(("content", "at"), BAD_BYTES.values(), ids=BAD_BYTES)
def test_a_bad_byte_of_a_long_document_is_located(tmp_path: Path, content: bytes, at: int) -> None:
    (tmp_path / "in.txt").write_bytes(content)
    reject = only_reject(tmp_path / "in.txt")
    assert (reject.byte, reject.line) == (at, 0)
    assert ("NUL" if content.endswith(b"\0") else "invalid UTF-8: byte 0x") in reject.reason


@pytest.mark.parametrize(
    ("format_", "after"),
    [("lines", ['{"text": "next"}']), ("jsonl", ["next"]), ("wikitext", [])],
)
@pytest.mark.parametrize("unit_bytes", [30, 10**6])
def test_a_line_above_the_limit_is_rejected_and_the_next_one_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, format_: str, after: list[str], unit_bytes: int
) -> None:
    monkeypatch.setattr("data_pipeline.readers.source.MAX_RECORD_BYTES", 40)
    (tmp_path / "in").write_bytes(b'{"text": "' + b"x" * 500 + b'"}\n{"text": "next"}\n')
    reject, *good = read(one_file(tmp_path / "in", format_), unit_bytes=unit_bytes)
    assert isinstance(reject, Reject)
    assert (reject.line, "longer than 40 bytes" in reject.reason) == (1, True)
    assert texts(good) == after


@pytest.mark.fault_row(47)
@pytest.mark.slow
@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
@pytest.mark.parametrize("format_", ["text", "lines", "jsonl", "wikitext"])
def test_a_line_of_a_gigabyte_is_read_or_refused_in_bounded_memory(
    tmp_path: Path, suffix: str, format_: str
) -> None:
    path = tmp_path / f"in{suffix}"
    opener = {"": open, ".gz": gzip.open, ".zst": zstandard.open}[suffix]
    with opener(path, "wb") as stream:  # type: ignore[operator]
        for _ in range(1024):
            stream.write(b"a" * 2**20)
        stream.write(b"\nsmall\n")
    code = (
        "import resource, sys\n"
        "from data_pipeline.readers import Source, read_records\n"
        "from tests.data_pipeline.readers.reading import one_file\n"
        "import pyarrow; before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "source = Source(one_file(sys.argv[1], sys.argv[2]), texts=open('/dev/null', 'wb'))\n"
        "for r in read_records(source): print(type(r).__name__, r.line)\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)"
    )
    command = [sys.executable, "-c", code, str(path), format_]
    ended = subprocess.run(command, capture_output=True, text=True, check=True)
    *records, grown_kib = ended.stdout.split("\n")[:-1]
    held = 0 if format_ == "text" else 3 * MAX_RECORD_BYTES // 1024
    assert int(grown_kib) < 120 * 1024 + held
    expected = {
        "text": ["Record 0"],
        "lines": ["Reject 1", "Record 2"],
        "jsonl": ["Reject 1", "Reject 2"],
        "wikitext": ["Reject 1"],
    }
    assert records == expected[format_]
