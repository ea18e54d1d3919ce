"""Frames and indexes of shards behind a URL: from the disk's cache, else by byte range.

Neighbouring frames are asked for in one request. Cached or fetched, a frame is decoded against the
index's checksum, and an index is hashed: what is damaged in the cache is dropped and read again,
what was fetched damaged is refused.
"""

import itertools

from data_pipeline.errors import DataError
from data_pipeline.shards.frame_cache import FrameCache
from data_pipeline.shards.frames import Frame, FrameError, decode_frame
from data_pipeline.shards.manifest import ShardEntry
from data_pipeline.shards.shard_files import checked_frame, read_bytes_at, unreadable_file
from data_pipeline.shards.shard_index import ShardIndex, checked_index
from data_pipeline.storage.remote_path import RemotePath


def read_remote_index(
    directory: RemotePath, entry: ShardEntry, itemsize: int, cache: FrameCache
) -> ShardIndex:
    """The index of a shard, checked. Raises DataError naming the URL."""
    place = entry.index_sha256, 0
    data = cache.get(*place, entry.index_bytes)
    if data is not None:
        try:
            return checked_index(data, directory, entry, itemsize)
        except DataError:
            cache.drop(*place, entry.index_bytes)
    data = read_bytes_at(directory / entry.index_name, directory, 0, entry.index_bytes)
    index = checked_index(data, directory, entry, itemsize)
    cache.put(*place, data)
    return index


def read_remote_frames(
    directory: RemotePath, entry: ShardEntry, frames: dict[int, Frame], cache: FrameCache
) -> list[bytes]:
    """Raw bytes of some frames by number, in their order. Raises DataError naming the URL."""
    found = {number: _cached(entry, frame, cache) for number, frame in frames.items()}
    missing = [number for number, data in found.items() if data is None]
    # Numbers that rise by one keep their distance to their places in the list.
    for _, run in itertools.groupby(enumerate(missing), lambda item: item[1] - item[0]):
        found |= _fetched(directory, entry, {n: frames[n] for _, n in run}, cache)
    return [data for data in found.values() if data is not None]


def _cached(entry: ShardEntry, frame: Frame, cache: FrameCache) -> bytes | None:
    place = entry.sha256, frame.compressed_offset
    data = cache.get(*place, frame.compressed_size)
    if data is None:
        return None
    try:
        return decode_frame(data, frame)
    except FrameError:
        cache.drop(*place, frame.compressed_size)
        return None


def _fetched(
    directory: RemotePath, entry: ShardEntry, run: dict[int, Frame], cache: FrameCache
) -> dict[int, bytes]:
    """Neighbouring frames by one request; kept once they are known to be sound."""
    path, frames = directory / entry.name, list(run.values())
    first = frames[0].compressed_offset
    size = frames[-1].compressed_offset + frames[-1].compressed_size - first
    try:
        data = path.read_range(first, size)
    except OSError as error:
        raise unreadable_file(
            path, directory, f"bytes {first:,} to {first + size:,}", error
        ) from error
    found = {}
    for number, frame in run.items():
        start = frame.compressed_offset - first
        piece = data[start : start + frame.compressed_size]
        found[number] = checked_frame(piece, path, frame, number)
        cache.put(entry.sha256, frame.compressed_offset, piece)
    return found
