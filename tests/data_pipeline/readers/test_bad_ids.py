"""Ten bad files of token ids per kind: each is refused with its reason, and nothing is lost."""

import json
import pickle
import struct
from collections.abc import Callable
from io import BytesIO
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from data_pipeline.errors import DataError
from data_pipeline.readers import IdRules, Reject
from tests.data_pipeline.readers.id_inputs import RULES, megatron_index, separated, write_megatron
from tests.data_pipeline.readers.reading import Document, one_file, read, rejects
from tests.support.hostile_pickle import Hostile

GOOD = [1, 2, 3]


def lists(*values: object) -> bytes:
    """Lines of JSON: a good document, then these values, then a good one."""
    return b"".join(json.dumps({"ids": value}).encode() + b"\n" for value in (GOOD, *values, GOOD))


def npy(array: object, **options: object) -> bytes:
    file = BytesIO()
    np.save(file, array, **options)  # type: ignore[arg-type]
    return file.getvalue()


def table(ids: pa.Array, name: str = "ids") -> bytes:
    sink = pa.BufferOutputStream()
    parquet.write_table(pa.table({name: ids}), sink)
    return sink.getvalue().to_pybytes()


FLAT = npy(separated([GOOD, [4]]))
HEADER = FLAT[:128]
TABLE = table(pa.array([GOOD, [4]]))
IDS = pa.list_(pa.int64())

LINES = {
    "id 500": (
        lists([7, 500]),
        "token id 500 at position 1 is not in the vocabulary of 500 ids, 0 to 499",
    ),
    "negative": (lists([-1]), "token id -1 at position 0"),
    "huge": (lists([10**40]), "token id 1000000000000000000000000000000000000000 at position 0"),
    "float": (lists([1, 2.0]), '"ids" has float at position 1'),
    "bool": (lists([True]), '"ids" has bool at position 0'),
    "text": (lists("1 2"), '"ids" is not a list of token ids but str'),
    "null": (lists(None), '"ids" is not a list of token ids but null'),
    "nested": (lists([[1], [2]]), "give every track a line, and ids of one vocabulary"),
    "end inside": (lists([1, 0, 2]), "end-of-document id 0 at position 1 is inside the document"),
    "truncated": (lists()[:-3], "truncated record: the file ends inside a line"),
}
EVENTS = "one per event, as MidiTok's tokenizers with several vocabularies"
JSON = {
    "id 500": (b'{"ids": [[1], [7, 500]]}', "token id 500 at position 1"),
    "no key": (b'{"tokens": [1]}', 'no key "ids"; keys seen: tokens (see --text-key)'),
    "key twice": (b'{"ids": [1], "ids": [2]}', 'key "ids" twice in one object'),
    "truncated": (b'{"ids": [1, 2', "broken JSON"),
    "empty": (b"", "broken JSON"),
    "number": (b"7", "not a JSON object but a int"),
    "objects": (b'[{"ids": [1]}]', '"ids" has dict at position 0'),
    "events of a song": (json.dumps({"ids": [[1, 2, 3], [4]] * 8}).encode(), EVENTS),
    "events of a track": (b'{"ids": [[[1, 2], [3, 4]]]}', "and ids of one vocabulary"),
}
NPY = {
    "id 500": (npy(np.array([7, 500])), "token id 500 at position 1"),
    "negative": (npy(np.array([-1])), "token id -1 at position 0"),
    "floats": (npy(np.array([1.0])), "the array is of float64 and shape (1,)"),
    "pickled": (npy(np.array([None]), allow_pickle=True), "Python objects are never loaded"),
    "pickle": (pickle.dumps([1, 2]), "not an .npy array"),
    "no header": (np.arange(9, dtype="<u2").tobytes(), "rename it to .bin and give --dtype"),
    "3 dimensions": (npy(np.ones((2, 1, 1), int)), "in 1 or 2 dimensions"),
    "columns": (npy(np.asfortranarray(np.ones((2, 3), int))), "stored by columns"),
    "truncated": (FLAT[:-3], "truncated: 3 bytes of ids are missing"),
    "more": (FLAT + b"x", "there are bytes after the end of the array"),
    "half a header": (FLAT[:60], "not an .npy array"),
    "hostile header": (FLAT[:10] + b"__import__('os')".ljust(118), "not an .npy array"),
    "hostile length": (b"\x93NUMPY\x02\x00" + b"\xff" * 4, "not an .npy array"),
    "hostile shape": (FLAT.replace(b"(6,)", b"(9**9,)"), "not an .npy array"),
    "row end inside": (npy(np.array([[1, 0, 2]])), "end-of-document id 0 at position 1"),
}
RAW = {
    "id 500": (np.array([7, 500, 0, 4], "<u2").tobytes(), "token id 500 at position 1"),
    "odd size": (separated([GOOD]).tobytes() + b"x", "not a multiple of 2 bytes"),
    "other type": (np.array([1, 2**16 - 1], "<u4").tobytes(), "token id 65535 at position 0"),
    "big-endian": (np.array([2, 3], ">u2").tobytes(), "token id 512 at position 0"),
    "text": (b"The sea.", "token id 26708 at position 0"),
}
PARQUET = {
    "id 500": (table(pa.array([GOOD, [7, 500]])), "token id 500 at position 1"),
    "negative": (table(pa.array([[-1]])), "token id -1 at position 0"),
    "null list": (table(pa.array([None, GOOD], IDS)), '"ids" is null'),
    "null id": (table(pa.array([[1, None]], IDS)), '"ids" has null among its ids'),
    "floats": (table(pa.array([[1.0]])), 'column "ids" is not of lists of integers but of list<'),
    "text": (table(pa.array(["1 2"])), 'column "ids" is not of lists of integers but of string'),
    "integers": (table(pa.array([1])), "not of lists of integers but of int64"),
    "nested": (table(pa.array([[[1]]])), "not of lists of integers but of list<"),
    "no column": (
        table(pa.array([GOOD]), "id"),
        'no column "ids"; columns: id',
    ),
    "end inside": (table(pa.array([[1, 0, 2]])), "end-of-document id 0 at position 1"),
    "truncated": (TABLE[:-5], "damaged Parquet file"),
    "empty": (b"", "damaged Parquet file"),
}
CASES = [
    pytest.param(f"in.{suffix}", content, reason, id=f"{suffix}-{name}")
    for suffix, cases in {
        "jsonl": LINES,
        "json": JSON,
        "npy": NPY,
        "bin": RAW,
        "parquet": PARQUET,
    }.items()
    for name, (content, reason) in cases.items()
]


@pytest.mark.parametrize(("name", "content", "reason"), CASES)
def test_a_bad_file_is_rejected_by_name(
    tmp_path: Path, name: str, content: bytes, reason: str
) -> None:
    (tmp_path / name).write_bytes(content)
    records = read(one_file(tmp_path / name, "ids", RULES))
    (reject,) = rejects(records)
    assert reject.file == name
    assert reason in reject.reason
    good = [record.text for record in records if isinstance(record, Document)]
    assert set(good) <= {"1 2 3", "1", "4", "7 500"}


@pytest.mark.fault_row(22)
def test_an_array_with_code_is_rejected_before_it_runs(tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    array = npy(np.array([Hostile(ran)], dtype=object), allow_pickle=True)
    (tmp_path / "in.npy").write_bytes(array)
    (reject,) = read(one_file(tmp_path / "in.npy", "ids", RULES))
    assert isinstance(reject, Reject)
    assert "never loaded" in reject.reason
    assert not ran.exists()


@pytest.mark.parametrize(("name", "whole"), [("in.npy", FLAT), ("in.parquet", TABLE)])
def test_a_file_cut_anywhere_never_raises_or_loses_ids_silently(
    tmp_path: Path, name: str, whole: bytes
) -> None:
    for size in [*range(0, len(whole), 31), len(whole) - 1]:
        (tmp_path / name).write_bytes(whole[:size])
        records = read(one_file(tmp_path / name, "ids", RULES))
        assert isinstance(records[-1], Reject), size


INDEX = megatron_index([GOOD, [4]])
Change = Callable[[bytes], bytes]
BAD_INDEXES: dict[str, tuple[Change, str]] = {
    "version": (lambda raw: raw[:9] + struct.pack("<Q", 2) + raw[17:], "has version 2"),
    "floats": (lambda _: megatron_index([GOOD], code=7), "type code 7; supported are"),
    "truncated": (lambda raw: raw[:-1], "is truncated, or has more than ids"),
    "hostile count": (lambda raw: raw[:18] + b"\xff" * 7 + b"\0" + raw[26:], "is truncated"),
    "modes": (lambda raw: raw + b"\0\0", "is truncated, or has more than ids"),
    "negative": (lambda raw: raw[:34] + struct.pack("<i", -3) + raw[38:], "one after the other"),
    "gap": (lambda _: megatron_index([GOOD, [4]], size=4), "one after the other"),
    "bounds": (lambda raw: raw[:-8] + struct.pack("<q", 1), "do not cover its 2 sequences"),
    "shorter": (lambda _: megatron_index([GOOD]), "has more than the 6 bytes of its index"),
    "longer": (lambda _: megatron_index([GOOD, [4, 5]]), "truncated: 2 bytes of ids are missing"),
}


@pytest.mark.parametrize(("change", "reason"), BAD_INDEXES.values(), ids=BAD_INDEXES)
def test_a_bad_index_is_rejected_by_name(tmp_path: Path, change: Change, reason: str) -> None:
    (tmp_path / "in.bin").write_bytes(np.array([*GOOD, 4], "<u2").tobytes())
    (tmp_path / "in.idx").write_bytes(change(INDEX))
    records = read(one_file(tmp_path / "in.bin", "ids", IdRules(500, 0)))
    assert isinstance(records[-1], Reject)
    assert reason in records[-1].reason
    assert records[-1].loses_rest


def test_an_index_that_changes_is_a_change_of_its_file(tmp_path: Path) -> None:
    write_megatron(tmp_path / "in.bin", [GOOD, [4]])
    file = one_file(tmp_path / "in.bin", "ids", IdRules(500, 0))
    (tmp_path / "in.idx").write_bytes(megatron_index([[1, 2], [3, 4]]))
    with pytest.raises(DataError, match="changed while it was being read"):
        read(file)
