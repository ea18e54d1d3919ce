"""Manifests: loaded unchanged, and refused with the cause if edited or damaged."""

import errno
import json
import os
from pathlib import Path

import pytest

from data_pipeline.errors import DataError, UnreadableError
from data_pipeline.shards.manifest import ShardManifest, load_manifest
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
        ('{"format": "txl-shards", "format": "txl-shards"}', "twice"),
        ("[]", "another program"),
        ('{"shards": []}', "another program"),
        ('{"format": "txl-shards", "version": 1}', "upgrade txl"),
        ('{"format": "txl-shards", "version": 2}', "Field required"),
    ],
)
def test_a_file_that_is_not_a_manifest_is_refused_with_the_cause(
    tmp_path: Path, content: str, cause: str
) -> None:
    (tmp_path / "manifest.json").write_text(content)
    with pytest.raises(DataError, match=cause) as caught:
        load_manifest(tmp_path)
    assert str(tmp_path / "manifest.json") in str(caught.value)


def test_a_disk_that_fails_is_not_damage(dataset: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run is restarted after the one, and not after the other."""

    def fail(path: Path, *_: object) -> None:
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
        ("vocab_size", 10**6, "dtype"),
        ("dtype", "float32", "dtype"),
        ("end_of_document", 300, "outside the vocabulary"),
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


def test_totals_that_differ_from_the_sum_of_their_shards_are_refused(dataset: Dataset) -> None:
    path = dataset[0] / "manifest.json"
    content = json.loads(path.read_text())
    content["splits"]["train"]["tokens"] += 1
    path.write_text(json.dumps(content))
    with pytest.raises(DataError, match="its shards sum to"):
        load_manifest(dataset[0])


def test_a_missing_split_is_refused_with_a_list_of_the_existing_ones(dataset: Dataset) -> None:
    with pytest.raises(DataError, match="it has train, valid"):
        dataset[1].split("dev", dataset[0])
