"""Token ids: every kind of file gives the same documents, and a bad one its reason."""

import gzip
import json
import pickle
import shutil
import struct
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_pipeline.errors import ConfigError, DataError
from data_pipeline.readers import IdRules, Reject, scan_ranges
from data_pipeline.readers import ids as ids_module
from data_pipeline.readers.ids import text_of_array, text_of_value, texts_of_chunks
from data_pipeline.readers.source import BadRecordError
from tests.data_pipeline.readers.reading import (
    END,
    RULES,
    VOCAB_SIZE,
    WRITERS,
    Document,
    Documents,
    find,
    megatron_index,
    npy,
    one_file,
    only_reject,
    read,
    rejects,
    separated,
    texts,
    write_megatron,
)
from tests.data_pipeline.readers.test_columns import parquet_of
from tests.support.hostile_pickle import Hostile

DOCUMENTS = [[1, 2, 3], [499], [60, 61, 62, 63, 64]]
TEXTS = ["1 2 3", "499", "60 61 62 63 64"]


@pytest.mark.parametrize("packed", ["", ".gz"])
@pytest.mark.parametrize("suffix", WRITERS)
def test_every_kind_of_file_gives_the_ids_as_text(tmp_path: Path, suffix: str, packed: str) -> None:
    path = tmp_path / f"in.{suffix}"
    WRITERS[suffix](path, DOCUMENTS)
    if packed:
        if suffix in ("parquet", "megatron.bin"):
            pytest.skip("read from the middle")
        path = path.rename(f"{path}.gz")
        path.write_bytes(gzip.compress(path.read_bytes()))
    records = read(one_file(path, "ids", RULES))
    assert texts(records) == TEXTS
    assert [record.line for record in records] == [1, 2, 3]


@pytest.mark.parametrize("suffix", ["npy", "bin", "jsonl", "megatron.bin"])
@settings(max_examples=8, deadline=None)
@given(
    documents=st.lists(st.lists(st.integers(1, VOCAB_SIZE - 1), min_size=1), min_size=1),
    unit_bytes=st.integers(1, 40),
    chunk_bytes=st.sampled_from([8, 2**20]),
)
def test_any_ranges_give_the_documents_of_the_whole_file(
    tmp_path_factory: pytest.TempPathFactory,
    suffix: str,
    documents: Documents,
    unit_bytes: int,
    chunk_bytes: int,
) -> None:
    path = tmp_path_factory.mktemp("ids") / f"in.{suffix}"
    WRITERS[suffix](path, documents)
    file = one_file(path, "ids", RULES)
    whole = read(file)
    assert texts(whole) == [" ".join(map(str, document)) for document in documents]
    assert len(scan_ranges(file, unit_bytes)) == -(-file.size // unit_bytes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("data_pipeline.readers.ids.CHUNK_BYTES", chunk_bytes)
        assert read(file, unit_bytes=unit_bytes) == whole
    shutil.rmtree(path.parent)


def test_a_document_of_many_ranges_is_read_twice_at_most(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "in.bin"
    separated([[7] * 4000, [8]]).tofile(path)
    file, num_bytes, chunks_of = one_file(path, "ids", RULES), [0], ids_module.chunks_of

    def counted(*arguments: Any) -> Iterator[np.ndarray]:
        for ids in chunks_of(*arguments):
            num_bytes[0] += ids.nbytes
            yield ids

    monkeypatch.setattr(ids_module, "CHUNK_BYTES", 64)
    monkeypatch.setattr(ids_module, "chunks_of", counted)
    assert len(read(file, unit_bytes=1000)) == 2
    assert num_bytes[0] < 2.5 * file.size


def test_the_rows_of_an_array_of_two_dimensions_are_documents(tmp_path: Path) -> None:
    np.save(tmp_path / "in.npy", np.array([[0, 5, 6], [7, 8, 0], [0, 9, 0], [0, 0, 0]], ">i4"))
    file = one_file(tmp_path / "in.npy", "ids", RULES)
    for unit_bytes in (1, 7, 12, 1000):
        assert texts(read(file, unit_bytes=unit_bytes)) == ["5 6", "7 8", "9", ""]


def test_a_row_that_ram_may_not_hold_is_rejected_and_the_next_one_begins_where_it_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("data_pipeline.readers.ids.MAX_RECORD_BYTES", 11)
    np.save(tmp_path / "in.npy", np.array([[5, 6, 7], [8, 9, 1]], ">i4"))
    first, second = read(one_file(tmp_path / "in.npy", "ids", RULES))
    assert "a row of 12 bytes is one document" in str(first)
    assert (first.line, second.line, second.byte - first.byte) == (1, 2, 12)
    monkeypatch.setattr("data_pipeline.readers.ids.MAX_RECORD_BYTES", 12)
    assert len(read(one_file(tmp_path / "in.npy", "ids", RULES))) == 2


@pytest.mark.parametrize("suffix", ["jsonl", "json", "npy", "parquet", "bin"])
def test_padding_is_dropped_like_the_end_of_document(tmp_path: Path, suffix: str) -> None:
    path, padding = tmp_path / f"in.{suffix}", 9
    rows = [[1, 2, END, 9, 9], [9, 9, 9, 9, 9], [9, 9, 3, 4, 5]]
    WRITERS[suffix](path, rows)
    if suffix == "npy":
        np.save(path, np.array(rows))
    rules = replace(RULES, padding=padding)
    found = [each for each in texts(read(one_file(path, "ids", rules))) if each]
    assert found == ["1 2", "3 4 5"]
    WRITERS[suffix](path, [[1, 9, 2]])
    reason = only_reject(path, "ids", rules).reason
    assert "end-of-document id 0 or padding id 9 at position 1 is inside" in reason


def test_a_row_of_one_id_is_no_document_unless_padding_is_known(tmp_path: Path) -> None:
    np.save(tmp_path / "in.npy", np.array([[5, 6, 1], [1, 1, 1], [END, END, END]]))
    first, row, last = read(one_file(tmp_path, "ids", RULES))
    assert texts([first, last]) == ["5 6 1", ""], "preparation skips empty documents"
    assert isinstance(row, Reject)
    assert (row.line, row.loses_rest) == (2, False)
    assert "only the id 1. If this id fills up the rows: --padding 1" in row.reason
    for padding, expected in ((1, ["5 6", "", ""]), (END, ["5 6 1", "1 1 1", ""])):
        file = one_file(tmp_path, "ids", replace(RULES, padding=padding))
        assert texts(read(file)) == expected


@settings(max_examples=100, deadline=None)
@given(
    ids=st.lists(st.sampled_from([END, 1, 2, 3, VOCAB_SIZE])),
    cut=st.integers(1, 5),
    padding=st.sampled_from([None, 3]),
)
def test_a_document_in_chunks_is_that_of_its_whole_array(
    ids: list[int], cut: int, padding: int | None
) -> None:
    rules = replace(RULES, padding=padding)
    array = np.array(ids, "<u2")
    chunks = [array[start : start + cut] for start in range(0, len(ids), cut)]
    dropped = {END, padding}
    places = [place for place, id_ in enumerate(ids) if id_ not in dropped]
    content = ids[places[0] : places[-1] + 1] if places else []
    if dropped & {*content} or VOCAB_SIZE in content:
        for parts in ([array], chunks):
            with pytest.raises(BadRecordError, match="at position"):
                list(texts_of_chunks(parts, rules))
        return
    text = " ".join(map(str, content))
    assert text_of_array(array, rules) == text_of_value(ids, rules, "ids") == text
    assert "".join(texts_of_chunks(chunks, rules)) == text


def test_a_file_that_holds_no_ids_is_refused_by_name_and_ignored_in_a_folder(
    tmp_path: Path,
) -> None:
    (tmp_path / "a.txt").write_text("1 2 3")
    with pytest.raises(ConfigError, match=r"a.txt: --format ids reads .jsonl, .ndjson, .json"):
        one_file(tmp_path / "a.txt", "ids", RULES)
    (tmp_path / "b.jsonl").write_text('{"ids": [1]}')
    found = find(tmp_path, format="ids", ids=RULES)
    assert [file.name for file in found.files] == ["b.jsonl"]
    assert found.ignored[".txt"] == 1


def test_a_raw_file_without_its_type_is_refused(tmp_path: Path) -> None:
    separated(DOCUMENTS).tofile(tmp_path / "in.bin")
    with pytest.raises(ConfigError, match="--dtype uint16"):
        one_file(tmp_path / "in.bin", "ids", IdRules(VOCAB_SIZE, END))


SONGS = {
    '{"ids": [1, 2],\n "ids_encoded": false}\n': ("json", [0]),
    '{"programs": [], "ids": [[1], [2]]}': ("json", [1, 2]),
    "[1, 2]": ("json", [0]),
    json.dumps({"ids": [[1] * 17] * 20, "ids_encoded": [True] * 20}): ("json", [*range(1, 21)]),
    '{"ids": [1]}\n{"ids": [2]}\n': ("jsonl", [1, 2]),
}


@pytest.mark.parametrize(("content", "kind_and_lines"), SONGS.items())
def test_json_of_one_song_and_json_lines_are_told_apart(
    tmp_path: Path, content: str, kind_and_lines: tuple[str, list[int]]
) -> None:
    (tmp_path / "song.json").write_text(content)
    file = one_file(tmp_path / "song.json", "ids", RULES)
    records = read(file)
    assert texts(records)
    assert (file.kind, [record.line for record in records]) == kind_and_lines


GOOD = [1, 2, 3]


def lists(*values: object) -> bytes:
    """Lines of JSON: a good document, then these values, then a good one."""
    return b"".join(json.dumps({"ids": value}).encode() + b"\n" for value in (GOOD, *values, GOOD))


def table(ids: pa.Array, name: str = "ids") -> bytes:
    return parquet_of(pa.table({name: ids}))


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
    "flipped header": (FLAT.replace(b"(6,)", b"(6,,"), "not an .npy array"),
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
    assert "never loaded" in only_reject(tmp_path / "in.npy", "ids", RULES).reason
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
