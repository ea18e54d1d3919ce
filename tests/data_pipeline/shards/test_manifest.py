"""Manifests: loaded unchanged, refused with the cause if edited or damaged; counts of the text."""

import errno
import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_pipeline.errors import DataError, UnreadableError
from data_pipeline.preparation.prepare import prepare_dataset
from data_pipeline.shards.manifest import (
    NO_TEXT,
    PrepareSettings,
    ShardManifest,
    TextCounts,
    load_manifest,
)
from data_pipeline.shards.shard_writer import TextCounter, count_text
from data_pipeline.tokenizers import load_tokenizer

Dataset = tuple[Path, ShardManifest]


def test_a_manifest_is_loaded_as_written_with_the_same_digest(dataset: Dataset) -> None:
    directory, manifest = dataset
    assert load_manifest(directory) == manifest
    assert load_manifest(directory).digest == manifest.digest
    assert json.loads((directory / "manifest.json").read_text())["digest"] == manifest.digest


def test_a_directory_without_a_manifest_is_refused_with_the_command_to_create_one(
    tmp_path: Path,
) -> None:
    with pytest.raises(DataError, match="txl prepare INPUT --out"):
        load_manifest(tmp_path)
    with pytest.raises(DataError, match="no such directory"):
        load_manifest(tmp_path / "missing")


@pytest.mark.parametrize(
    ("content", "cause"),
    [
        ("", "not valid JSON"),
        ("{", "not valid JSON"),
        ("[" * 100_000, "not valid JSON"),
        ("\xff", "not valid JSON"),
        ('{"format": "txl-shards", "format": "txl-shards"}', "twice"),
        ('{"digest": "", "digest": 0}', "twice"),
        ("[]", "another program"),
        ('{"shards": []}', "Field required"),
        ('{"format": "txl-shards", "version": 1}', "version: Input should be 2"),
        ('{"format": "txl-shards", "version": 2}', "Field required"),
    ],
)
def test_a_file_that_is_not_a_manifest_is_refused_with_the_cause(
    tmp_path: Path, content: str, cause: str
) -> None:
    (tmp_path / "manifest.json").write_bytes(content.encode("latin-1"))
    with pytest.raises(DataError, match=cause) as caught:
        load_manifest(tmp_path)
    assert str(tmp_path / "manifest.json") in str(caught.value)


def test_a_disk_that_fails_is_not_damage(dataset: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run is restarted after the one, and not after the other."""

    def fail(path: Path, *_: object, **__: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))

    monkeypatch.setattr(Path, "stat", fail)
    monkeypatch.setattr(Path, "open", fail)
    with pytest.raises(UnreadableError, match="Input/output error"):
        load_manifest(dataset[0])
    with pytest.raises(UnreadableError, match="Input/output error"):
        load_tokenizer(dataset[0] / "tokenizer.json")


@pytest.mark.fault_row(16)
@pytest.mark.parametrize(
    ("key", "value", "cause"),
    [
        ("vocab_size", 258, "digest"),
        ("vocab_size", 257.0, "vocab_size"),
        ("dtype", "float32", "dtype"),
        ("comment", "hello", "Extra inputs"),
        ("splits", {}, "splits"),
        ("digest", "0" * 64, "digest"),
        ("digest", None, "digest"),
    ],
)
def test_any_edit_of_a_manifest_is_refused(
    dataset: Dataset, key: str, value: object, cause: str
) -> None:
    path = dataset[0] / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), key: value}))
    with pytest.raises(DataError, match=cause):
        load_manifest(dataset[0])


def test_a_missing_split_is_refused_with_a_list_of_the_existing_ones(dataset: Dataset) -> None:
    with pytest.raises(DataError, match="it has train, valid"):
        dataset[1].split("dev", dataset[0])


TEXT = "One two,\tthree\u00a0four\n\nfünf \u3000sechs\x85 \n sieben"

texts = st.text(alphabet=st.sampled_from("ab é\n\t\u00a0\u3000\x1c\x85"), max_size=12)


@given(fragments=st.lists(texts, max_size=5))
def test_the_counts_are_those_of_str_split_however_the_text_is_cut(fragments: list[str]) -> None:
    text = "".join(fragments)
    counter = TextCounter()
    assert list(counter.document(fragments)) == fragments
    assert counter.counts == TextCounts(
        characters=len(text), words=len(text.split()), line_ends=text.count("\n")
    )
    assert counter.counts == count_text(text)


def test_a_word_does_not_continue_in_the_next_document() -> None:
    counter = TextCounter()
    for text in ("one", "two"):
        list(counter.document([text]))
    assert counter.counts.words == 2


def test_preparation_counts_the_text_of_every_split(tmp_path: Path) -> None:
    texts = [TEXT * (number + 1) for number in range(6)]
    for number, text in enumerate(texts):
        (tmp_path / f"{number}.txt").write_text(text, encoding="utf-8")
    settings = PrepareSettings(split={"valid": 0.4}, shard_bytes=150, block_bytes=512)
    manifest = prepare_dataset([tmp_path], tmp_path / "out", settings).manifest
    splits = list(manifest.splits.values())
    assert len(splits[0].shards) > 1
    total = sum((split.text_counts for split in splits), NO_TEXT)
    assert total == sum(map(count_text, texts), NO_TEXT)
