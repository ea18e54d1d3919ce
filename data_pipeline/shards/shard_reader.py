"""Reading tokens, document starts and ids of one split, from a local directory or a URL.

Everything is checked against the manifest before its first use: the sizes of all files and the
sha256 of all indexes when a split is opened, size and checksum of every frame when it is decoded.
The sha256 of whole shards is not checked here: that would read all of the corpus before the first
step (`txl data verify` does it).
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import NamedTuple, Protocol

import numpy as np

from data_pipeline.shards.frames import Frame, FrameError, decode_frame
from data_pipeline.shards.manifest import ShardManifest, load_manifest
from data_pipeline.shards.shard_files import NO_CACHE, FrameCache, check_sizes, damaged_file
from data_pipeline.shards.shard_index import DocumentIds, ShardIndex, checked_index
from data_pipeline.system.remote_path import DatasetPath, RemotePath, dataset_path

CACHED_INDEXES = 128
"""Indexes of shards that are kept in RAM: 1 MB for 100,000 documents, 4 MB for sentences. Others
are read again when they are needed."""
_PARALLEL_REQUESTS = 16


class TokenSource(Protocol):
    """The blocks of one split. `streams/` reads tokens through this interface only."""

    block_tokens: np.ndarray
    """int64 [num_blocks]: tokens of every block, in corpus order across shards."""
    dtype: np.dtype
    """dtype of the tokens that `read` returns."""

    def document_starts(self, block: int) -> np.ndarray:
        """int64 [documents of the block]: first token of each in the block, rising from 0."""

    def read(self, block: int, start: int, stop: int) -> np.ndarray:
        """Tokens [start, stop) of a block, 1-D."""


class StoredDocument(NamedTuple):
    """A document and its place: tokens [start, stop) of a block of the split."""

    id: str
    block: int
    start: int
    stop: int

    @property
    def num_tokens(self) -> int:
        """Its tokens, including its first, the end-of-document token."""
        return self.stop - self.start


class SplitReader:
    """A TokenSource over one split of a directory or URL. Thread-safe; cannot be pickled.

    Keeps the `cache_frames` most recently used decoded frames (about 512 KiB each) in RAM: with one
    per concurrently read lane, no frame is decoded twice. What is read from a URL is also kept on
    disk (`FrameCache.of_user`).

    Raises DataError as `open_split` does.
    """

    def __init__(
        self,
        directory: str | DatasetPath,
        split: str,
        *,
        manifest: ShardManifest,
        cache_frames: int,
    ) -> None:
        self.directory, self.split, self.manifest = dataset_path(directory), split, manifest
        self.entry = manifest.split(split, self.directory)
        self.dtype = np.dtype(manifest.dtype)
        # Two threads may both decode a frame, but no thread waits for another.
        self._frame = lru_cache(cache_frames)(self._read_frame)
        self._index = lru_cache(CACHED_INDEXES)(lambda shard: self._read_index(shard)[0])
        self._cache = FrameCache.of_user() if isinstance(self.directory, RemotePath) else NO_CACHE
        shards = self.entry.shards
        self.num_tokens = self.entry.tokens
        check_sizes(self.directory, shards)
        with ThreadPoolExecutor(_PARALLEL_REQUESTS) as pool:
            indexes = pool.map(self._index, range(len(shards)))
            self.block_tokens = np.concatenate([index.block_tokens for index in indexes])
        self._first_block = np.cumsum([0, *(shard.blocks for shard in shards)])

    def document_starts(self, block: int) -> np.ndarray:
        """int64 [documents of the block], rising from 0; a read-only view."""
        shard, number = self._locate(block)
        index = self._index(shard)
        first = int(index.block_documents[:number].sum())
        return index.document_starts[first : first + int(index.block_documents[number])]

    def documents(self) -> Iterator[StoredDocument]:
        """Every document in order, read from one index after another."""
        for shard, first_block in enumerate(self._first_block[:-1].tolist()):
            index, ids = self._read_index(shard)
            num_blocks = len(index.block_tokens)
            blocks = np.repeat(np.arange(num_blocks) + first_block, index.block_documents)
            stops = np.append(index.document_starts[1:], 0)
            stops[np.cumsum(index.block_documents) - 1] = index.block_tokens
            places = (column.tolist() for column in (blocks, index.document_starts, stops))
            for number, place in enumerate(zip(*places, strict=True)):
                yield StoredDocument(ids.id_of(number), *place)

    def read(self, block: int, start: int, stop: int) -> np.ndarray:
        """Tokens [start, stop) of `block`, a new 1-D array of `dtype`.

        Raises DataError naming shard, frame and offset if a frame does not match the index,
        IndexError for a range outside the block.
        """
        shard, number = self._locate(block)
        if not 0 <= start <= stop <= self.block_tokens[block]:
            raise IndexError(
                f"[{start}, {stop}) is not in block {block} of {self.block_tokens[block]} tokens"
            )
        itemsize = self.dtype.itemsize
        first = int(self._index(shard).block_offset[number]) + start * itemsize
        last = first + (stop - start) * itemsize
        tokens = np.frombuffer(self._raw(shard, first, last), dtype=self.dtype).copy()
        # The last check before the model: on a GPU, an embedding lookup with an id outside the
        # vocabulary fails asynchronously, with no hint at the data.
        if tokens.size and tokens.max() >= self.manifest.vocab_size:
            raise damaged_file(
                self.directory / self.entry.shards[shard].name,
                f"block {block} holds token {tokens.max()}, the vocabulary ends at "
                f"{self.manifest.vocab_size}",
            )
        return tokens

    def _locate(self, block: int) -> tuple[int, int]:
        """The shard of a block, and the block's number in that shard."""
        if not 0 <= block < len(self.block_tokens):
            raise IndexError(f"block {block} of {len(self.block_tokens)} in split {self.split}")
        shard = int(np.searchsorted(self._first_block, block, side="right")) - 1
        return shard, block - int(self._first_block[shard])

    def _read_index(self, shard: int) -> tuple[ShardIndex, DocumentIds]:
        entry = self.entry.shards[shard]
        return self._cache.read(
            self.directory / entry.index_name,
            0,
            entry.index_bytes,
            sha256=entry.index_sha256,
            check=lambda data: checked_index(data, self.directory, entry, self.dtype.itemsize),
        )

    def _raw(self, shard: int, first: int, last: int) -> memoryview | bytes:
        """Bytes [first, last) of the shard's tar stream."""
        if first == last:
            return b""
        index = self._index(shard)
        # The frames that contain byte `first` and byte `last - 1`.
        ends = index.frames[:, 2] + index.frames[:, 3]
        low = int(np.searchsorted(ends, first, side="right"))
        high = int(np.searchsorted(ends, last, side="left"))
        parts = []
        for number in range(low, high + 1):
            data = self._frame(shard, number)
            begin = int(index.frames[number, 2])
            parts.append(memoryview(data)[max(0, first - begin) : last - begin])
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _read_frame(self, shard: int, number: int) -> bytes:
        """A decoded frame of a shard. Raises DataError naming its place if it is damaged."""
        entry, frame = self.entry.shards[shard], Frame(*self._index(shard).frames[number].tolist())
        path, offset = self.directory / entry.name, frame.compressed_offset
        place = f"frame {number} at byte {offset:,}"

        def check(data: bytes) -> bytes:
            try:
                return decode_frame(data, frame)
            except FrameError as error:
                raise damaged_file(path, f"{place} is damaged: {error}") from error

        return self._cache.read(
            path, offset, frame.compressed_size, sha256=entry.sha256, check=check, part=place
        )


def open_split(
    directory: str | DatasetPath,
    split: str,
    *,
    manifest: ShardManifest | None = None,
    cache_frames: int = 64,
) -> SplitReader:
    """Open one split, from a directory or a URL. `manifest` is loaded if None.

    Raises DataError for a missing split or shard, a wrong size, or a wrong index.
    """
    return SplitReader(
        directory, split, manifest=manifest or load_manifest(directory), cache_frames=cache_frames
    )
