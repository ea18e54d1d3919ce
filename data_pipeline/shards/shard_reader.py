"""Reading shards: any token range of any block, decoding only the frames it needs.

Nothing is trusted that the manifest does not vouch for: file sizes when a split is opened, the hash
of a shard's index when the shard is first read, every frame's size and checksum when it is. So a
truncated, flipped, swapped or overwritten shard is refused by name before a wrong token gets out.
Opening loads the blocks' sizes only; indexes are loaded, and let go of, shard by shard.

Order, epochs and lanes are `lanes.py`'s; the checks of one file `shard_index.py`'s; datasets behind
URLs `remote_frames.py`'s; writing `shard_writer.py`'s.
"""

import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import numpy as np

from data_pipeline.shards.frame_cache import FrameCache
from data_pipeline.shards.frames import Frame
from data_pipeline.shards.manifest import ShardEntry, ShardManifest, load_manifest
from data_pipeline.shards.remote_frames import read_remote_frames, read_remote_index
from data_pipeline.shards.shard_files import check_sizes, damaged_file, read_frame
from data_pipeline.shards.shard_index import ShardIndex, read_block_tokens, read_index
from data_pipeline.storage.remote_path import DatasetPath, RemotePath, dataset_path

DEFAULT_CACHE_FRAMES = 64
INDEX_CACHE_BYTES = 256 * 2**20
"""Of indexes kept: those of some 250 shards of 128M tokens in documents of a thousand."""
_REQUESTS_AT_ONCE = 16


class TokenSource(Protocol):
    """The blocks of one split: all that the plan of who reads what needs to know of shards."""

    block_tokens: np.ndarray
    """int64 [num_blocks]: tokens of every block, in corpus order across shards."""
    dtype: np.dtype
    """Of the tokens `read` returns."""

    def document_starts(self, block: int) -> np.ndarray:
        """int64 [documents of the block], rising from 0, in tokens from the block's start."""

    def read(self, block: int, start: int, stop: int) -> np.ndarray:
        """Tokens [start, stop) of a block, 1-D."""


class _OpenShard:
    """What reading needs of one shard's index, its numbers of blocks and documents local."""

    def __init__(self, index: ShardIndex) -> None:
        self.frames = index.frames
        self.frame_ends = index.frames[:, 2] + index.frames[:, 3]
        self.block_offset = index.block_offset
        self.first_document = np.concatenate([[0], np.cumsum(index.block_documents)])
        self.document_starts = index.document_starts
        self.num_bytes = sum(array.nbytes for array in vars(self).values())


class SplitReader:
    """A TokenSource over one split. Safe to share between threads; not to pickle.

    `cache_frames` decoded frames (about 512 KiB each) are kept, the latest used: at least one per
    lane that reads at once keeps every frame from being decoded twice. Of the shards' indexes about
    `cache_index_bytes` are kept. Behind a URL, `frame_cache` keeps frames on disk; the user's own
    (`FrameCache.of_user`) if not given.
    """

    def __init__(
        self,
        directory: str | DatasetPath,
        split: str,
        *,
        manifest: ShardManifest,
        cache_frames: int = DEFAULT_CACHE_FRAMES,
        cache_index_bytes: int = INDEX_CACHE_BYTES,
        frame_cache: FrameCache | None = None,
    ) -> None:
        if cache_frames < 1:
            raise ValueError(f"cache_frames={cache_frames} must be at least 1")
        self.directory, self.split, self.manifest = dataset_path(directory), split, manifest
        self.entry = manifest.split(split, self.directory)
        self.dtype = np.dtype(manifest.dtype)
        self._cache: OrderedDict[tuple[int, int], bytes] = OrderedDict()
        self._cache_frames = cache_frames
        self._open: OrderedDict[int, _OpenShard] = OrderedDict()
        self._cache_index_bytes = cache_index_bytes
        if isinstance(self.directory, RemotePath):
            self._frame_cache = frame_cache or FrameCache.of_user()
        self._lock = threading.Lock()
        check_sizes(self.directory, self.entry.shards)
        self.block_tokens = load_block_tokens(self.directory, self.entry.shards)
        blocks = [shard.blocks for shard in self.entry.shards]
        self._first_block = np.concatenate([[0], np.cumsum(blocks)])

    @property
    def num_tokens(self) -> int:
        return self.entry.tokens

    def document_starts(self, block: int) -> np.ndarray:
        """int64 [documents of the block], rising from 0; a read-only view."""
        shard, place = self._place(block)
        index = self._index(shard)
        view = index.document_starts[index.first_document[place] : index.first_document[place + 1]]
        view.flags.writeable = False
        return view

    def read(self, block: int, start: int, stop: int) -> np.ndarray:
        """Tokens [start, stop) of `block`, a new 1-D array of `dtype`.

        Raises DataError naming shard, frame and offset when a frame is not what the index says,
        IndexError for a range outside the block.
        """
        shard, place = self._place(block)
        if not 0 <= start <= stop <= self.block_tokens[block]:
            raise IndexError(
                f"[{start}, {stop}) leaves block {block} of {self.block_tokens[block]}"
            )
        itemsize = self.dtype.itemsize
        first = int(self._index(shard).block_offset[place]) + start * itemsize
        last = first + (stop - start) * itemsize
        tokens = np.frombuffer(self._raw(shard, first, last), dtype=self.dtype).copy()
        if tokens.size and tokens.max() >= self.manifest.vocab_size:
            raise damaged_file(
                self.directory / self.entry.shards[shard].name,
                self.directory,
                f"block {block} holds token {tokens.max()}, the vocabulary ends at "
                f"{self.manifest.vocab_size}",
            )
        return tokens

    def _place(self, block: int) -> tuple[int, int]:
        """The shard of a block, and the block's number in it."""
        if not 0 <= block < len(self.block_tokens):
            raise IndexError(f"block {block} of {len(self.block_tokens)} in split {self.split}")
        shard = int(np.searchsorted(self._first_block, block, side="right")) - 1
        return shard, block - int(self._first_block[shard])

    def _index(self, shard: int) -> _OpenShard:
        """A shard's index, loaded and checked if it is not among those kept."""
        with self._lock:
            if shard in self._open:
                self._open.move_to_end(shard)
                return self._open[shard]
        entry = self.entry.shards[shard]
        index = self._read_index(entry)
        first, last = self._first_block[shard : shard + 2]
        if not np.array_equal(index.block_tokens, self.block_tokens[first:last]):
            path = self.directory / entry.index_name
            raise damaged_file(
                path, self.directory, "had other block sizes when the split was opened"
            )
        found = _OpenShard(index)
        with self._lock:
            self._open[shard] = found
            kept = sum(index.num_bytes for index in self._open.values())
            while kept > self._cache_index_bytes and len(self._open) > 1:
                kept -= self._open.popitem(last=False)[1].num_bytes
        return found

    def _read_index(self, entry: ShardEntry) -> ShardIndex:
        if isinstance(self.directory, RemotePath):
            return read_remote_index(self.directory, entry, self.dtype.itemsize, self._frame_cache)
        return read_index(self.directory, entry, self.dtype.itemsize)

    def _raw(self, shard: int, first: int, last: int) -> memoryview | bytes:
        """Bytes [first, last) of the shard's tar stream."""
        if first == last:
            return b""
        index = self._index(shard)
        low = int(np.searchsorted(index.frame_ends, first, side="right"))
        high = int(np.searchsorted(index.frame_ends, last, side="left"))
        pieces = []
        for number, data in zip(
            range(low, high + 1), self._frames(shard, low, high + 1), strict=True
        ):
            begin = int(index.frames[number, 2])
            pieces.append(memoryview(data)[max(0, first - begin) : last - begin])
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def _frames(self, shard: int, low: int, high: int) -> list[bytes]:
        """Frames [low, high) of a shard, decoded; those not kept are read."""
        found: dict[int, bytes] = {}
        with self._lock:
            for number in range(low, high):
                if (shard, number) in self._cache:
                    self._cache.move_to_end((shard, number))
                    found[number] = self._cache[shard, number]
        missing = [number for number in range(low, high) if number not in found]
        if missing:
            found |= zip(missing, self._read_frames(shard, missing), strict=True)
        with self._lock:
            for number in missing:
                self._cache[shard, number] = found[number]
            while len(self._cache) > self._cache_frames:
                self._cache.popitem(last=False)
        return [found[number] for number in range(low, high)]

    def _read_frames(self, shard: int, numbers: list[int]) -> list[bytes]:
        entry, index = self.entry.shards[shard], self._index(shard)
        frames = {number: Frame(*index.frames[number].tolist()) for number in numbers}
        if isinstance(self.directory, RemotePath):
            return read_remote_frames(self.directory, entry, frames, self._frame_cache)
        return [
            read_frame(self.directory, entry, frame, number) for number, frame in frames.items()
        ]


def load_block_tokens(directory: DatasetPath, shards: Sequence[ShardEntry]) -> np.ndarray:
    """int64 [num_blocks]: tokens of every block of these shards, and nothing else of them."""
    if isinstance(directory, RemotePath):
        with ThreadPoolExecutor(_REQUESTS_AT_ONCE) as pool:
            parts = list(pool.map(lambda shard: read_block_tokens(directory, shard), shards))
    else:
        parts = [read_block_tokens(directory, shard) for shard in shards]
    return np.concatenate(parts)


def open_split(
    directory: str | DatasetPath,
    split: str,
    *,
    manifest: ShardManifest | None = None,
    cache_frames: int = DEFAULT_CACHE_FRAMES,
) -> SplitReader:
    """Open one split, in a directory or behind a URL. `manifest` is loaded when not given.

    Raises DataError for a missing split or shard, a wrong size, or block sizes that are not the
    manifest's. Indexes and frames are checked as they are read.
    """
    manifest = manifest or load_manifest(directory)
    return SplitReader(directory, split, manifest=manifest, cache_frames=cache_frames)
