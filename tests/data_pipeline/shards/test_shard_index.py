"""The sidecar index: `read_block_tokens` on damaged and unusual headers."""

import json
import struct
from pathlib import Path

import pytest
from numpy.testing import assert_array_equal

from data_pipeline.errors import DataError
from data_pipeline.shards.manifest import ShardManifest
from data_pipeline.shards.shard_index import read_block_tokens
from data_pipeline.shards.shard_reader import open_split

Dataset = tuple[Path, ShardManifest]


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
def test_an_index_with_an_invalid_header_is_refused(dataset: Dataset, header: bytes) -> None:
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


def test_an_index_with_another_layout_is_read(dataset: Dataset) -> None:
    """With more requests: the header is longer, and the array follows all other data."""
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
