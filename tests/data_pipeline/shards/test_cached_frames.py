"""A dataset in a directory, read through a frame cache on another disk."""

from pathlib import Path

import numpy as np
import pytest
from numpy.testing import assert_array_equal

from data_pipeline.errors import DataError
from data_pipeline.shards.frame_cache import FrameCache
from data_pipeline.shards.manifest import ShardManifest
from data_pipeline.shards.shard_reader import SplitReader, open_split
from tests.data_pipeline.shards.written_split import some_documents, write_split


def all_tokens(source: SplitReader) -> np.ndarray:
    counts = source.block_tokens.tolist()
    return np.concatenate([source.read(block, 0, count) for block, count in enumerate(counts)])


@pytest.fixture
def shared(tmp_path: Path) -> tuple[Path, ShardManifest]:
    """A dataset on a network file system."""
    directory = tmp_path / "shared"
    directory.mkdir()
    return directory, write_split(directory, some_documents([3000, 20, 4000, 700]))


def open_cached(shared: tuple[Path, ShardManifest], cache: FrameCache) -> SplitReader:
    directory, manifest = shared
    return open_split(directory, "train", manifest=manifest, cache_frames=1, frame_cache=cache)


def damage_shards(directory: Path) -> None:
    """Overwrite the content of all shards with zeros of the same size."""
    for path in directory.glob("*.tar.zst"):
        path.write_bytes(bytes(path.stat().st_size))


def test_the_second_read_takes_every_frame_from_the_cache(
    shared: tuple[Path, ShardManifest], tmp_path: Path
) -> None:
    expected = all_tokens(open_split(shared[0], "train", manifest=shared[1]))
    cache = FrameCache(tmp_path / "node", 10**8)
    assert_array_equal(all_tokens(open_cached(shared, cache)), expected)
    damage_shards(shared[0])
    assert_array_equal(all_tokens(open_cached(shared, cache)), expected)
    with pytest.raises(DataError, match="is damaged"):
        all_tokens(open_split(shared[0], "train", manifest=shared[1]))


def test_a_damaged_entry_is_read_again_from_the_shard(
    shared: tuple[Path, ShardManifest], tmp_path: Path
) -> None:
    expected = all_tokens(open_split(shared[0], "train", manifest=shared[1]))
    cache = FrameCache(tmp_path / "node", 10**8)
    all_tokens(open_cached(shared, cache))
    entries = sorted(cache.directory.iterdir())
    for path in entries:
        path.write_bytes(bytes(path.stat().st_size))
    assert_array_equal(all_tokens(open_cached(shared, cache)), expected)
    assert sorted(cache.directory.iterdir()) == entries
    assert not any(path.read_bytes().strip(b"\0") == b"" for path in entries)


def test_two_readers_share_one_limit_and_a_full_or_missing_disk_stops_neither(
    shared: tuple[Path, ShardManifest], tmp_path: Path
) -> None:
    expected = all_tokens(open_split(shared[0], "train", manifest=shared[1]))
    readers = [open_cached(shared, FrameCache(tmp_path / "node", 6000)) for _ in range(2)]
    for reader in (*readers, *readers):
        assert_array_equal(all_tokens(reader), expected)
    assert sum(path.stat().st_size for path in (tmp_path / "node").iterdir()) <= 6000
    (tmp_path / "file").touch()
    unusable = FrameCache(tmp_path / "file" / "cache", 10**8)
    assert_array_equal(all_tokens(open_cached(shared, unusable)), expected)
