"""Parquet: every row is a document, and no damage passes unnoticed."""

import gzip
import json
from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import parquet

from data_pipeline.readers import (
    Record,
    Reject,
    scan_ranges,
)
from tests.data_pipeline.readers.reading import one_file, read, texts


def test_rows_of_parquet_are_documents(tmp_path: Path) -> None:
    values = [f"row {number} é" * number for number in range(7)]
    texts_of = (pa.string(), pa.large_string(), pa.binary(), pa.large_binary(), pa.string_view())
    dictionaries = [pa.dictionary(pa.int32(), kind) for kind in texts_of[:4]]
    for kind in (*texts_of, *dictionaries):
        body = pa.array(values).dictionary_encode() if kind in dictionaries else pa.array(values)
        table = pa.table({"n": list(range(7)), "body": body.cast(kind)})
        parquet.write_table(table, tmp_path / "in.parquet", row_group_size=3)
        file = one_file(tmp_path / "in.parquet")
        assert (file.kind, file.rereadable) == ("parquet", False)
        records = read(file, text_key="body")
        assert texts(records) == values
        assert [record.line for record in records] == [1, 2, 3, 4, 5, 6, 7]
        assert scan_ranges(file, 5) == [(0, file.size)]


def write_table(path: Path, **columns: pa.Array) -> None:
    parquet.write_table(pa.table(columns), path, row_group_size=2)


def test_a_parquet_file_without_the_column_lists_its_columns(tmp_path: Path) -> None:
    write_table(tmp_path / "in.parquet", body=pa.array(["x"]), n=pa.array([1]))
    (records,) = read(one_file(tmp_path / "in.parquet"))
    assert isinstance(records, Reject)
    assert records.reason == 'no column "text"; columns: body, n (see --text-key)'
    (records,) = read(one_file(tmp_path / "in.parquet"), text_key="n")
    assert isinstance(records, Reject)
    assert records.reason == 'column "n" is not of strings but of int64'


@pytest.mark.parametrize(
    ("key", "value", "option"),
    [("ids", [[5, 6], [7]], "ids"), ("input_ids", [5], "ids --text-key input_ids")],
)
def test_token_ids_read_as_text_name_the_format_that_reads_them(
    tmp_path: Path, key: str, value: list[object], option: str
) -> None:
    (tmp_path / "midi.json").write_text(json.dumps({"programs": [[0, False]], key: value}))
    write_table(tmp_path / "in.parquet", **{key: pa.array([[5, 6]])})
    for name in ("midi.json", "in.parquet"):
        for text_key in ("text", key):
            (reject,) = read(one_file(tmp_path / name), text_key=text_key)
            assert isinstance(reject, Reject)
            assert f'"{text_key}"' in reject.reason
            assert f"; for token ids: --format {option}" in reject.reason


@pytest.mark.parametrize(
    ("wrong", "nearest"), [("txt", "text"), ("Text", "text"), ("TEXT", "text"), ("content", None)]
)
def test_a_wrong_text_key_suggests_the_most_similar_name(
    tmp_path: Path, wrong: str, nearest: str | None
) -> None:
    write_table(tmp_path / "in.parquet", text=pa.array(["x"]), contents=pa.array([1]))
    (tmp_path / "in.jsonl").write_text(json.dumps({"text": "x", "url": "y"}))
    for name in ("in.parquet", "in.jsonl"):
        (records,) = read(one_file(tmp_path / name), text_key=wrong)
        assert isinstance(records, Reject)
        assert (f'did you mean "{nearest}"?' in records.reason) == (nearest is not None)
        assert "did you mean" not in records.reason or nearest, "contents is no column of text"


@pytest.mark.parametrize("kind", [pa.string(), pa.binary(), pa.large_binary()])
def test_bad_rows_of_parquet_are_rejected_one_by_one(tmp_path: Path, kind: pa.DataType) -> None:
    text = pa.array([b"a", None, b"b\xff", b"", b"e"]).cast(pa.binary())
    if kind == pa.string():
        text = pa.Array.from_buffers(kind, 5, text.buffers())  # as a careless writer would
    else:
        text = text.cast(kind)
    write_table(tmp_path / "in.parquet", text=text)
    records = read(one_file(tmp_path / "in.parquet"))
    assert [type(record) for record in records] == [Record, Reject, Reject, Record, Record]
    assert [record.line for record in records] == [1, 2, 3, 4, 5]
    assert '"text" is null' in str(records[1])
    assert "invalid UTF-8 at byte 1" in str(records[2])


def test_a_damaged_parquet_file_never_raises(tmp_path: Path) -> None:
    path = tmp_path / "in.parquet"
    values = [f"row {number}" for number in range(50)]
    table = pa.table({"text": pa.array(values)})
    parquet.write_table(table, path, row_group_size=7, write_page_checksum=True)
    packed = path.read_bytes()
    for size in range(0, len(packed), 97):
        path.write_bytes(packed[:size])
        (records,) = read(one_file(path))
        assert isinstance(records, Reject)
        assert records.reason
    for at in range(0, len(packed), 11):
        path.write_bytes(packed[:at] + bytes([packed[at] ^ 0x24]) + packed[at + 1 :])
        records = read(one_file(path))
        good = [record for record in records if isinstance(record, Record)]
        assert [record.text for record in good] == values[: len(good)]
        assert len(good) == 50 or isinstance(records[-1], Reject)


def test_a_compressed_parquet_file_is_refused_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "in.parquet.gz").write_bytes(gzip.compress(b"PAR1"))
    (records,) = read(one_file(tmp_path / "in.parquet.gz"))
    assert "Parquet compresses inside" in str(records)
