"""`txl data rebuild`: a lost manifest is restored byte for byte, or nothing is written.

Without a manifest, rebuild compares the decoded content of every shard with its index.
"""

import json
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data_pipeline.errors import DataError
from data_pipeline.preparation.prepare import prepare_dataset
from data_pipeline.shards import rebuild
from data_pipeline.shards.manifest import ShardManifest, TextCounts, index_name
from data_pipeline.shards.prepare_settings import PrepareSettings
from data_pipeline.shards.rebuild import rebuild_manifest
from data_pipeline.shards.shard_files import read_frame
from data_pipeline.shards.shard_index import (
    DocumentIds,
    index_bytes,
    pack_documents,
    read_unlisted_index,
    unpack_documents,
)

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


Arrays = dict[str, np.ndarray]


def refuse_rebuilding(directory: Path, match: str) -> None:
    (directory / "manifest.json").unlink()
    with pytest.raises(DataError, match=match):
        rebuild_manifest(directory)
    assert not (directory / "manifest.json").exists()


def move_blocks(arrays: Arrays, metadata: dict[str, Any]) -> None:
    arrays["block_offset"] = arrays["block_offset"] + 2


def join_documents(arrays: Arrays, metadata: dict[str, Any]) -> None:
    arrays["block_documents"] = np.ones_like(arrays["block_documents"])
    count = len(arrays["block_documents"])
    table = pack_documents(
        np.zeros(count, np.int64), [DocumentIds.of([f"d:{n}" for n in range(count)])]
    )
    arrays["documents"] = np.frombuffer(table, np.uint8)


def drop_a_block(arrays: Arrays, metadata: dict[str, Any]) -> None:
    num_documents = int(arrays["block_documents"].sum())
    starts, table = unpack_documents(arrays["documents"].tobytes(), num_documents=num_documents)
    for name in ("block_tokens", "block_offset", "block_documents"):
        arrays[name] = arrays[name][:-1]
    ids = [table.id_of(n) for n in range(int(arrays["block_documents"].sum()))]
    packed = pack_documents(starts[: len(ids)], [DocumentIds.of(ids)])
    arrays["documents"] = np.frombuffer(packed, np.uint8)


def count_more_text(arrays: Arrays, metadata: dict[str, Any]) -> None:
    metadata["text_bytes"] += 1


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (move_blocks, "documents do not start where the index says"),
        (join_documents, "documents do not start where the index says"),
        (drop_a_block, "bytes of text, the index has"),
        (count_more_text, "bytes of text, the index has"),
    ],
)
def test_an_index_that_describes_other_content_is_refused(
    dataset: Dataset, change: Callable[[Arrays, dict[str, Any]], None], problem: str
) -> None:
    """The index is valid in itself: its digest and sizes fit the changed arrays."""
    directory, manifest = dataset
    (shard, *_) = manifest.splits["train"].shards
    path = directory / shard.index_name
    arrays, metadata = read_unlisted_index(path)
    change(arrays, metadata)
    path.write_bytes(
        index_bytes(
            arrays,
            text_bytes=metadata["text_bytes"],
            text_counts=TextCounts(**metadata["text_counts"]),
            header=json.dumps(metadata["header"]),
        )
    )
    refuse_rebuilding(directory, rf"{shard.name} does not match its index: .*{problem}")


@pytest.mark.fault_row(15)
def test_shards_swapped_with_their_indexes_are_refused(dataset: Dataset) -> None:
    directory, manifest = dataset
    first, second, *_ = (shard.name for shard in manifest.splits["train"].shards)
    for one, other in ((first, second), (index_name(first), index_name(second))):
        (directory / one).rename(directory / "spare")
        (directory / other).rename(directory / one)
        (directory / "spare").rename(directory / other)
    refuse_rebuilding(directory, r"expected train-00000\d-00000000\.npy, got train-00000\d-")


@pytest.mark.fault_row(21)
@pytest.mark.parametrize("name", [b"../../../../escape-0000.npy", b"/tmp/absolute-path-0000.npy"])
def test_a_tar_with_a_name_outside_is_refused_and_writes_nothing(
    dataset: Dataset, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: bytes
) -> None:
    """Frames with valid checksums, as an attacker could write them."""
    directory, manifest = dataset
    first = f"{manifest.splits['train'].shards[0].name.removesuffix('.tar.zst')}-00000000.npy"
    assert len(name) >= len(first)
    header = tarfile.TarInfo(name.decode())

    def hostile(*place: Any) -> bytes:
        raw = read_frame(*place)
        if not raw.startswith(first.encode()):
            return raw
        header.size = tarfile.TarInfo.frombuf(raw[:512], "utf-8", "strict").size
        return header.tobuf(tarfile.USTAR_FORMAT) + raw[512:]

    monkeypatch.setattr(rebuild, "read_frame", hostile)
    before = sorted(tmp_path.rglob("*"))
    refuse_rebuilding(directory, rf"expected {first}, got .*0000\.npy")
    (directory / "manifest.json").write_bytes(manifest.to_bytes())
    assert sorted(tmp_path.rglob("*")) == before
