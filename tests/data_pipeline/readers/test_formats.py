"""Text formats in any ranges and chunks, files that change or fail, long lines, an added format."""

import gzip
import hashlib
import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import zstandard
from hypothesis import example, given, settings
from hypothesis import strategies as st

from data_pipeline.errors import DataError, UnfinishedError
from data_pipeline.readers import FORMATS, InputFile, Reject, Source, format_names, scan_ranges
from data_pipeline.readers.formats import FileFormat
from data_pipeline.readers.source import CHUNK_BYTES, MAX_RECORD_BYTES, lines_of
from tests.data_pipeline.readers.reading import (
    Document,
    one_file,
    only_reject,
    read,
    split_at_reject,
    texts,
)

PAGE = Path(__file__).parents[3] / "docs" / "how_to" / "add_a_reader.md"
BOM = b"\xef\xbb\xbf"
LINE = st.one_of(
    st.sampled_from([b"", b" ", b"\r", BOM, b"\xff", b" = T = ", b" = = S = = ", b'{"text": 3}']),
    st.text(max_size=9).map(lambda text: json.dumps({"text": text}).encode()),
    st.binary(max_size=6),
)
ENDS = st.sampled_from([b"\n", b"\r\n", b"\n\n"])
CONTENT = st.tuples(
    st.sampled_from([b"", BOM]), st.lists(st.tuples(LINE, ENDS).map(b"".join), max_size=9), LINE
).map(lambda parts: parts[0] + b"".join(parts[1]) + parts[2])


@pytest.mark.parametrize("format_", ["lines", "jsonl", "wikitext"])
@settings(max_examples=80, deadline=None)
@given(content=CONTENT, unit_bytes=st.integers(1, 40))
@example(content=b"\n = T = ", unit_bytes=1)
@example(content=BOM + b" \n\n = T = \n = U = \n", unit_bytes=2)
@example(content=b"\n \nx\n = T = \n", unit_bytes=1)
@example(content=b"\n\n", unit_bytes=1)
def test_any_ranges_give_the_records_of_the_whole_file(
    tmp_path_factory: pytest.TempPathFactory, format_: str, content: bytes, unit_bytes: int
) -> None:
    path = tmp_path_factory.mktemp("ranges") / "in"
    path.write_bytes(content)
    file = one_file(path, format_)
    ranges = scan_ranges(file, unit_bytes)
    assert [ranges[0][0], *(stop for _, stop in ranges)][-1] == file.size
    assert read(file, unit_bytes=unit_bytes) == read(file)


@pytest.mark.parametrize("format_", ["text", "lines"])
@pytest.mark.parametrize("size", [100, 6000, 9000])
def test_a_file_that_changed_since_it_was_found_is_refused(
    tmp_path: Path, format_: str, size: int
) -> None:
    path = tmp_path / "in.txt"
    path.write_bytes(b"a line\n" * 1000)
    file = one_file(path, format_)
    path.write_bytes(b"a sea\n" * (size // 6))
    with pytest.raises(DataError, match=r"in\.txt changed while it was being read"):
        read(file, unit_bytes=1000)
    path.unlink()
    (reject,) = read(file)
    assert "cannot be read: No such file" in str(reject)


def test_a_named_pipe_is_rejected_without_waiting_for_a_writer(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "in.txt")
    assert only_reject(tmp_path / "in.txt").reason == "not a regular file"


@pytest.mark.fault_row(50)
@pytest.mark.parametrize("name", ["in.txt", "in.jsonl", "in.gz", "in.zst", "in.wiki"])
def test_a_failing_disk_stops_the_run_and_rejects_nothing(tmp_path: Path, name: str) -> None:
    (tmp_path / name).symlink_to("/proc/self/mem")  # reading there is an EIO
    with pytest.raises(UnfinishedError, match=rf"{name}: .*Input/output error"):
        read(one_file(tmp_path / name))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_that_may_not_be_read_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_text("x")
    (tmp_path / "in.txt").chmod(0)
    assert only_reject(tmp_path / "in.txt").reason == "cannot be read: Permission denied"


def test_the_help_lists_the_formats(txl: Callable[..., Any]) -> None:
    """They are written there, because the table imports numpy."""
    shown = " ".join(re.sub(r"[│\s]+", " ", txl("prepare", "--help").out).split())
    assert f"one of {', '.join(format_names())}. tar reads" in shown


# --- the format that docs/how_to/add_a_reader.md adds ---------------------------------------------


@pytest.fixture
def _fasta_is_added(monkeypatch: pytest.MonkeyPatch) -> None:
    module, line = re.findall(r"```python\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    names: dict[str, Any] = {"FileFormat": FileFormat}
    exec(module, names)
    for kind, about in eval("{" + line + "}", names).items():
        monkeypatch.setitem(FORMATS, kind, about)


@pytest.mark.usefixtures("_fasta_is_added")
def test_sequences_are_prepared_with_and_without_compression(
    txl: Callable[..., Any], tmp_path: Path
) -> None:
    content = b"\xef\xbb\xbf\n>one a sea\nACGT\r\nAC\n>two\n\nTT\n"
    (tmp_path / "in.fa").write_bytes(content)
    (tmp_path / "in.fa.gz").write_bytes(gzip.compress(content))
    for name in ("in.fa", "in.fa.gz"):
        assert texts(read(one_file(tmp_path / name))) == ["ACGTAC", "TT"]
        out = tmp_path / f"out-{name}"
        ended = txl("prepare", tmp_path / name, "--out", out, "--json")
        assert json.loads(ended.out)["formats"] == {"fasta": 1}
        assert json.loads(ended.out)["input"]["documents"] == 2
        assert f"{name}:1" in txl("data", "inspect", out).out


@pytest.mark.usefixtures("_fasta_is_added")
@pytest.mark.parametrize(
    ("content", "good", "cause"),
    [
        (b"ACGT\n", 0, "no line with > before the first sequence"),
        (b">one\nAC\n>two\n\xff\n", 1, "invalid UTF-8: byte 0xff"),
        (b">one\nAC\n>two\nA\xff\n", 1, "invalid UTF-8"),
    ],
)
def test_a_bad_sequence_is_rejected(tmp_path: Path, content: bytes, good: int, cause: str) -> None:
    (tmp_path / "in.fa").write_bytes(content)
    before, reject = split_at_reject(read(one_file(tmp_path / "in.fa")))
    assert len(before) == good
    assert cause in reject.reason


@settings(max_examples=60, deadline=None)
@given(content=CONTENT)
@example(content=BOM + b"one\r\n\n two \x1b\x0c\r\r\n\r\n \nthree")
def test_every_byte_of_lines_is_in_a_document_or_rejected_or_an_end(
    tmp_path_factory: pytest.TempPathFactory, content: bytes
) -> None:
    """Against the standard library's cutting of the same bytes."""
    path = tmp_path_factory.mktemp("lines") / "in"
    path.write_bytes(content)
    expected = []
    for line, raw in enumerate(content.removeprefix(BOM).split(b"\n"), start=1):
        last = line == content.count(b"\n") + 1
        body = raw if last else raw.removesuffix(b"\r")
        if body:
            try:
                expected.append((line, body.decode() if b"\0" not in body else None))
            except UnicodeDecodeError:
                expected.append((line, None))
    records = read(one_file(path, "lines"))
    assert [(record.line, getattr(record, "text", None)) for record in records] == expected


BLOCK_LINE = st.sampled_from(["a", "word  ", "é", " ", "", "\t", "x" * 30])


@settings(max_examples=100, deadline=None)
@given(
    lines=st.lists(BLOCK_LINE, max_size=20),
    end=st.sampled_from(["\n", "\r\n"]),
    has_last_end=st.booleans(),
)
def test_blank_lines_separate_documents(
    tmp_path_factory: pytest.TempPathFactory, lines: list[str], end: str, has_last_end: bool
) -> None:
    content = end.join(lines) + end * has_last_end
    numbered = enumerate(re.findall(r"[^\n]*\n|[^\n]+", content), start=1)
    groups = groupby(numbered, key=lambda line: bool(line[1].strip()))
    expected = [list(group) for is_text, group in groups if is_text]
    path = tmp_path_factory.mktemp("blocks") / "in.txt"
    path.write_bytes(BOM + content.encode())
    records = read(one_file(path, "blank_lines"))
    assert texts(records) == ["".join(text for _, text in group) for group in expected]
    assert [record.line for record in records] == [group[0][0] for group in expected]


def test_a_key_twice_in_an_object_is_named(tmp_path: Path) -> None:
    lines = b'{"text": "a", "x": {"k": 1, "k": 1}}\n{"text": "b", "text": "c"}\n'
    (tmp_path / "in.jsonl").write_bytes(lines + b'{"text": "d"}\n')
    one, two, _ = read(one_file(tmp_path / "in.jsonl"))
    assert isinstance(one, Reject)
    assert 'key "k" twice' in one.reason
    assert isinstance(two, Reject)
    assert (two.line, two.byte) == (2, 37)
    assert 'key "text" twice' in two.reason


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
