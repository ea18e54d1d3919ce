"""Rows of Parquet, Arrow and CSV files as documents, and what is refused."""

import csv
import gzip
import io
import json
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from data_pipeline.errors import DataError
from data_pipeline.readers import Reject, scan_ranges
from tests.data_pipeline.readers.reading import (
    Document,
    find,
    kinds_of,
    one_file,
    only_reject,
    read,
    rejects,
    texts,
)
from tests.support.corpus_layouts import write_files

VALUES = [f"row {number} é" * number for number in range(7)]
FIELDS = st.text(st.sampled_from('ab",\t\n\r\u2028é '), max_size=6)


@pytest.mark.parametrize("key", ["ids", "input_ids"])
def test_token_ids_read_as_text_name_the_format_that_reads_them(tmp_path: Path, key: str) -> None:
    (tmp_path / "midi.json").write_text(json.dumps({"programs": [[0, False]], key: [[5, 6], [7]]}))
    parquet.write_table(pa.table({key: [[5, 6]]}), tmp_path / "in.parquet")
    for name in ("midi.json", "in.parquet"):
        reason = only_reject(tmp_path / name).reason
        assert '"text"' in reason
        assert key in reason
        reason = only_reject(tmp_path / name, text_key=key).reason
        assert f'"{key}"' in reason
        assert " (for token ids: --format ids)" in reason


def test_a_damaged_parquet_file_never_raises(tmp_path: Path) -> None:
    path = tmp_path / "in.parquet"
    values = [f"row {number}" for number in range(50)]
    table = pa.table({"text": pa.array(values)})
    parquet.write_table(table, path, row_group_size=7, write_page_checksum=True)
    packed = path.read_bytes()
    for size in range(0, len(packed), 97):
        path.write_bytes(packed[:size])
        assert only_reject(path).reason
    for at in range(0, len(packed), 11):
        path.write_bytes(packed[:at] + bytes([packed[at] ^ 0x24]) + packed[at + 1 :])
        records = read(one_file(path))
        good = [record.text for record in records if isinstance(record, Document)]
        assert good == values[: len(good)]
        assert len(good) == 50 or isinstance(records[-1], Reject)


def test_a_compressed_parquet_file_is_refused_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "in.parquet.gz").write_bytes(gzip.compress(b"PAR1"))
    assert "Parquet compresses inside" in only_reject(tmp_path / "in.parquet.gz").reason


def stream(table: pa.Table, *, is_file: bool = False) -> bytes:
    sink = pa.BufferOutputStream()
    new = pa.ipc.new_file if is_file else pa.ipc.new_stream
    with new(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=3)
    return sink.getvalue().to_pybytes()


def column(values: pa.Array, name: str = "text") -> bytes:
    return stream(pa.table({name: values}))


def parquet_of(table: pa.Table) -> bytes:
    sink = pa.BufferOutputStream()
    parquet.write_table(table, sink, row_group_size=3)
    return sink.getvalue().to_pybytes()


FILES: dict[str, Callable[[pa.Table], bytes]] = {
    "in.parquet": parquet_of,
    "in.arrow": stream,
    "in.arrow.gz": lambda table: gzip.compress(stream(table)),
    "feather.arrow": lambda table: stream(table, is_file=True),
}
TYPES = (pa.string(), pa.large_string(), pa.binary(), pa.large_binary(), pa.string_view())


@pytest.mark.parametrize("name", FILES)
def test_rows_are_documents(tmp_path: Path, name: str) -> None:
    for kind in (*TYPES, *(pa.dictionary(pa.int32(), each) for each in TYPES[:4])):
        values = pa.array(VALUES)
        typed = values.dictionary_encode() if pa.types.is_dictionary(kind) else values
        table = pa.table({"n": list(range(7)), "body": typed.cast(kind)})
        (tmp_path / name).write_bytes(FILES[name](table))
        file = one_file(tmp_path / name)
        assert file.kind == name.split(".")[1]
        records = read(file, text_key="body")
        assert texts(records) == VALUES
        assert [record.line for record in records] == [1, 2, 3, 4, 5, 6, 7]
        assert scan_ranges(file, 5) == [(0, file.size)]


TABLE = column(pa.array(VALUES))
BAD_UTF8 = pa.array([b"a", None, b"b\xff", b"", b"e"])
BAD_ARROW_FILES = {
    "empty": (b"", "damaged Arrow file"),
    "not Arrow": (b"The grey sea. " * 99, "damaged Arrow file"),
    "no column": (column(pa.array(["x"]), "body"), 'no column "text"; columns: body'),
    "numbers": (column(pa.array([1])), 'column "text" is not of strings but of int64'),
    "no end mark": (TABLE[:-8], "truncated: it has no end mark"),
    "cut inside": (TABLE[:-300], "damaged Arrow file"),
    "two streams": (TABLE + TABLE, "there is data after its end mark"),
    "no footer": (stream(pa.table({"text": VALUES}), is_file=True)[:-6], "it has no footer"),
    "huge length": (b"\xff\xff\xff\xff\xff\xff\xff\x7f" + TABLE[8:], "damaged Arrow file"),
    "columns twice": (
        stream(pa.Table.from_arrays([pa.array(["x"])] * 2, ["text", "text"])),
        '"text" names 2 columns',
    ),
}


@pytest.mark.parametrize(("content", "reason"), BAD_ARROW_FILES.values(), ids=BAD_ARROW_FILES)
def test_a_bad_file_is_refused_by_name(tmp_path: Path, content: bytes, reason: str) -> None:
    (tmp_path / "in.arrow").write_bytes(content)
    *good, reject = read(one_file(tmp_path / "in.arrow"))
    assert isinstance(reject, Reject)
    assert reason in reject.reason
    assert (reject.file, reject.loses_rest) == ("in.arrow", True)
    assert texts(good) == VALUES[: len(good)]


@pytest.mark.parametrize("name", ["in.parquet", "in.arrow"])
@pytest.mark.parametrize("kind", [pa.string(), pa.binary(), pa.large_string()])
def test_bad_rows_are_rejected_one_by_one(tmp_path: Path, kind: pa.DataType, name: str) -> None:
    values = BAD_UTF8.cast(pa.large_binary()) if kind == pa.large_string() else BAD_UTF8
    text = pa.Array.from_buffers(kind, 5, values.buffers())  # as a careless writer would
    (tmp_path / name).write_bytes(FILES[name](pa.table({"text": text})))
    records = read(one_file(tmp_path / name))
    assert [isinstance(record, Reject) for record in records] == [False, True, True, False, False]
    assert [record.line for record in records] == [1, 2, 3, 4, 5]
    assert '"text" is null' in str(records[1])
    assert "invalid UTF-8 at byte 1" in str(records[2])


def test_a_damaged_file_never_raises_crashes_or_loses_rows_silently(tmp_path: Path) -> None:
    path = tmp_path / "in.arrow"
    for size in range(0, len(TABLE), 101):
        path.write_bytes(TABLE[:size])
        assert isinstance(read(one_file(path))[-1], Reject), size
    for at in range(0, len(TABLE), 23):
        path.write_bytes(TABLE[:at] + bytes([TABLE[at] ^ 0xA4]) + TABLE[at + 1 :])
        records = read(one_file(path))
        assert len(records) >= len(VALUES) or isinstance(records[-1], Reject), at


def saved_dataset(folder: Path, num_files: int = 2) -> Path:
    """The files of `datasets.save_to_disk`, and a cache that `map` wrote later."""
    names = [f"data-{number:05d}-of-{num_files:05d}.arrow" for number in range(num_files)]
    state = {"_data_files": [{"filename": name} for name in names], "_split": None}
    tables = dict.fromkeys([*names, "cache-0123456789abcdef.arrow"], TABLE)
    descriptions = {
        "state.json": json.dumps(state, indent=2),
        "dataset_info.json": '{\n  "features": {}\n}',
    }
    return write_files(folder, {**tables, **descriptions})


@pytest.mark.parametrize("format_", ["auto", "arrow"])
def test_a_saved_dataset_is_its_data_files(tmp_path: Path, format_: str) -> None:
    saved_dataset(tmp_path / "in" / "a")
    saved_dataset(tmp_path / "in" / "b", 1)
    found = find(tmp_path / "in", format=format_)
    assert [file.name for file in found.files] == [
        "a/data-00000-of-00002.arrow",
        "a/data-00001-of-00002.arrow",
        "b/data-00000-of-00001.arrow",
    ]
    assert +found.ignored == {"dataset_info.json": 2, "state.json": 2, ".arrow": 2}


STATES = {
    '{"_data_files": [{"filename": "other.arrow"}]}': "other.arrow', which is not in its",
    '{"_data_files": [{"filename": "../../etc/passwd"}]}': "is not in its directory",
    '{"_data_files": [7]}': "cannot be read",
    "{": "state.json cannot be read",
    "[]": "state.json cannot be read",
}


@pytest.mark.parametrize(("state", "reason"), STATES.items())
def test_a_directory_with_a_wrong_list_of_files_is_refused(
    tmp_path: Path, state: str, reason: str
) -> None:
    (saved_dataset(tmp_path / "in") / "state.json").write_text(state)
    with pytest.raises(DataError, match=reason):
        find(tmp_path / "in")


@settings(max_examples=12, deadline=None)
@given(rows=st.lists(st.tuples(FIELDS, FIELDS), min_size=1), suffix=st.sampled_from(["csv", "tsv"]))
def test_what_a_writer_wrote_is_read(
    tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[str, str]], suffix: str
) -> None:
    path = tmp_path_factory.mktemp("rows") / f"in.{suffix}.gz"
    file = io.StringIO()
    writer = csv.writer(file, delimiter="\t" if suffix == "tsv" else ",", quoting=csv.QUOTE_ALL)
    writer.writerows([("id", "text"), *rows])
    path.write_bytes(gzip.compress(b"\xef\xbb\xbf" + file.getvalue().encode(), 1))
    records = read(one_file(path))
    assert texts(records) == [text for _, text in rows]
    assert [record.line for record in records] == [*range(1, len(rows) + 1)]


BAD_CSV_FILES = {
    "empty": (b"", [], "it has no first row with the names of its columns"),
    "no column": (b"id,body\n1,x\n", [], 'no column "text"; columns: id, body'),
    "semicolons": (b"id;text\n1;x\n", [], 'no column "text"; columns: id;text (see'),
    "column twice": (b"text,text\nx,y\n", [], '"text" names 2 columns'),
    "few fields": (b"id,text\n1,x\n2\n3,z\n", ["x", "z"], "the row has 1 fields, the first"),
    "many fields": (b"id,text\n1,x\n2,y,\n3,z\n", ["x", "z"], "the row has 3 fields"),
    "not UTF-8": (b"text\nx\ny\xff\nz\n", ["x", "z"], "invalid UTF-8 at byte 1 of the text"),
    "open quote": (b'text\nx\n"half', ["x"], "damaged CSV: unexpected end of data"),
    "inner quote": (b'text\nx\n"a"b\n', ["x"], "damaged CSV: ',' expected after '\"'"),
    "bare CR": (b'text\nx\n"a"\rb\n', ["x", "a", "b"], ""),
    "binary": (b"\x00\x01\x02\xff", [], 'no column "text"'),
}  # fmt: skip


@pytest.mark.parametrize(("content", "good", "reason"), BAD_CSV_FILES.values(), ids=BAD_CSV_FILES)
def test_a_bad_file_is_rejected_by_name(
    tmp_path: Path, content: bytes, good: list[str], reason: str
) -> None:
    (tmp_path / "in.csv").write_bytes(content)
    records = read(one_file(tmp_path / "in.csv"))
    assert [record.text for record in records if isinstance(record, Document)] == good
    assert len(rejects(records)) == bool(reason)
    assert all(reason in each.reason and each.file == "in.csv" for each in rejects(records))
    (tmp_path / "cut.csv.gz").write_bytes(gzip.compress(content)[:-9])
    assert isinstance(read(one_file(tmp_path / "cut.csv.gz"))[-1], Reject)


@pytest.mark.parametrize("suffix", ["tsv", "tab.gz"])
def test_rows_of_a_tsv_that_quotes_join_are_rejected_one_by_one(
    tmp_path: Path, suffix: str
) -> None:
    rows = ['a\t"Go', "b\tnow", 'c\thome"', 'd\t"two\nlines"', 'e\t"a\ttab"', 'f\t"in\tquotes\n"']
    packed = gzip.compress if suffix.endswith(".gz") else bytes
    path = tmp_path / f"in.{suffix}"
    path.write_bytes(packed("\n".join(["id\ttext", *rows]).encode()))
    records = read(one_file(path))
    assert [record.text for record in records if isinstance(record, Document)] == [
        "two\nlines",
        "a\ttab",
        "in\tquotes\n",
    ]
    assert [reject.line for reject in rejects(records)] == [1, 2, 3]
    assert "begins with a double quote ends rows later" in rejects(records)[0].reason
    path.write_bytes(packed("\n".join(['"id"\t"text"', *rows]).encode()))
    assert texts(read(one_file(path)))[-1] == "in\tquotes\n", "a file with quotes"


def test_code_in_a_tsv_that_quotes_only_where_it_must_is_read(tmp_path: Path) -> None:
    """As pandas and csv.writer write it: the names of the columns have no quotes."""
    codes = [f"def f{n}():\n\tif n:\n\t\treturn {n}\n" for n in range(3)]
    with (tmp_path / "in.tsv").open("w", newline="") as file:
        csv.writer(file, delimiter="\t").writerows([("id", "text"), *enumerate(codes)])
    assert texts(read(one_file(tmp_path / "in.tsv"))) == codes


def test_a_quote_that_is_not_closed_does_not_fill_the_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("data_pipeline.readers.columns.MAX_RECORD_BYTES", 100)
    for rest in ("y\n" * 99, "y" * 999, '","y\n' * 99):
        (tmp_path / "in.csv").write_text('text\nx\n"' + rest)
        _, reject = read(one_file(tmp_path / "in.csv"))
        assert isinstance(reject, Reject)
        assert reject.loses_rest
        assert "the limit" in reject.reason or "field limit" in reject.reason


def test_csv_files_in_a_folder_are_text_unless_the_format_is_given(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("text\nx\n")
    assert kinds_of(find(tmp_path)) == {"text": 1}
    for found in (find(tmp_path, format="csv"), find(tmp_path / "*"), find(tmp_path / "a.csv")):
        assert kinds_of(found) == {"csv": 1}
