"""Reading: any range of a block, and when indexes and frames are loaded."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.testing import assert_array_equal

from data_pipeline.errors import DataError
from data_pipeline.shards import shard_reader
from data_pipeline.shards.frames import Frame
from data_pipeline.shards.manifest import ShardManifest
from data_pipeline.shards.shard_reader import open_split
from tests.data_pipeline.shards.written_split import some_documents, write_split

Dataset = tuple[Path, ShardManifest]


def note_loaded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    loaded: list[str] = []
    real = shard_reader.checked_index

    def noted(data: bytes, directory: Any, entry: Any, itemsize: int) -> Any:
        loaded.append(entry.name)
        return real(data, directory, entry, itemsize)

    monkeypatch.setattr(shard_reader, "checked_index", noted)
    return loaded


def test_indexes_are_loaded_at_the_beginning_and_their_cache_is_limited(
    dataset: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, manifest = dataset
    names = [shard.name for shard in manifest.splits["train"].shards]
    blocks = np.cumsum([0, *(shard.blocks for shard in manifest.splits["train"].shards)])
    loaded = note_loaded(monkeypatch)
    source = open_split(directory, "train", manifest=manifest)
    assert sorted(loaded) == names
    loaded.clear()
    for shard in (1, 1, 0, 1):
        source.read(int(blocks[shard]), 0, 5)
        source.document_starts(int(blocks[shard]))
    assert loaded == []

    monkeypatch.setattr(shard_reader, "CACHED_INDEXES", 1)
    small = open_split(directory, "train", manifest=manifest)
    small.read(0, 0, 5)
    loaded.clear()
    for shard in (0, 1, 1, 0, 2):
        assert_array_equal(
            small.read(int(blocks[shard]), 0, 5), source.read(int(blocks[shard]), 0, 5)
        )
    assert loaded[:3] == [names[1], names[0], names[2]]


@pytest.mark.fault_row(17)
def test_an_index_that_was_changed_is_refused_before_and_after_opening(
    dataset: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shard_reader, "CACHED_INDEXES", 1)
    directory, manifest = dataset
    source = open_split(directory, "train")
    source.document_starts(len(source.block_tokens) - 1)
    first = manifest.splits["train"].shards[0]
    path = directory / first.index_name
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    with pytest.raises(DataError, match=f"{first.index_name} has sha256"):
        source.document_starts(0)
    with pytest.raises(DataError, match=f"{first.index_name} has sha256"):
        open_split(directory, "train")


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
    decode_frame = shard_reader.decode_frame

    def counted(data: bytes, frame: Frame) -> bytes:
        decoded.append(frame.raw_offset)
        return decode_frame(data, frame)

    monkeypatch.setattr(shard_reader, "decode_frame", counted)
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
