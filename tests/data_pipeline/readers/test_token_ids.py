"""Token ids: every kind of file gives the same documents, whole and in ranges."""

import contextlib
import gzip
import hashlib
import io
import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_pipeline.errors import ConfigError, DataError
from data_pipeline.readers import (
    IdRules,
    InputFile,
    Record,
    Reject,
    Source,
    find_files,
    read_records,
    scan_ranges,
)
from data_pipeline.readers.ids import IdDocument, text_of_document, text_of_value
from data_pipeline.readers.records import BadRecordError
from tests.data_pipeline.readers.id_inputs import (
    END,
    RULES,
    VOCAB_SIZE,
    WRITERS,
    Documents,
    megatron_index,
    separated,
)
from tests.data_pipeline.readers.reading import one_file, read, texts

DOCUMENTS = [[1, 2, 3], [499], [60, 61, 62, 63, 64]]
TEXTS = ["1 2 3", "499", "60 61 62 63 64"]


@pytest.mark.parametrize("suffix", WRITERS)
def test_every_kind_of_file_gives_the_ids_as_text(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"in.{suffix}"
    WRITERS[suffix](path, DOCUMENTS)
    records = read(one_file(path, "ids", RULES), text_key="ids")
    assert texts(records) == TEXTS
    assert [record.line for record in records] == [1, 2, 3]


@pytest.mark.parametrize("suffix", ["jsonl", "json", "npy", "bin"])
def test_compressed_files_give_the_same(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"in.{suffix}"
    WRITERS[suffix](path, DOCUMENTS)
    packed = path.with_suffix(path.suffix + ".gz")
    packed.write_bytes(gzip.compress(path.read_bytes()))
    assert texts(read(one_file(packed, "ids", RULES), text_key="ids")) == TEXTS


@pytest.mark.parametrize("suffix", ["npy", "megatron.bin", "bin", "jsonl"])
@settings(max_examples=8, deadline=None)
@given(
    documents=st.lists(st.lists(st.integers(1, VOCAB_SIZE - 1), min_size=1), min_size=1),
    unit_bytes=st.integers(1, 40),
)
def test_any_ranges_give_the_documents_of_the_whole_file(
    tmp_path_factory: pytest.TempPathFactory, suffix: str, documents: Documents, unit_bytes: int
) -> None:
    path = tmp_path_factory.mktemp("ids") / f"in.{suffix}"
    WRITERS[suffix](path, documents)
    file = one_file(path, "ids", RULES)
    whole = read(file, text_key="ids")
    assert texts(whole) == [" ".join(map(str, document)) for document in documents]
    assert len(scan_ranges(file, unit_bytes)) == -(-file.size // unit_bytes)
    assert read(file, text_key="ids", unit_bytes=unit_bytes) == whole
    shutil.rmtree(path.parent)


def test_the_rows_of_an_array_of_two_dimensions_are_documents(tmp_path: Path) -> None:
    np.save(tmp_path / "in.npy", np.array([[0, 5, 6], [7, 8, 0], [0, 9, 0], [0, 0, 0]], ">i4"))
    file = one_file(tmp_path / "in.npy", "ids", RULES)
    for unit_bytes in (1, 7, 12, 1000):
        assert texts(read(file, unit_bytes=unit_bytes)) == ["5 6", "7 8", "9", ""]


@pytest.mark.parametrize("suffix", ["jsonl", "json", "npy", "parquet", "bin"])
def test_padding_is_dropped_like_the_end_of_document(tmp_path: Path, suffix: str) -> None:
    path, padding = tmp_path / f"in.{suffix}", 9
    rows = [[1, 2, END, 9, 9], [9, 9, 9, 9, 9], [9, 9, 3, 4, 5]]
    WRITERS[suffix](path, rows)
    if suffix == "npy":
        np.save(path, np.array(rows))
    rules = replace(RULES, padding=padding)
    found = [each for each in texts(read(one_file(path, "ids", rules), text_key="ids")) if each]
    assert found == ["1 2", "3 4 5"]
    WRITERS[suffix](path, [[1, 9, 2]])
    (reject,) = read(one_file(path, "ids", rules), text_key="ids")
    assert "end-of-document id 0 or padding id 9 at position 1 is inside" in str(reject)


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


@settings(max_examples=40, deadline=None)
@given(
    ids=st.lists(st.sampled_from([END, 1, 2, 3, VOCAB_SIZE])),
    cut=st.integers(1, 5),
    padding=st.sampled_from([None, 3]),
)
def test_a_document_in_chunks_is_that_of_its_whole_array(
    ids: list[int], cut: int, padding: int | None
) -> None:
    rules = replace(RULES, padding=padding)
    source = Source(InputFile("in", "in", kind="bin", ids=rules))
    document = IdDocument(source, offset=100, line=1)
    array = np.array(ids, "<u2")
    for start in range(0, len(ids), cut):
        document.add(array[start : start + cut])
    record = document.build()
    expected = None
    with contextlib.suppress(BadRecordError):
        expected = text_of_document(array, rules)
    if expected is None:
        assert isinstance(record, Reject)
        assert "position" in record.reason
    else:
        assert isinstance(record, Record)
        assert record.text == expected
        assert text_of_value(ids, rules, "ids") == expected


def test_a_long_document_is_not_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("data_pipeline.readers.source.HELD_BYTES", 2**12)
    monkeypatch.setattr("data_pipeline.readers.ids.CHUNK_BYTES", 2**10)
    num_ids = 2**13 + 3
    np.full(num_ids, 400, "<u2").tofile(tmp_path / "in.bin")
    spill = io.BytesIO(b"before")
    spill.seek(6)
    source = Source(one_file(tmp_path / "in.bin", "ids", RULES), "ids", spill=spill)
    (record,) = read_records(source)
    assert isinstance(record, Record)
    assert (record.text, record.offset, record.size) == (None, 6, 4 * num_ids - 1)
    written = spill.getvalue()[6:]
    assert (len(written), hashlib.sha256(written).digest()) == (record.size, record.sha256)


def test_a_pair_is_one_input_file_however_it_is_given(tmp_path: Path) -> None:
    WRITERS["megatron.bin"](tmp_path / "in.bin", DOCUMENTS)
    for given_ in (tmp_path, tmp_path / "in.bin", tmp_path / "*"):
        file = one_file(given_, "ids", RULES)
        assert (file.kind, file.name) == ("megatron", "in.bin")
    mark = file.mark
    (tmp_path / "in.idx").write_bytes(megatron_index([[1] * 9]))
    assert one_file(tmp_path, "ids", RULES).mark != mark, "a changed index is a changed input"
    (tmp_path / "other.idx").write_bytes(b"")
    with pytest.raises(DataError, match="is an index without its"):
        one_file(tmp_path, "ids", RULES)


def test_a_file_that_holds_no_ids_is_refused_by_name_and_ignored_in_a_folder(
    tmp_path: Path,
) -> None:
    (tmp_path / "a.txt").write_text("1 2 3")
    with pytest.raises(ConfigError, match=r"a.txt: --format ids reads .jsonl, .ndjson, .json"):
        one_file(tmp_path / "a.txt", "ids", RULES)
    (tmp_path / "b.jsonl").write_text('{"ids": [1]}')
    found = find_files(
        [str(tmp_path)],
        format="ids",
        out=Path("/nowhere"),
        ids=RULES,
    )
    assert [file.name for file in found.files] == ["b.jsonl"]
    assert found.ignored[".txt"] == 1


def test_a_raw_file_without_its_type_is_refused(tmp_path: Path) -> None:
    separated(DOCUMENTS).tofile(tmp_path / "in.bin")
    with pytest.raises(ConfigError, match="--dtype uint16"):
        one_file(tmp_path / "in.bin", "ids", IdRules(VOCAB_SIZE, END))


def test_json_of_one_song_and_json_lines_are_told_apart(tmp_path: Path) -> None:
    path = tmp_path / "song.json"
    for content, kind, lines in (
        ('{"ids": [1, 2],\n "ids_encoded": false}\n', "json", [0]),
        ('{"programs": [], "ids": [[1], [2]]}', "json", [1, 2]),
        ("[1, 2]", "json", [0]),
        ('{"ids": [[1], [2], [3]] , "ids_encoded": [false, true, true]}', "json", [1, 2, 3]),
        (json.dumps({"ids": [[1]] * 20, "ids_encoded": [True] * 20}), "json", [*range(1, 21)]),
        ('{"ids": [1]}\n{"ids": [2]}\n', "jsonl", [1, 2]),
    ):
        path.write_text(content)
        file = one_file(path, "ids", RULES)
        assert file.kind == kind
        records = read(file, text_key="ids")
        assert texts(records)
        assert [record.line for record in records] == lines
