"""Every kind of bad file and record: a Reject with its place and cause, and all before it is good.

Through the command line: `test_bad_input.py`.
"""

import gzip
import json
import os
import struct
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from data_pipeline.errors import UnfinishedError
from data_pipeline.readers import Record, Reject, read_records
from data_pipeline.readers.records import MAX_RECORD_BYTES
from tests.data_pipeline.readers.reading import one_file, read, split_at_reject, texts

LINES = [f"line {number} " + "é" * number for number in range(600)]
"""Some 370 KB: three blocks of zstd."""
PLAIN = "".join(line + "\n" for line in LINES).encode()
COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    "gz": lambda raw: gzip.compress(raw, mtime=0),
    "zst": zstandard.ZstdCompressor(write_checksum=True).compress,
}


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
    assert (file.compression, file.rereadable) == (suffix, False)
    expected = [(r.text, r.line, r.offset) for r in read(one_file(tmp_path / "in", format_))]
    assert [(r.text, r.line, r.offset) for r in read(file)] == expected


@pytest.mark.parametrize("suffix", COMPRESS)
def test_a_cut_file_gives_what_was_whole_and_a_reject_wherever_it_is_cut(
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
def test_half_a_text_file_is_no_document(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"in.txt.{suffix}"
    path.write_bytes(COMPRESS[suffix](PLAIN)[:-9])
    (found,) = read(one_file(path))
    assert isinstance(found, Reject)
    assert "truncated" in found.reason


@pytest.mark.parametrize("suffix", COMPRESS)
def test_garbage_behind_a_compressed_file_is_named(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"in.{suffix}"
    path.write_bytes(COMPRESS[suffix](PLAIN) + b"garbage")
    before, reject = split_at_reject(read(one_file(path, "lines")))
    assert before == LINES
    assert reject.line == len(LINES) + 1
    assert "damaged" in reject.reason


@pytest.mark.parametrize("suffix", COMPRESS)
def test_a_file_that_is_not_compressed_at_all_is_named(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"in.{suffix}"
    path.write_bytes(b"plain text")
    (found,) = read(one_file(path))
    assert isinstance(found, Reject)
    assert "damaged" in found.reason


@pytest.mark.parametrize("suffix", COMPRESS)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_no_flipped_bit_passes(
    tmp_path_factory: pytest.TempPathFactory, suffix: str, data: st.DataObject
) -> None:
    packed = bytearray(COMPRESS[suffix](PLAIN))
    # Ten bytes of a gzip header say when and where it was made: no data depends on them.
    bit = data.draw(st.integers(80 if suffix == "gz" else 0, len(packed) * 8 - 1))
    packed[bit // 8] ^= 1 << bit % 8
    path = tmp_path_factory.mktemp("flipped") / f"in.{suffix}"
    path.write_bytes(packed)
    found = read(one_file(path, "lines"))
    # Some bits of zstd decide nothing; then the checksum agrees and the text is right.
    assert any(isinstance(record, Reject) for record in found) or texts(found) == LINES


def test_a_wrong_checksum_of_gzip_is_named(tmp_path: Path) -> None:
    packed = bytearray(COMPRESS["gz"](PLAIN))
    packed[-8] ^= 1
    (tmp_path / "in.gz").write_bytes(packed)
    before, reject = split_at_reject(read(one_file(tmp_path / "in.gz", "lines")))
    assert before == LINES
    assert "CRC" in reject.reason


def test_foreign_frames_of_zstd_are_skipped(tmp_path: Path) -> None:
    foreign = struct.pack("<II", 0x184D2A53, 5) + b"12345"
    packed = foreign + COMPRESS["zst"](PLAIN) + foreign
    (tmp_path / "in.zst").write_bytes(packed)
    assert texts(read(one_file(tmp_path / "in.zst", "lines"))) == LINES


@pytest.mark.parametrize(
    ("descriptor", "rest", "reason"),
    [
        (0b1110_0000, struct.pack("<Q", 100 * 2**30), "window of more than 134,217,728 bytes"),
        (0b1100_0000, bytes([0x60]) + struct.pack("<Q", 100 * 2**30), "truncated"),
        (0b0000_0000, bytes([0x90]), "window of more than 134,217,728 bytes"),
        (0b0000_0000, bytes([0xFF]), "window of more than 134,217,728 bytes"),
    ],
)
def test_a_frame_of_zstd_that_claims_100_gigabytes_takes_no_memory(
    tmp_path: Path, descriptor: int, rest: bytes, reason: str
) -> None:
    (tmp_path / "in.zst").write_bytes(b"\x28\xb5\x2f\xfd" + bytes([descriptor]) + rest)
    tracemalloc.start()
    (found,) = read(one_file(tmp_path / "in.zst"))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert isinstance(found, Reject)
    assert reason in found.reason
    assert peak < 4 * 2**20


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
    *found, grown_kib = ended.stdout.split("\n")[:-1]
    held = 0 if not suffix and format_ != "jsonl" else 3 * MAX_RECORD_BYTES // 1024
    assert int(grown_kib) < 120 * 1024 + held
    one = "Reject" if suffix or format_ == "jsonl" else "Record"
    expected = {
        "text": [f"{one} 0"],
        "lines": [f"{one} 1", "Record 2"],
        "jsonl": ["Reject 1", "Reject 2"],
        "wikitext": [f"{one} 1"],
    }
    assert found == expected[format_]


def test_a_key_twice_in_an_object_is_named(tmp_path: Path) -> None:
    lines = b'{"text": "a", "x": {"k": 1, "k": 1}}\n{"text": "b", "text": "c"}\n'
    (tmp_path / "in.jsonl").write_bytes(lines + jsonl("d"))
    one, two, three = read(one_file(tmp_path / "in.jsonl"))
    assert isinstance(one, Reject)
    assert 'key "k" twice' in one.reason
    assert isinstance(two, Reject)
    assert (two.line, two.byte) == (2, 37)
    assert 'key "text" twice' in two.reason
    assert isinstance(three, Record)


def write_table(path: Path, **columns: pa.Array) -> None:
    parquet.write_table(pa.table(columns), path, row_group_size=2)


def test_a_parquet_file_without_the_column_lists_its_columns(tmp_path: Path) -> None:
    write_table(tmp_path / "in.parquet", body=pa.array(["x"]), n=pa.array([1]))
    (found,) = read(one_file(tmp_path / "in.parquet"))
    assert isinstance(found, Reject)
    assert found.reason == 'no column "text"; columns: body, n (see --text-key)'
    (found,) = read(one_file(tmp_path / "in.parquet"), text_key="n")
    assert isinstance(found, Reject)
    assert found.reason == 'column "n" is not of strings but of int64'


@pytest.mark.parametrize(
    ("wrong", "nearest"), [("txt", "text"), ("Text", "text"), ("TEXT", "text"), ("content", None)]
)
def test_a_wrong_text_key_is_answered_with_the_nearest_name(
    tmp_path: Path, wrong: str, nearest: str | None
) -> None:
    write_table(tmp_path / "in.parquet", text=pa.array(["x"]), contents=pa.array([1]))
    (tmp_path / "in.jsonl").write_text(json.dumps({"text": "x", "url": "y"}))
    for name in ("in.parquet", "in.jsonl"):
        (found,) = read(one_file(tmp_path / name), text_key=wrong)
        assert isinstance(found, Reject)
        assert (f'did you mean "{nearest}"?' in found.reason) == (nearest is not None)
        assert "did you mean" not in found.reason or nearest, "contents is no column of text"


@pytest.mark.parametrize("kind", [pa.string(), pa.binary(), pa.large_binary()])
def test_bad_rows_of_parquet_are_rejected_one_by_one(tmp_path: Path, kind: pa.DataType) -> None:
    text = pa.array([b"a", None, b"b\xff", b"", b"e"]).cast(pa.binary())
    if kind == pa.string():
        text = pa.Array.from_buffers(kind, 5, text.buffers())  # as a careless writer would
    else:
        text = text.cast(kind)
    write_table(tmp_path / "in.parquet", text=text)
    found = read(one_file(tmp_path / "in.parquet"))
    assert [type(record) for record in found] == [Record, Reject, Reject, Record, Record]
    assert [record.line for record in found] == [1, 2, 3, 4, 5]
    assert '"text" is null' in str(found[1])
    assert "invalid UTF-8 at byte 1" in str(found[2])


def test_a_damaged_parquet_file_never_raises(tmp_path: Path) -> None:
    path = tmp_path / "in.parquet"
    values = [f"row {number}" for number in range(50)]
    table = pa.table({"text": pa.array(values)})
    parquet.write_table(table, path, row_group_size=7, write_page_checksum=True)
    packed = path.read_bytes()
    for size in range(0, len(packed), 97):
        path.write_bytes(packed[:size])
        (found,) = read(one_file(path))
        assert isinstance(found, Reject)
        assert found.reason
    for at in range(0, len(packed), 11):
        path.write_bytes(packed[:at] + bytes([packed[at] ^ 0x24]) + packed[at + 1 :])
        found = read(one_file(path))
        good = [record for record in found if isinstance(record, Record)]
        assert [record.text for record in good] == values[: len(good)]
        assert len(good) == 50 or isinstance(found[-1], Reject)


def test_a_compressed_parquet_file_is_refused_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "in.parquet.gz").write_bytes(gzip.compress(b"PAR1"))
    (found,) = read(one_file(tmp_path / "in.parquet.gz"))
    assert "Parquet compresses inside" in str(found)


def test_a_file_that_vanished_shrank_or_became_a_folder_is_rejected(tmp_path: Path) -> None:
    path = tmp_path / "in.txt"
    path.write_bytes(PLAIN)
    for format_ in ("text", "lines"):
        file = one_file(path, format_)
        path.write_bytes(PLAIN[:100])
        (found,) = read(file)
        assert f"had {len(PLAIN):,} bytes when it was found and has 100 now" in str(found)
        found, *_ = list(read_records(file, "text", 500, 600))
        assert "has 100 now" in str(found)
        path.unlink()
        (found,) = read(file)
        assert "cannot be read: No such file" in str(found)
        path.write_bytes(PLAIN)
    path.write_bytes(b"")
    file = one_file(path)
    path.unlink()
    path.mkdir()
    (found,) = read(file)
    assert "not a regular file" in str(found)
    path.rmdir()
    os.mkfifo(path)
    (found,) = read(one_file(path))
    assert "not a regular file" in str(found)


@pytest.mark.parametrize("name", ["in.txt", "in.jsonl", "in.gz", "in.zst", "in.wiki"])
def test_a_disk_that_fails_is_no_reject(tmp_path: Path, name: str) -> None:
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
    (found,) = read(one_file(tmp_path / "in.txt"))
    assert "cannot be read: Permission denied" in str(found)
