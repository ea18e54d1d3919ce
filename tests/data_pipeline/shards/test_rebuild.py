"""`txl data rebuild`: a lost manifest is restored byte for byte, or nothing is written."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from data_pipeline.errors import DataError
from data_pipeline.preparation.prepare import prepare_dataset
from data_pipeline.shards.manifest import ShardManifest
from data_pipeline.shards.prepare_settings import PrepareSettings
from data_pipeline.shards.rebuild import rebuild_manifest

Dataset = tuple[Path, ShardManifest]
Txl = Callable[..., Any]


@pytest.mark.parametrize("left", [None, b"", b"{}", b'{"digest": "0"}'])
def test_a_lost_or_damaged_manifest_is_rebuilt_byte_for_byte(
    txl: Txl, dataset: Dataset, left: bytes | None
) -> None:
    path = dataset[0] / "manifest.json"
    whole = path.read_bytes()
    path.unlink()
    if left is not None:
        path.write_bytes(left)
    assert txl("data", "rebuild", dataset[0]).code == 0
    assert path.read_bytes() == whole
    assert "already complete" in txl("data", "rebuild", dataset[0]).out


def flip(path: Path, byte: int) -> None:
    content = bytearray(path.read_bytes())
    content[byte] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("place", [0.02, 0.5, 0.99])
@pytest.mark.parametrize("suffix", ["tar.zst", "index.safetensors"])
def test_no_manifest_is_written_for_a_damaged_file(
    dataset: Dataset, suffix: str, place: float
) -> None:
    directory, _ = dataset
    (directory / "manifest.json").unlink()
    path = directory / f"train-000001.{suffix}"
    flip(path, int(place * path.stat().st_size))
    with pytest.raises(DataError, match=r"train-000001"):
        rebuild_manifest(directory)
    assert not (directory / "manifest.json").exists()


@pytest.mark.parametrize(
    ("name", "cause"),
    [
        ("train-000002.tar.zst", "missing: train-000002.tar.zst"),
        ("valid-000000.tar.zst", "missing: valid-000000.tar.zst"),
        ("train-000001.index.safetensors", "train-000001.index.safetensors"),
        ("tokenizer.json", "tokenizer"),
    ],
)
def test_a_missing_file_that_cannot_be_rebuilt_is_named(
    dataset: Dataset, name: str, cause: str
) -> None:
    directory, _ = dataset
    (directory / "manifest.json").unlink()
    (directory / name).unlink()
    with pytest.raises(DataError, match=cause):
        rebuild_manifest(directory)


def test_shards_of_two_datasets_are_refused(dataset: Dataset, corpus: Path, tmp_path: Path) -> None:
    directory, _ = dataset
    prepare_dataset([corpus], tmp_path / "other", PrepareSettings(shuffle=1))
    (directory / "manifest.json").unlink()
    for path in (tmp_path / "other").glob("train-000000.*"):
        shutil.copy(path, directory)
    with pytest.raises(DataError, match="different datasets"):
        rebuild_manifest(directory)
