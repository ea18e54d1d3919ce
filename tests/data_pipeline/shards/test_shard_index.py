"""The sidecar index and its table of documents: small, exact, and refused if damaged."""

import json
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from numpy.testing import assert_array_equal

from data_pipeline.errors import DataError
from data_pipeline.shards.manifest import ShardManifest
from data_pipeline.shards.shard_index import (
    DocumentIds,
    pack_documents,
    read_block_tokens,
    unpack_documents,
)
from data_pipeline.shards.shard_reader import open_split

Dataset = tuple[Path, ShardManifest]


@pytest.mark.parametrize(
    "header",
    [
        b"",
        b"{",
        b"[1]",
        b'{"block_tokens": 3}',
        b'{"block_tokens": {"data_offsets": [0, 8]}}',
        b'{"block_tokens": {"data_offsets": [-9, "x"]}}',
        b'{"block_tokens": {"data_offsets": [4611686018427387904, 4611686018427387912]}}',
    ],
)
def test_an_index_with_an_invalid_header_is_refused(dataset: Dataset, header: bytes) -> None:
    directory, manifest = dataset
    (shard, *_) = manifest.splits["train"].shards
    path = directory / shard.index_name
    size = path.stat().st_size
    for header_bytes in (len(header), 2**63):
        content = struct.pack("<Q", header_bytes) + header
        path.write_bytes(content.ljust(size, b"\0"))
        with pytest.raises(DataError, match=r"train-000000\.index\.safetensors contradicts"):
            open_split(directory, "train")


def test_an_index_with_another_layout_is_read(dataset: Dataset) -> None:
    """The header is longer, and the array follows all other data."""
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


IDS = st.one_of(
    st.text(max_size=9),
    st.builds("{}:{}".format, st.sampled_from(["a.txt", "b:c", ""]), st.integers(0, 10**20)),
)


@given(
    documents=st.lists(st.tuples(st.integers(0, 2**40), IDS), max_size=9),
)
@example([(0, "a:01"), (3, "a:"), (0, ":7"), (5, "a:-1"), (9, "a:٣"), (1, "a:1\n")])
def test_starts_and_ids_are_unpacked_unchanged(documents: list[tuple[int, str]]) -> None:
    starts = np.array([start for start, _ in documents], np.int64)
    ids = [id_ for _, id_ in documents]
    packed = pack_documents(starts, [DocumentIds.of(ids)])
    unpacked_starts, unpacked_ids = unpack_documents(packed, num_documents=len(ids))
    assert np.array_equal(unpacked_starts, starts)
    assert [unpacked_ids.id_of(number) for number in range(len(ids))] == ids


def test_a_sentence_takes_less_than_two_bytes() -> None:
    lengths = np.random.default_rng(0).integers(5, 60, 20_000)
    starts = np.cumsum(lengths) - lengths
    packed = pack_documents(
        starts, [DocumentIds.of([f"corpus/part-1.txt:{n}" for n in range(1, 20_001)])]
    )
    assert len(packed) < 2 * 20_000


@given(bit=st.integers(0))
def test_a_flipped_bit_is_refused_or_changes_nothing(bit: int) -> None:
    ids = [f"a:{n}" for n in range(5)]
    packed = bytearray(pack_documents(np.arange(5), [DocumentIds.of(ids)]))
    place = bit % (len(packed) * 8)
    packed[place // 8] ^= 1 << place % 8
    try:
        starts, unpacked_ids = unpack_documents(bytes(packed), num_documents=5)
    except ValueError:
        return
    # zstd ignores some bits of a frame
    assert [unpacked_ids.id_of(number) for number in range(5)] == ids
    assert np.array_equal(starts, np.arange(5))


def test_another_number_of_documents_is_refused() -> None:
    packed = pack_documents(np.arange(5), [DocumentIds.of("abcde")])
    with pytest.raises(ValueError, match="not of 6 documents"):
        unpack_documents(packed, num_documents=6)
