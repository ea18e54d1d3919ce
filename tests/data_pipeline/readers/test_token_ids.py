"""Token ids: every kind of file gives the same documents, whole and in ranges."""

import gzip
import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_pipeline.errors import ConfigError
from data_pipeline.readers import IdRules, Reject, scan_ranges
from data_pipeline.readers import ids as ids_module
from data_pipeline.readers.ids import text_of_array, text_of_value, texts_of_chunks
from data_pipeline.readers.source import BadRecordError
from tests.data_pipeline.readers.id_inputs import (
    END,
    RULES,
    VOCAB_SIZE,
    WRITERS,
    Documents,
    separated,
)
from tests.data_pipeline.readers.reading import find, one_file, read, texts

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
    (reject,) = read(one_file(path, "ids", rules))
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
