"""Opening a split loads block sizes only; indexes come shard by shard, and not all of them stay."""

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_array_equal

from data_pipeline.errors import DataError
from data_pipeline.shards import shard_reader
from data_pipeline.shards.manifest import ShardManifest
from data_pipeline.shards.shard_index import read_block_tokens, read_index
from data_pipeline.shards.shard_reader import SplitReader, open_split

Dataset = tuple[Path, ShardManifest]


def note_loaded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    loaded: list[str] = []
    real = shard_reader.read_index

    def noted(directory: Any, entry: Any, itemsize: int) -> Any:
        loaded.append(entry.name)
        return real(directory, entry, itemsize)

    monkeypatch.setattr(shard_reader, "read_index", noted)
    return loaded


def test_indexes_are_loaded_on_first_use_and_a_bounded_number_is_kept(
    dataset: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, manifest = dataset
    names = [shard.name for shard in manifest.splits["train"].shards]
    blocks = np.cumsum([0, *(shard.blocks for shard in manifest.splits["train"].shards)])
    loaded = note_loaded(monkeypatch)
    source = open_split(directory, "train", manifest=manifest)
    assert loaded == []
    for shard in (1, 1, 0, 1):
        source.read(int(blocks[shard]), 0, 5)
        source.document_starts(int(blocks[shard]))
    assert loaded == [names[1], names[0]]

    small = SplitReader(directory, "train", manifest=manifest, cache_index_bytes=1)
    loaded.clear()
    for shard in (0, 1, 1, 0, 2):
        assert_array_equal(
            small.read(int(blocks[shard]), 0, 5), source.read(int(blocks[shard]), 0, 5)
        )
    assert loaded[:3] == [names[0], names[1], names[0]]
    assert len(small._open) == 1


def test_block_sizes_are_those_of_the_whole_indexes(dataset: Dataset) -> None:
    directory, manifest = dataset
    for split, entry in manifest.splits.items():
        whole = [read_index(directory, shard, itemsize=2).block_tokens for shard in entry.shards]
        assert_array_equal(open_split(directory, split).block_tokens, np.concatenate(whole))


def test_an_index_changed_after_opening_is_refused(dataset: Dataset) -> None:
    directory, manifest = dataset
    source = open_split(directory, "train")
    first = manifest.splits["train"].shards[0]
    path = directory / first.index_name
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    with pytest.raises(DataError, match=f"{first.index_name} has sha256"):
        source.document_starts(0)


@pytest.mark.parametrize(("restored", "problem"), [(False, "has sha256"), (True, "had other")])
def test_exchanged_block_sizes_are_noticed_before_the_shard_is_read(
    dataset: Dataset, restored: bool, problem: str
) -> None:
    """Number and sum are right, so opening cannot tell; the hash of the whole index can."""
    directory, manifest = dataset
    (shard, *_) = manifest.splits["train"].shards
    path = directory / shard.index_name
    sound = path.read_bytes()
    sizes = read_block_tokens(directory, shard)
    assert len({*sizes.tolist()}) > 1
    path.write_bytes(sound.replace(sizes.tobytes(), np.roll(sizes, 1).tobytes()))
    source = open_split(directory, "train")
    assert_array_equal(source.block_tokens[: len(sizes)], np.roll(sizes, 1))
    if restored:
        path.write_bytes(sound)
    with pytest.raises(DataError, match=rf"train-000000\.index\.safetensors {problem}"):
        source.read(0, 0, 1)


@pytest.mark.parametrize(
    "header",
    [
        b"",
        b"{",
        b"[1]",
        b'{"block_tokens": 3}',
        b'{"block_tokens": {"dtype": "F64", "shape": [N], "data_offsets": [0, 8]}}',
        b'{"block_tokens": {"dtype": "I64", "shape": [N], "data_offsets": [0, 8]}}',
        b'{"block_tokens": {"dtype": "I64", "shape": [N], "data_offsets": [-9, "x"]}}',
        b'{"block_tokens": {"dtype": "I64", "shape": [N], "data_offsets": [BIG, END]}}',
        b'{"block_tokens": {"dtype": "I64", "shape": [N], "data_offsets": [0, SIZE]}}',
    ],
)
def test_an_index_whose_beginning_makes_no_sense_is_refused(
    dataset: Dataset, header: bytes
) -> None:
    directory, manifest = dataset
    (shard, *_) = manifest.splits["train"].shards
    numbers = {b"N": shard.blocks, b"SIZE": 8 * shard.blocks, b"BIG": 2**62}
    numbers |= {b"END": 2**62 + 8 * shard.blocks}
    for word in (b"SIZE", b"BIG", b"END", b"[N]"):
        number = numbers[word.strip(b"[]")]
        text = str([number] if word == b"[N]" else number).encode()
        header = header.replace(word, text)
    path = directory / shard.index_name
    size = path.stat().st_size
    content = struct.pack("<Q", len(header)) + header
    path.write_bytes(content.ljust(size, b"\0"))
    with pytest.raises(DataError, match=r"train-000000\.index\.safetensors contradicts"):
        open_split(directory, "train")
    path.write_bytes(struct.pack("<Q", 2**63).ljust(size, b"\0"))
    with pytest.raises(DataError, match="its header is longer than 65,536 bytes"):
        open_split(directory, "train")


def test_an_index_laid_out_otherwise_is_read_too(dataset: Dataset) -> None:
    """By more requests: a longer header, and the array behind everything else."""
    directory, manifest = dataset
    (shard, *_) = manifest.splits["train"].shards
    expected = read_block_tokens(directory, shard)
    path = directory / shard.index_name
    offsets = [900, 900 + 8 * shard.blocks]
    about = {"dtype": "I64", "shape": [shard.blocks], "data_offsets": offsets}
    header = json.dumps({"__metadata__": {"about": "x" * 3000}, "block_tokens": about})
    data = struct.pack("<Q", len(header)) + header.encode() + bytes(900) + expected.tobytes()
    path.write_bytes(data)
    other = shard.model_copy(update={"index_bytes": len(data)})
    assert_array_equal(read_block_tokens(directory, other), expected)
