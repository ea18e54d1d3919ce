"""Chunks, long lines and long documents: bounded memory, no lost or split characters."""

import gzip
import hashlib
import io
import subprocess
import sys
from pathlib import Path

import pytest
import zstandard

from data_pipeline.readers import InputFile, Record, Reject, Source, read_text_chunks
from data_pipeline.readers.records import HELD_BYTES, MAX_RECORD_BYTES
from data_pipeline.readers.source import CHUNK_BYTES, lines_of
from tests.data_pipeline.readers.reading import one_file, read, texts


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
def test_a_document_too_long_to_hold_is_checked_and_read_in_chunks(
    tmp_path: Path, format_: str
) -> None:
    body = ("é😀x" * (HELD_BYTES // 7 + 100)).encode()  # no chunk ends between characters
    raw = (b" = T = \n" if format_ == "wikitext" else b"") + body
    path = tmp_path / "in.txt"
    path.write_bytes(b"short\n" * (format_ != "text") + raw)
    file = one_file(path, format_)
    record = read(file)[-1]
    assert isinstance(record, Record)
    assert record.text is None
    assert record.sha256 == hashlib.sha256(raw).digest()
    place = (record.offset, record.size, record.line)
    pieces = list(read_text_chunks(file, place))
    assert max(len(piece.encode()) for piece in pieces) <= CHUNK_BYTES + 3
    assert "".join(pieces).encode() == raw
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ValueError, match="ends 1 bytes before"):
        list(read_text_chunks(file, place))


def test_a_bad_byte_of_a_long_document_is_named(tmp_path: Path) -> None:
    at = HELD_BYTES + 12_345
    content = bytearray(b"x" * (HELD_BYTES + 2 * CHUNK_BYTES))
    content[at : at + 2] = b"\xc3\x28"
    (tmp_path / "in.txt").write_bytes(content)
    (records,) = read(one_file(tmp_path / "in.txt"))
    assert (records.byte, records.line) == (at, 0)
    assert "invalid UTF-8: byte 0xc3" in records.reason


def test_a_bad_byte_after_a_split_character_is_located(
    tmp_path: Path,
) -> None:
    torn = b"x" * (HELD_BYTES + 2 * CHUNK_BYTES - 1) + "é".encode()
    for content, at in (
        (torn[:-1] + b"\xff", len(torn) - 2),
        (torn[:-1], len(torn) - 2),
        (torn + b"\xff", len(torn)),
    ):
        (tmp_path / "in.txt").write_bytes(content)
        (records,) = read(one_file(tmp_path / "in.txt"))
        assert isinstance(records, Reject)
        assert records.byte == at


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
        "import resource, sys; from pathlib import Path\n"
        "from tests.data_pipeline.readers.reading import one_file, read\n"
        "import hashlib, pyarrow; before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "for r in read(one_file(sys.argv[1], sys.argv[2])): print(type(r).__name__, r.line)\n"
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
