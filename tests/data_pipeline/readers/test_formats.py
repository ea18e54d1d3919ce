"""Files read in any ranges, and files that change or fail while they are read."""

import gzip
import hashlib
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from data_pipeline.errors import UnfinishedError
from data_pipeline.readers import (
    FORMATS,
    Record,
    Reject,
    Source,
    read_records,
    read_text_chunks,
    scan_ranges,
)
from data_pipeline.readers.formats import FileFormat
from tests.data_pipeline.readers.reading import one_file, read, split_at_reject, texts
from tests.data_pipeline.readers.test_lines import BOM, CONTENT

PAGE = Path(__file__).parents[3] / "docs" / "how_to" / "add_a_reader.md"


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
    whole = read(file)
    assert read(file, unit_bytes=unit_bytes) == whole
    for record in whole:
        if isinstance(record, Record):
            place = (record.offset, record.size, record.line)
            assert record.text is not None
            assert hashlib.sha256(record.text.encode()).digest() == record.sha256
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr("data_pipeline.readers.formats.CHUNK_BYTES", 3)
                assert "".join(read_text_chunks(file, place)) == record.text


PLAIN = "".join(f"line {number} \n" for number in range(600)).encode()


def test_a_file_that_vanished_shrank_or_became_a_folder_is_rejected(tmp_path: Path) -> None:
    path = tmp_path / "in.txt"
    path.write_bytes(PLAIN)
    for format_ in ("text", "lines"):
        file = one_file(path, format_)
        path.write_bytes(PLAIN[:100])
        (records,) = read(file)
        assert f"had {len(PLAIN):,} bytes when it was found and has 100 now" in str(records)
        records, *_ = list(read_records(Source(file, "text", 500, 600)))
        assert "has 100 now" in str(records)
        path.unlink()
        (records,) = read(file)
        assert "cannot be read: No such file" in str(records)
        path.write_bytes(PLAIN)
    path.write_bytes(b"")
    file = one_file(path)
    path.unlink()
    path.mkdir()
    (records,) = read(file)
    assert "not a regular file" in str(records)
    path.rmdir()
    os.mkfifo(path)
    (records,) = read(one_file(path))
    assert "not a regular file" in str(records)


@pytest.mark.fault_row(50)
@pytest.mark.parametrize("name", ["in.txt", "in.jsonl", "in.gz", "in.zst", "in.wiki"])
def test_a_failing_disk_stops_the_run_and_rejects_nothing(tmp_path: Path, name: str) -> None:
    (tmp_path / name).symlink_to("/proc/self/mem")  # reading there is an EIO
    with pytest.raises(UnfinishedError, match=rf"{name}: .*Input/output error"):
        read(one_file(tmp_path / name))


def test_a_file_that_grew_is_read_to_its_end(tmp_path: Path) -> None:
    path = tmp_path / "in.txt"
    path.write_bytes(b"one\ntw")
    file = one_file(path, "lines")
    path.write_bytes(b"one\ntwo\nthree\n")
    assert texts(read(file, unit_bytes=3)) == ["one", "two", "three"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_that_may_not_be_read_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_text("x")
    (tmp_path / "in.txt").chmod(0)
    (records,) = read(one_file(tmp_path / "in.txt"))
    assert "cannot be read: Permission denied" in str(records)


@pytest.fixture(autouse=True)
def _fasta_is_added(monkeypatch: pytest.MonkeyPatch) -> None:
    module, line = re.findall(r"```python\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    names: dict[str, Any] = {"FileFormat": FileFormat}
    exec(module, names)
    for kind, about in eval("{" + line + "}", names).items():
        monkeypatch.setitem(FORMATS, kind, about)


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
        shown = txl("data", "inspect", out).out
        assert f"{name}:1" in shown


@pytest.mark.parametrize(
    ("content", "good", "cause"),
    [
        (b"ACGT\n", 0, "no line with > before the first sequence"),
        (b">one\nAC\n>two\n\xff\n", 1, "invalid UTF-8: byte 0xff"),
    ],
)
def test_a_bad_sequence_is_rejected(tmp_path: Path, content: bytes, good: int, cause: str) -> None:
    (tmp_path / "in.fa").write_bytes(content)
    before, reject = split_at_reject(read(one_file(tmp_path / "in.fa")))
    assert len(before) == good
    assert cause in reject.reason
    (tmp_path / "in.fa.gz").write_bytes(gzip.compress(content)[:-9])
    assert isinstance(read(one_file(tmp_path / "in.fa.gz"))[-1], Reject)
