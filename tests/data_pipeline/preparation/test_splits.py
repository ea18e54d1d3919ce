"""Which documents are in which split and shard, in which order: by hashes, works or position."""

import gzip
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data_pipeline.errors import DataError
from data_pipeline.preparation.prepare import prepare_dataset
from data_pipeline.preparation.splits import _bounds, _cut_into_shards
from data_pipeline.shards.data_commands import verify_dataset
from data_pipeline.shards.manifest import PrepareSettings, load_manifest, open_tokenizer
from data_pipeline.tokenizers.training import FIXED_SPLIT
from tests.data_pipeline.preparation.preparing import ids_of, prepare, texts_of, tokens_of
from tests.data_pipeline.readers.test_tar import archive, member
from tests.support.corpus_layouts import write_files

Txl = Callable[..., Any]


@pytest.mark.parametrize("suffix", [".txt", ".txt.gz"])
@pytest.mark.parametrize("chunk_bytes", [7, 2**20])
@pytest.mark.parametrize(("recipe", "kind"), [("text8", "char"), ("enwik8", "byte")])
def test_a_corpus_of_one_document_is_split_by_its_tokens(
    tmp_path: Path,
    recipe: Any,
    kind: Any,
    suffix: str,
    chunk_bytes: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("data_pipeline.preparation.documents.CHUNK_BYTES", chunk_bytes)
    text = "".join(chr(97 + n % 25) + "ä" * (n % 3 == 0) for n in range(301))
    raw = text.encode()
    source = tmp_path / f"whole{suffix}"
    source.write_bytes(gzip.compress(raw) if suffix.endswith("gz") else raw)
    options = PrepareSettings(tokenizer=kind, recipe=recipe)
    prepare_dataset([source], tmp_path / "out", options)
    tokenizer = open_tokenizer(tmp_path / "out")
    texts = {}
    for split in ("train", "valid", "test"):
        (ids,) = tokens_of(tmp_path / "out", split)
        texts[split] = tokenizer.decode_bytes(ids)
        assert load_manifest(tmp_path / "out").splits[split].text_bytes == len(texts[split])
    assert b"".join(texts.values()) == raw
    part = (len(text) if kind == "char" else len(raw)) // 20
    for split in ("valid", "test"):
        size = len(texts[split].decode()) if kind == "char" else len(texts[split])
        assert abs(size - part) <= (kind == "byte"), "a cut in a character moves to its beginning"
    assert verify_dataset(tmp_path / "out").problems == []
    assert prepare_dataset([source], tmp_path / "out", options).already_complete


def test_the_fixed_split_is_the_papers_for_a_hundred_million() -> None:
    parts = _bounds(100_000_000, FIXED_SPLIT)
    assert parts["train"] == (0, 90_000_000)
    assert parts["valid"] == (90_000_000, 95_000_000)
    assert parts["test"] == (95_000_000, 100_000_000)
    assert _bounds(20, FIXED_SPLIT)["test"] == (19, 20)
    with pytest.raises(ValueError, match="19 tokens are too few"):
        _bounds(19, FIXED_SPLIT)


def test_a_recipe_with_its_own_splits_refuses_others_and_more_than_one_document(
    txl: Txl, corpus: Path, tmp_path: Path
) -> None:
    command = ("prepare", corpus, "--out", tmp_path / "out", "--recipe", "enwik8")
    ended = txl(*command, "--split", "valid=0.1")
    assert ended.code == 2
    assert "recipe enwik8 has its own valid and test" in ended.err
    ended = txl(*command)
    assert ended.code == 3
    assert "takes one document" in ended.err
    assert "the input has 11: 00.txt, 02.txt, 04.txt, ..." in ended.err
    (tmp_path / "short.txt").write_text("nineteen characters")
    assert txl("prepare", tmp_path / "short.txt", *command[2:]).code == 3
    assert not (tmp_path / "out").exists()
    (tmp_path / "one.jsonl").write_text(json.dumps({"text": "x" * 99}))
    assert txl("prepare", tmp_path / "one.jsonl", *command[2:]).code == 0


def songs(folder: Path, count: int) -> Path:
    """Songs as MidiTok saves them: a file each, with a list of ids for every track."""
    tracks = ([[number, track] * 5 for track in range(1 + number % 3)] for number in range(count))
    songs = (json.dumps({"ids": each}) for each in tracks)
    return write_files(folder, {f"song{n:02d}.json": song for n, song in enumerate(songs)})


def tar_of_pages(path: Path, count: int, name: str) -> Path:
    pages = (
        member(f"{name.format(number)}{page:03d}.txt", f"page {page} of {number}".encode())
        for number, page in itertools.product(range(count), range(3))
    )
    path.write_bytes(archive(*pages))
    return path


IDS = {"format": "ids", "vocab_size": 100, "end_of_document": 99}


def prepared(source: Path, out: Path, **settings: Any) -> dict[str, list[str]]:
    """Per split, the ids of its documents in order."""
    prepare_dataset([source], out, PrepareSettings(**settings))
    return ids_of(out)


def held_out(out: Path, source: Path, **settings: Any) -> tuple[list[str], list[str]]:
    """Ids of the documents of train and valid."""
    ids = prepared(source, out, split={"valid": 0.3}, **settings)
    return ids["train"], ids["valid"]


def works(ids: list[str], separator: str) -> set[str]:
    return {id_.rpartition(separator)[0] for id_ in ids}


def test_the_tracks_of_a_song_stay_together_unless_asked_otherwise(tmp_path: Path) -> None:
    source = songs(tmp_path / "in", 40)
    train, valid = held_out(tmp_path / "by_work", source, **IDS)
    assert not works(train, ":") & works(valid, ":")
    train, valid = held_out(tmp_path / "by_document", source, split_by="document", **IDS)
    assert works(train, ":") & works(valid, ":")


@pytest.mark.parametrize("name", ["book{:02d}_page", "books/{:02d}/p", "{:02d}-"])
def test_members_of_a_tar_with_a_common_stem_stay_together(tmp_path: Path, name: str) -> None:
    source = tar_of_pages(tmp_path / "books.tar", 25, name)
    lines: list[str] = []
    settings = PrepareSettings(split={"valid": 0.3})
    prepare_dataset([source], tmp_path / "out", settings, note=lines.append)
    assert any("25 works, 75 documents" in line for line in lines)
    ids = ids_of(tmp_path / "out")
    train, valid = ({id_[:-3] for id_ in ids[split]} for split in ("train", "valid"))
    assert not train & valid


def test_a_stem_that_all_members_share_is_no_work(tmp_path: Path) -> None:
    source = tar_of_pages(tmp_path / "all.tar", 20, "sample_{:02d}")
    train, valid = held_out(tmp_path / "out", source)
    assert len(valid) > 1
    assert len(train) + len(valid) == 60


def test_files_stay_together_on_request(tmp_path: Path) -> None:
    files = {f"{n}.txt": "".join(f"line {line} of {n}\n" for line in range(3)) for n in range(20)}
    source = write_files(tmp_path / "in", files)
    train, valid = held_out(tmp_path / "out", source, format="lines", split_by="file")
    assert not works(train, ":") & works(valid, ":")


def write_ids(path: Path, ids: np.ndarray) -> Path:
    if path.suffix == ".npy":
        np.save(path, ids)
    elif path.suffix == ".json":
        path.write_text(json.dumps({"ids": ids.tolist()}))
    elif path.suffix == ".gz":
        path.write_bytes(gzip.compress(ids.tobytes()))
    else:
        ids.tofile(path)
    return path


@pytest.mark.parametrize("chunk_bytes", [9, 2**20])
@pytest.mark.parametrize("name", ["genome.bin", "genome.bin.gz", "genome.npy", "genome.json"])
def test_one_sequence_of_ids_is_cut_by_position(
    tmp_path: Path, name: str, chunk_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("data_pipeline.preparation.documents.CHUNK_BYTES", chunk_bytes)
    ids = np.random.default_rng(3).integers(0, 99, 1003).astype("<u2")
    source = write_ids(tmp_path / name, ids)
    split = {"test": 0.2, "valid": 0.1}
    settings = PrepareSettings(split=split, split_by="position", dtype="uint16", **IDS)
    prepare_dataset([source], tmp_path / "out", settings)
    parts = []
    for part, size in (("train", 703), ("valid", 100), ("test", 200)):
        (tokens,) = tokens_of(tmp_path / "out", part)
        assert tokens[0] == 99
        assert len(tokens) == size + 1
        parts += tokens[1:]
    assert parts == ids.tolist()
    assert verify_dataset(tmp_path / "out").problems == []


def test_a_text_is_cut_by_position_and_several_texts_are_not(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.txt").write_text("0123456789" * 10)
    settings = PrepareSettings(split={"valid": 0.25}, split_by="position")
    prepare_dataset([tmp_path / "in"], tmp_path / "out", settings)
    entries = load_manifest(tmp_path / "out").splits
    assert {name: entry.text_bytes for name, entry in entries.items()} == {"train": 75, "valid": 25}
    (tmp_path / "in" / "b.txt").write_text("another")
    with pytest.raises(DataError, match="--split-by position takes one document"):
        prepare_dataset([tmp_path / "in"], tmp_path / "two", settings)
    settings = PrepareSettings(split={"valid": 0.2})
    with pytest.raises(DataError, match="cut by --split-by position"):
        prepare_dataset([tmp_path / "in" / "b.txt"], tmp_path / "one", settings)


def write_lines(path: Path, count: int) -> Path:
    path.write_text("".join(f'{{"text": "number {number}"}}\n' for number in range(count)))
    return path


def test_splits_are_disjoint_and_of_about_the_size_asked_for(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", 3000)
    ids = prepared(source, tmp_path / "out", split={"valid": 0.1, "test": 0.02})
    everything = [*ids["train"], *ids["valid"], *ids["test"]]
    assert len(set(everything)) == len(everything) == 3000
    assert 250 < len(ids["valid"]) < 350
    assert 35 < len(ids["test"]) < 85


def test_a_document_keeps_its_split_when_the_corpus_grows(tmp_path: Path) -> None:
    split = {"valid": 0.1}
    small, large = (
        prepared(write_lines(tmp_path / "in.jsonl", count), tmp_path / f"{count}", split=split)
        for count in (300, 400)
    )
    assert set(small["valid"]) <= set(large["valid"])
    assert set(small["train"]) <= set(large["train"])


@pytest.mark.parametrize("split_by", [None, "document", "file"])
def test_a_document_keeps_its_split_when_another_input_has_a_file_of_its_name(
    tmp_path: Path, split_by: Any
) -> None:
    for folder in ("one", "two"):
        files = {f"{n}.txt": f"{folder} {n}" for n in range(60)}
        write_files(tmp_path / folder, files)
    settings = PrepareSettings(split={"valid": 0.2}, split_by=split_by)
    splits = []
    for number, folders in enumerate((["one"], ["one", "two"])):
        out = tmp_path / f"out-{number}"
        prepare_dataset([tmp_path / folder for folder in folders], out, settings)
        texts = {split: {*texts_of(out, split).values()} for split in ("train", "valid")}
        splits.append(texts)
    alone, both = splits
    assert all(alone[split] < both[split] for split in alone)
    assert len(both["train"] | both["valid"]) == 120
    assert {text.replace("two", "one") for text in both["valid"]} > alone["valid"], "not all alike"


@pytest.mark.parametrize("count", [3, 4, 7])
def test_no_split_of_a_tiny_corpus_is_empty(tmp_path: Path, count: int) -> None:
    source = write_lines(tmp_path / "in.jsonl", count)
    split, lines = {"valid": 0.001, "test": 0.998}, list[str]()
    prepare_dataset([source], tmp_path / "out", PrepareSettings(split=split), note=lines.append)
    ids = ids_of(tmp_path / "out")
    assert "split valid took a document of another split, because none" in "\n".join(lines)
    assert set(ids) == {"train", "valid", "test"}
    assert sum(map(len, ids.values())) == count


def test_more_splits_than_documents_are_refused(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", 2)
    with pytest.raises(DataError, match="2 works or documents cannot fill the splits"):
        prepared(source, tmp_path / "out", split={"valid": 0.1, "test": 0.1})


def test_a_shuffle_is_a_permutation_that_its_seed_decides(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", 200)
    seeds = {"none": None, "one": 1, "again": 1, "two": 2}
    orders = {
        name: prepared(source, tmp_path / name, shuffle=seed)["train"]
        for name, seed in seeds.items()
    }
    assert orders["none"] == [f"in.jsonl:{line}" for line in range(1, 201)]
    assert orders["one"] == orders["again"] != orders["two"] != orders["none"]
    assert sorted(orders["one"]) == sorted(orders["none"])
    neighbours = zip(orders["one"], orders["one"][1:], strict=False)
    steps = [abs(int(b.split(":")[1]) - int(a.split(":")[1])) for a, b in neighbours]
    assert sum(step == 1 for step in steps) < 10


def test_the_hash_behind_splits_and_shuffles_never_changes(tmp_path: Path) -> None:
    """A golden order: datasets prepared by earlier versions must be reproducible by later ones."""
    source = write_lines(tmp_path / "in.jsonl", 12)
    ids = prepared(source, tmp_path / "out", split={"valid": 0.25}, shuffle=5)
    lines = {split: [int(id_.split(":")[1]) for id_ in of_split] for split, of_split in ids.items()}
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


@pytest.mark.parametrize("shuffle", [None, 5])
def test_dedup_moves_no_document_to_another_split_or_place(
    tmp_path: Path, shuffle: int | None
) -> None:
    """Split and order hang on a document's id and number, not on its rank among those kept."""
    lines = [f'{{"text": "number {n if n % 3 else n // 4}"}}\n' for n in range(600)]
    source = tmp_path / "in.jsonl"
    source.write_text("".join(lines))
    options = {"split": {"valid": 0.2, "test": 0.1}, "shuffle": shuffle}
    texts = {
        dedup: prepared(source, tmp_path / dedup, dedup=dedup, **options)
        for dedup in ("none", "exact")
    }
    firsts = {f"in.jsonl:{lines.index(line) + 1}" for line in lines}
    assert 350 < len(firsts) < 550
    assert texts["exact"] == {
        split: [id_ for id_ in ids if id_ in firsts] for split, ids in texts["none"].items()
    }
