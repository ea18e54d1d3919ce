"""Arrow streams and directories of saved datasets."""

import gzip
import json
from pathlib import Path

import pyarrow as pa
import pytest

from data_pipeline.errors import DataError
from data_pipeline.readers import Record, Reject, find_files
from tests.data_pipeline.readers.id_inputs import RULES
from tests.data_pipeline.readers.reading import one_file, read, texts

VALUES = [f"row {number} é" * number for number in range(7)]


def stream(table: pa.Table, *, is_file: bool = False) -> bytes:
    sink = pa.BufferOutputStream()
    new = pa.ipc.new_file if is_file else pa.ipc.new_stream
    with new(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=3)
    return sink.getvalue().to_pybytes()


def column(values: pa.Array, name: str = "text") -> bytes:
    return stream(pa.table({name: values}))


@pytest.mark.parametrize("is_file", [False, True])
def test_rows_are_documents(tmp_path: Path, is_file: bool) -> None:
    kinds = (pa.string(), pa.large_string(), pa.binary(), pa.string_view())
    for kind in (*kinds, pa.dictionary(pa.int32(), pa.string())):
        values = pa.array(VALUES)
        typed = values.dictionary_encode() if pa.types.is_dictionary(kind) else values.cast(kind)
        table = pa.table({"n": list(range(7)), "body": typed})
        (tmp_path / "in.arrow").write_bytes(stream(table, is_file=is_file))
        (tmp_path / "in.arrow.gz").write_bytes(gzip.compress(stream(table, is_file=is_file)))
        for name in ("in.arrow", "in.arrow.gz"):
            records = read(one_file(tmp_path / name), text_key="body")
            assert texts(records) == VALUES
            assert [record.line for record in records] == [1, 2, 3, 4, 5, 6, 7]


def test_lists_of_token_ids(tmp_path: Path) -> None:
    lists = pa.array([[1, 2], [3], [0, 4]], pa.large_list(pa.int16()))
    (tmp_path / "in.arrow").write_bytes(column(lists, "input_ids"))
    file = one_file(tmp_path / "in.arrow", "ids", RULES)
    assert texts(read(file, text_key="input_ids")) == ["1 2", "3", "4"]


TABLE = column(pa.array(VALUES))
BAD_UTF8 = pa.array([b"a", None, b"b\xff", b"", b"e"])
BAD_FILES = {
    "empty": (b"", "damaged Arrow file"),
    "not Arrow": (b"The grey sea. " * 99, "damaged Arrow file"),
    "no column": (column(pa.array(["x"]), "body"), 'no column "text"; columns: body'),
    "misspelled": (column(pa.array(["x"]), "txt"), 'did you mean "txt"?'),
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


@pytest.mark.parametrize(("content", "reason"), BAD_FILES.values(), ids=BAD_FILES)
def test_a_bad_file_is_refused_by_name(tmp_path: Path, content: bytes, reason: str) -> None:
    (tmp_path / "in.arrow").write_bytes(content)
    *good, reject = read(one_file(tmp_path / "in.arrow"))
    assert isinstance(reject, Reject)
    assert reason in reject.reason
    assert (reject.file, reject.loses_rest) == ("in.arrow", True)
    assert texts(good) == VALUES[: len(good)]


@pytest.mark.parametrize("kind", [pa.string(), pa.binary(), pa.large_string()])
def test_bad_rows_are_rejected_one_by_one(tmp_path: Path, kind: pa.DataType) -> None:
    values = BAD_UTF8.cast(pa.large_binary()) if kind == pa.large_string() else BAD_UTF8
    (tmp_path / "in.arrow").write_bytes(column(pa.Array.from_buffers(kind, 5, values.buffers())))
    records = read(one_file(tmp_path / "in.arrow"))
    assert [type(record) for record in records] == [Record, Reject, Reject, Record, Record]
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
    folder.mkdir(parents=True)
    names = [f"data-{number:05d}-of-{num_files:05d}.arrow" for number in range(num_files)]
    for name in names:
        (folder / name).write_bytes(TABLE)
    (folder / "cache-0123456789abcdef.arrow").write_bytes(TABLE)
    state = {"_data_files": [{"filename": name} for name in names], "_split": None}
    (folder / "state.json").write_text(json.dumps(state, indent=2))
    (folder / "dataset_info.json").write_text('{\n  "features": {}\n}')
    return folder


@pytest.mark.parametrize("format_", ["auto", "arrow"])
def test_a_saved_dataset_is_its_data_files(tmp_path: Path, format_: str) -> None:
    saved_dataset(tmp_path / "in" / "a")
    saved_dataset(tmp_path / "in" / "b", 1)
    found = find_files([str(tmp_path / "in")], format=format_, exclude=Path("/nowhere"))
    assert [file.name for file in found.files] == [
        "a/data-00000-of-00002.arrow",
        "a/data-00001-of-00002.arrow",
        "b/data-00000-of-00001.arrow",
    ]
    assert +found.ignored == {"dataset_info.json": 2, "state.json": 2, ".arrow": 2}


STATES = {
    '{"_data_files": [{"filename": "other.arrow"}]}': "lists 'other.arrow', which is not in its",
    '{"_data_files": [{"filename": "../../etc/passwd"}]}': "is not in its directory",
    '{"_data_files": [7]}': "is damaged",
    "{": "state.json is damaged",
    "[]": "state.json is damaged",
}


@pytest.mark.parametrize(("state", "reason"), STATES.items())
def test_a_directory_with_a_wrong_list_of_files_is_refused(
    tmp_path: Path, state: str, reason: str
) -> None:
    (saved_dataset(tmp_path / "in") / "state.json").write_text(state)
    with pytest.raises(DataError, match=reason):
        find_files([str(tmp_path / "in")], format="auto", exclude=Path("/nowhere"))


def test_the_splits_of_a_saved_dictionary_are_those_of_its_directories(tmp_path: Path) -> None:
    saved_dataset(tmp_path / "in" / "train")
    saved_dataset(tmp_path / "in" / "test")
    (tmp_path / "in" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    found = find_files([str(tmp_path / "in")], format="auto", exclude=Path("/nowhere"))
    assert {(file.name.split("/")[0], file.split) for file in found.files} == {
        ("train", "train"),
        ("test", "test"),
    }
    assert all(file.kind == "arrow" for file in found.files)
