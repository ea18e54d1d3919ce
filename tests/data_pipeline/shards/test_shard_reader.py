"""Reading: any range of a block, when indexes and frames are loaded, and a frame cache."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.testing import assert_array_equal

from data_pipeline.errors import DataError
from data_pipeline.shards import shard_reader
from data_pipeline.shards.manifest import ShardManifest
from data_pipeline.shards.shard_files import FrameCache
from data_pipeline.shards.shard_index import read_block_tokens
from data_pipeline.shards.shard_reader import SplitReader, open_split
from tests.data_pipeline.shards.written_split import read_index, some_documents, write_split

Dataset = tuple[Path, ShardManifest]


def note_loaded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    loaded: list[str] = []
    real = shard_reader.checked_index

    def noted(data: bytes, directory: Any, entry: Any, itemsize: int) -> Any:
        loaded.append(entry.name)
        return real(data, directory, entry, itemsize)

    monkeypatch.setattr(shard_reader, "checked_index", noted)
    return loaded


def test_indexes_are_loaded_on_first_use_and_their_cache_is_limited(
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

    monkeypatch.setattr(shard_reader, "CACHED_INDEXES", 1)
    small = SplitReader(directory, "train", manifest=manifest)
    loaded.clear()
    for shard in (0, 1, 1, 0, 2):
        assert_array_equal(
            small.read(int(blocks[shard]), 0, 5), source.read(int(blocks[shard]), 0, 5)
        )
    assert loaded[:3] == [names[0], names[1], names[0]]


def test_block_sizes_equal_those_of_the_complete_indexes(dataset: Dataset) -> None:
    directory, manifest = dataset
    for split, entry in manifest.splits.items():
        whole = [read_index(directory, shard).block_tokens for shard in entry.shards]
        assert_array_equal(open_split(directory, split).block_tokens, np.concatenate(whole))


@pytest.mark.fault_row(17)
def test_an_index_changed_after_opening_is_refused(dataset: Dataset) -> None:
    directory, manifest = dataset
    source = open_split(directory, "train")
    first = manifest.splits["train"].shards[0]
    path = directory / first.index_name
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    with pytest.raises(DataError, match=f"{first.index_name} has sha256"):
        source.document_starts(0)


@pytest.mark.parametrize(("restored", "problem"), [(False, "has sha256"), (True, "had other")])
def test_swapped_block_sizes_are_refused_before_the_shard_is_read(
    dataset: Dataset, restored: bool, problem: str
) -> None:
    """Number and sum are right, so opening accepts them; the sha256 of the index does not."""
    directory, manifest = dataset
    (shard, *_) = manifest.splits["train"].shards
    path = directory / shard.index_name
    intact = path.read_bytes()
    sizes = read_block_tokens(directory, shard)
    assert len({*sizes.tolist()}) > 1
    path.write_bytes(intact.replace(sizes.tobytes(), np.roll(sizes, 1).tobytes()))
    source = open_split(directory, "train")
    assert_array_equal(source.block_tokens[: len(sizes)], np.roll(sizes, 1))
    if restored:
        path.write_bytes(intact)
    with pytest.raises(DataError, match=rf"train-000000\.index\.safetensors {problem}"):
        source.read(0, 0, 1)


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_any_range_of_a_giant_document_is_read_exactly(data: st.DataObject, tmp_path: Path) -> None:
    (document,) = some_documents([6100])
    manifest = write_split(tmp_path, [document], block_bytes=1024)
    source = open_split(tmp_path, "train", manifest=manifest, cache_frames=1)
    start = data.draw(st.integers(0, len(document)))
    stop = data.draw(st.integers(start, len(document)))
    np.testing.assert_array_equal(source.read(0, start, stop), document[start:stop])


def test_a_range_decodes_only_the_frames_it_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = write_split(tmp_path, some_documents([6100]), block_bytes=1024)
    source = open_split(tmp_path, "train", manifest=manifest)
    decoded: list[int] = []
    checked_frame = shard_reader.checked_frame

    def counted(data, path, frame, number):
        decoded.append(number)
        return checked_frame(data, path, frame, number)

    monkeypatch.setattr(shard_reader, "checked_frame", counted)
    source.read(0, 3000, 3010)
    source.read(0, 3010, 3020)
    assert len(decoded) == 1


def test_changing_the_returned_tokens_does_not_change_the_cache(tmp_path: Path) -> None:
    (document,) = some_documents([50])
    source = open_split(tmp_path, "train", manifest=write_split(tmp_path, [document]))
    source.read(0, 0, 51)[:] = 0
    np.testing.assert_array_equal(source.read(0, 0, 51), document)


def test_ranges_outside_a_block_are_refused(tmp_path: Path) -> None:
    source = open_split(tmp_path, "train", manifest=write_split(tmp_path, some_documents([50])))
    for block, start, stop in ((0, 0, 52), (0, -1, 3), (0, 5, 4), (1, 0, 1), (-1, 0, 1)):
        with pytest.raises(IndexError):
            source.read(block, start, stop)


def test_document_starts_are_the_positions_of_the_end_of_document_token(
    dataset: tuple[Path, ShardManifest],
) -> None:
    source = open_split(dataset[0], "train")
    for block, count in enumerate(source.block_tokens.tolist()):
        tokens = source.read(block, 0, count)
        np.testing.assert_array_equal(np.flatnonzero(tokens == 256), source.document_starts(block))


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
