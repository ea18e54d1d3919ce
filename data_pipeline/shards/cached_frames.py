"""Frames and indexes of shards, from the frame cache or fetched by byte range.

For datasets at a URL, and for directories on a network file system if the run has a cache on its
nodes (`data.cache_path`).

Consecutive frames are fetched by one request. A frame's checksum and an index's sha256 are checked
for cached and for fetched bytes. A damaged cache entry is dropped and fetched again; damaged
fetched bytes are refused.
"""

import itertools

from data_pipeline.errors import DataError
from data_pipeline.shards.frame_cache import FrameCache
from data_pipeline.shards.frames import Frame, FrameError, decode_frame
from data_pipeline.shards.manifest import ShardEntry
from data_pipeline.shards.shard_files import checked_frame, read_bytes_at
from data_pipeline.shards.shard_index import ShardIndex, checked_index
from data_pipeline.system.remote_path import DatasetPath


def read_cached_index(
    directory: DatasetPath, entry: ShardEntry, itemsize: int, cache: FrameCache
) -> ShardIndex:
    """The checked index of a shard. Raises DataError naming the file."""
    data = cache.get(entry.index_sha256, 0, entry.index_bytes)
    if data is not None:
        try:
            return checked_index(data, directory, entry, itemsize)
        except DataError:
            cache.drop(entry.index_sha256, 0, entry.index_bytes)
    data = read_bytes_at(directory / entry.index_name, directory, 0, entry.index_bytes)
    index = checked_index(data, directory, entry, itemsize)
    cache.put(entry.index_sha256, 0, data)
    return index


def read_cached_frames(
    directory: DatasetPath, entry: ShardEntry, frames: dict[int, Frame], cache: FrameCache
) -> list[bytes]:
    """Raw bytes of the given frames, in the same order. Raises DataError naming the file."""
    raw = {number: _cached(entry, frame, cache) for number, frame in frames.items()}
    missing = [number for number, data in raw.items() if data is None]
    # Groups of consecutive numbers: inside each, number minus position in the list is constant.
    for _, group in itertools.groupby(enumerate(missing), lambda item: item[1] - item[0]):
        raw |= _fetched(directory, entry, {n: frames[n] for _, n in group}, cache)
    return [data for data in raw.values() if data is not None]


def _cached(entry: ShardEntry, frame: Frame, cache: FrameCache) -> bytes | None:
    key = entry.sha256, frame.compressed_offset, frame.compressed_size
    data = cache.get(*key)
    if data is None:
        return None
    try:
        return decode_frame(data, frame)
    except FrameError:
        cache.drop(*key)
        return None


def _fetched(
    directory: DatasetPath, entry: ShardEntry, frames: dict[int, Frame], cache: FrameCache
) -> dict[int, bytes]:
    """Fetch consecutive frames by one request. Each is cached once its checksum is checked."""
    path = directory / entry.name
    first = min(frame.compressed_offset for frame in frames.values())
    last = max(frame.compressed_offset + frame.compressed_size for frame in frames.values())
    data = read_bytes_at(path, directory, first, last - first, f"bytes {first:,} to {last:,}")
    raw = {}
    for number, frame in frames.items():
        start = frame.compressed_offset - first
        compressed = data[start : start + frame.compressed_size]
        raw[number] = checked_frame(compressed, path, frame, number)
        cache.put(entry.sha256, frame.compressed_offset, compressed)
    return raw
