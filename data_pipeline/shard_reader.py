"""Reading shards: any token range of any block, decoding only the frames it needs.

Nothing is trusted that the manifest does not vouch for: file sizes and the index's hash when a
split is opened, every frame's size and checksum when it is read. So a truncated, flipped, swapped
or overwritten shard is refused by name before a wrong token gets out. Order, epochs and lanes are
`lanes.py`'s; the checks of one file `shard_index.py`'s; writing `shard_writer.py`'s.
"""

import threading
from collections import OrderedDict
from pathlib import Path
from typing import Protocol

import numpy as np

from data_pipeline.frames import Frame
from data_pipeline.manifest import ShardManifest, load_manifest
from data_pipeline.shard_index import check_shard_size, read_frame, read_index, refusal

DEFAULT_CACHE_FRAMES = 64


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


class SplitReader:
    """A TokenSource over one split on disk. Safe to share between threads; not to pickle.

    `cache_frames` decoded frames (about 512 KiB each) are kept, the latest used: at least one per
    lane that reads at once keeps every frame from being decoded twice.
    """

    def __init__(
        self,
        directory: str | Path,
        split: str,
        *,
        manifest: ShardManifest,
        cache_frames: int = DEFAULT_CACHE_FRAMES,
    ) -> None:
        if cache_frames < 1:
            raise ValueError(f"cache_frames={cache_frames} must be at least 1")
        self.directory, self.split, self.manifest = Path(directory), split, manifest
        self.entry = manifest.split(split, self.directory)
        self.dtype = np.dtype(manifest.dtype)
        self._cache: OrderedDict[tuple[int, int], bytes] = OrderedDict()
        self._cache_frames = cache_frames
        self._lock = threading.Lock()
        for shard in self.entry.shards:
            check_shard_size(self.directory, shard)
        indexes = [
            read_index(self.directory, shard, self.dtype.itemsize) for shard in self.entry.shards
        ]
        self._frames = [index.frames for index in indexes]
        self._frame_ends = [index.frames[:, 2] + index.frames[:, 3] for index in indexes]
        self.block_tokens = np.concatenate([index.block_tokens for index in indexes])
        self._block_offset = np.concatenate([index.block_offset for index in indexes])
        blocks = [len(index.block_tokens) for index in indexes]
        self._block_shard = np.repeat(np.arange(len(indexes)), blocks)
        self._starts = np.concatenate([index.document_starts for index in indexes])
        documents = np.concatenate([index.block_documents for index in indexes])
        self._first_document = np.concatenate([[0], np.cumsum(documents)])

    @property
    def num_tokens(self) -> int:
        return self.entry.tokens

    def document_starts(self, block: int) -> np.ndarray:
        """int64 [documents of the block], rising from 0; a read-only view."""
        self._check_block(block)
        view = self._starts[self._first_document[block] : self._first_document[block + 1]]
        view.flags.writeable = False
        return view

    def read(self, block: int, start: int, stop: int) -> np.ndarray:
        """Tokens [start, stop) of `block`, a new 1-D array of `dtype`.

        Raises DataError naming shard, frame and offset when a frame is not what the index says,
        IndexError for a range outside the block.
        """
        self._check_block(block)
        if not 0 <= start <= stop <= self.block_tokens[block]:
            raise IndexError(
                f"[{start}, {stop}) leaves block {block} of {self.block_tokens[block]}"
            )
        shard, itemsize = int(self._block_shard[block]), self.dtype.itemsize
        first = int(self._block_offset[block]) + start * itemsize
        last = first + (stop - start) * itemsize
        tokens = np.frombuffer(self._raw(shard, first, last), dtype=self.dtype).copy()
        if tokens.size and tokens.max() >= self.manifest.vocab_size:
            raise refusal(
                self.directory / self.entry.shards[shard].name,
                self.directory,
                f"block {block} holds token {tokens.max()}, the vocabulary ends at "
                f"{self.manifest.vocab_size}",
            )
        return tokens

    def _check_block(self, block: int) -> None:
        if not 0 <= block < len(self.block_tokens):
            raise IndexError(f"block {block} of {len(self.block_tokens)} in split {self.split}")

    def _raw(self, shard: int, first: int, last: int) -> memoryview | bytes:
        """Bytes [first, last) of the shard's tar stream."""
        ends = self._frame_ends[shard]
        number = int(np.searchsorted(ends, first, side="right"))
        pieces = []
        while first < last:
            begin = int(self._frames[shard][number, 2])
            data = self._frame(shard, number)
            end = min(last, begin + len(data))
            pieces.append(memoryview(data)[first - begin : end - begin])
            first, number = end, number + 1
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def _frame(self, shard: int, number: int) -> bytes:
        key = (shard, number)
        with self._lock:
            if key in self._cache:
                self._cache.move_to_end(key)
                return self._cache[key]
        frame = Frame(*map(int, self._frames[shard][number]))
        data = read_frame(self.directory, self.entry.shards[shard], frame, number)
        with self._lock:
            self._cache[key] = data
            while len(self._cache) > self._cache_frames:
                self._cache.popitem(last=False)
        return data


def open_split(
    directory: str | Path,
    split: str,
    *,
    manifest: ShardManifest | None = None,
    cache_frames: int = DEFAULT_CACHE_FRAMES,
) -> SplitReader:
    """Open one split for reading. `manifest` is loaded from the directory when not given.

    Raises DataError for a missing split or shard, a wrong size, or an index that is not the
    manifest's. Shard contents are checked frame by frame as they are read.
    """
    manifest = manifest or load_manifest(directory)
    return SplitReader(directory, split, manifest=manifest, cache_frames=cache_frames)
