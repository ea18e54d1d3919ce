"""Splits, shuffles and shards: which documents, in which order."""

import itertools
from pathlib import Path

import numpy as np
import pytest

from data_pipeline.errors import DataError
from data_pipeline.preparation.prepare import prepare_dataset
from data_pipeline.preparation.shard_assignment import _cut_into_shards
from data_pipeline.shards.manifest import load_manifest
from data_pipeline.shards.prepare_settings import PrepareSettings
from tests.data_pipeline.preparation.preparing import ids_of, prepare


def write_lines(path: Path, count: int) -> Path:
    path.write_text("".join(f'{{"text": "number {number}"}}\n' for number in range(count)))
    return path


def test_splits_are_disjoint_and_of_about_the_size_asked_for(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", 3000)
    split = {"valid": 0.1, "test": 0.02}
    prepare_dataset([source], tmp_path / "out", PrepareSettings(split=split))
    ids = ids_of(tmp_path / "out")
    everything = [*ids["train"], *ids["valid"], *ids["test"]]
    assert len(set(everything)) == len(everything) == 3000
    assert 250 < len(ids["valid"]) < 350
    assert 35 < len(ids["test"]) < 85


def test_a_document_keeps_its_split_when_the_corpus_grows(tmp_path: Path) -> None:
    settings = PrepareSettings(split={"valid": 0.1})
    for count in (300, 400):
        source = write_lines(tmp_path / "in.jsonl", count)
        prepare_dataset([source], tmp_path / f"{count}", settings)
    small, large = ids_of(tmp_path / "300"), ids_of(tmp_path / "400")
    assert set(small["valid"]) <= set(large["valid"])
    assert set(small["train"]) <= set(large["train"])


@pytest.mark.parametrize("count", [3, 4, 7])
def test_no_split_of_a_tiny_corpus_is_empty(tmp_path: Path, count: int) -> None:
    source = write_lines(tmp_path / "in.jsonl", count)
    split = {"valid": 0.001, "test": 0.998}
    prepare_dataset([source], tmp_path / "out", PrepareSettings(split=split))
    ids = ids_of(tmp_path / "out")
    assert set(ids) == {"train", "valid", "test"}
    assert sum(map(len, ids.values())) == count


def test_more_splits_than_documents_are_refused(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", 2)
    settings = PrepareSettings(split={"valid": 0.1, "test": 0.1})
    with pytest.raises(DataError, match="2 documents cannot fill 3 splits"):
        prepare_dataset([source], tmp_path / "out", settings)


def test_a_shuffle_is_a_permutation_that_its_seed_decides(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", 200)
    orders = {}
    for name, seed in (("none", None), ("one", 1), ("again", 1), ("two", 2)):
        prepare_dataset([source], tmp_path / name, PrepareSettings(shuffle=seed))
        orders[name] = ids_of(tmp_path / name)["train"]
    assert orders["none"] == [f"in.jsonl:{line}" for line in range(1, 201)]
    assert orders["one"] == orders["again"] != orders["two"] != orders["none"]
    assert sorted(orders["one"]) == sorted(orders["none"])
    neighbours = zip(orders["one"], orders["one"][1:], strict=False)
    steps = [abs(int(b.split(":")[1]) - int(a.split(":")[1])) for a, b in neighbours]
    assert sum(step == 1 for step in steps) < 10


def test_the_hash_behind_splits_and_shuffles_never_changes(tmp_path: Path) -> None:
    """A golden order: datasets prepared by earlier versions must be reproducible by later ones."""
    source = write_lines(tmp_path / "in.jsonl", 12)
    settings = PrepareSettings(split={"valid": 0.25}, shuffle=5)
    prepare_dataset([source], tmp_path / "out", settings)
    lines = {
        split: [int(id_.split(":")[1]) for id_ in ids]
        for split, ids in ids_of(tmp_path / "out").items()
    }
    assert lines == {"train": [5, 11, 12, 10, 1, 4, 7, 2, 9], "valid": [8, 3, 6]}


def test_a_shard_holds_at_most_its_bytes_of_text_or_one_larger_document(
    lines: Path, tmp_path: Path
) -> None:
    prepare(lines, tmp_path / "out", 10**6)
    shards = load_manifest(tmp_path / "out").splits
    entries = [shard for entry in shards.values() for shard in entry.shards]
    assert all(entry.text_bytes <= 900 or entry.documents == 1 for entry in entries)
    assert max(entry.text_bytes for entry in entries) == 12_000
    for entry in shards.values():
        for shard, after in itertools.pairwise(entry.shards):
            assert shard.text_bytes + after.text_bytes > 900, "two that would fit in one"


def test_shards_are_cut_at_the_byte_where_no_float_is_exact_any_more() -> None:
    sizes = np.array([2**53, 1, 1, 1, 1], np.uint64)
    shards = _cut_into_shards(np.arange(5), sizes, shard_bytes=3)
    assert [numbers.tolist() for numbers in shards] == [[0], [1, 2, 3], [4]]
