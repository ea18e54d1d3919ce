"""Shards: documents to `<split>-<nnnnnn>.tar.zst` and its sidecar index.

Whole consecutive documents are packed into blocks; a block is one `<key>.npy` in a plain tar (one
sentence a member made the tar 19 times its tokens), and a giant document is a block by itself. The
tar goes through `frames.FrameWriter`, so frames end where blocks end and a reader decodes only what
it needs. Every document opens with the end-of-document token, put there by the caller.

Same documents, same bytes: tar headers carry no time, user or group. Imports webdataset, with
`pipeline.py` alone; what it writes, stock readers read.
"""

import contextlib
import hashlib
import io
import itertools
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import numpy as np
from safetensors.numpy import save
from webdataset.writer import TarWriter

from data_pipeline.atomic_files import write_synced
from data_pipeline.frames import FrameWriter, frames_array
from data_pipeline.manifest import INDEX_SUFFIX, SHARD_SUFFIX, ShardEntry, shard_name

_TAR_RECORD = 512
_TAR_MAX_MEMBER = 8 * 2**30 - 2**20  # ustar sizes end at 8 GiB


@dataclass(slots=True)
class _Block:
    """Documents waiting to be one block."""

    ids: list[bytes] = field(default_factory=list)
    tokens: list[np.ndarray] = field(default_factory=list)
    num_bytes: int = 0
    text_bytes: int = 0


class _Shard:
    """One open shard: the tar, its frames, and the index in the making."""

    def __init__(self, directory: Path, split: str, number: int, *, frame_bytes: int) -> None:
        self.path = directory / shard_name(split, number)
        self.stem = self.path.name.removesuffix(SHARD_SUFFIX)
        self._file: BinaryIO = self.path.open("wb")
        self._frames = FrameWriter(self._file, frame_bytes=frame_bytes)
        self._tar = TarWriter(self._frames, encoder=False, mtime=0, user="", group="", mode=0o444)
        self._blocks: list[tuple[int, int, int]] = []  # tokens, raw offset, documents
        self._starts: list[np.ndarray] = []
        self._ids: list[bytes] = []
        self.token_bytes = 0
        self._text_bytes = 0

    def add(self, block: _Block) -> None:
        """Write a block as one member, with its document starts beside it if it has several."""
        lengths = [len(tokens) for tokens in block.tokens]
        starts = np.array([0, *itertools.accumulate(lengths[:-1])], dtype=np.int64)
        tokens = block.tokens[0] if len(lengths) == 1 else np.concatenate(block.tokens)
        payload = _npy(tokens)
        sample = {"__key__": f"{self.stem}-{len(self._blocks):08d}", "npy": payload}
        if len(lengths) > 1:
            sample["starts.npy"] = _npy(starts)
        before = self._tar.tarstream.offset
        self._frames.next_unit(sum(_member_bytes(len(v)) for k, v in sample.items() if k[0] != "_"))
        self._tar.write(sample)
        header = _TAR_RECORD + len(payload) - tokens.nbytes
        self._blocks.append((len(tokens), before + header, len(lengths)))
        self._starts.append(starts)
        self._ids += block.ids
        self.token_bytes += tokens.nbytes
        self._text_bytes += block.text_bytes

    def close(self) -> ShardEntry:
        """Finish the shard, sync it and its index, and return its entry."""
        self._tar.close()
        self._frames.finish()
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        index = self._index()
        index_path = self.path.with_name(self.stem + INDEX_SUFFIX)
        write_synced(index_path, index)
        return ShardEntry(
            name=self.path.name,
            bytes=self._frames.num_bytes,
            sha256=self._frames.sha256.hexdigest(),
            raw_bytes=self._frames.num_raw_bytes,
            raw_sha256=self._frames.raw_sha256.hexdigest(),
            index_bytes=len(index),
            index_sha256=hashlib.sha256(index).hexdigest(),
            documents=len(self._ids),
            blocks=len(self._blocks),
            tokens=sum(tokens for tokens, _, _ in self._blocks),
            text_bytes=self._text_bytes,
        )

    def abandon(self) -> None:
        self._frames.abandon()
        with contextlib.suppress(OSError):  # of a full disk; the first error is on its way
            self._file.close()

    def _index(self) -> bytes:
        tokens, offsets, documents = zip(*self._blocks, strict=True)
        ids = list(itertools.accumulate((len(name) for name in self._ids), initial=0))
        return save(
            {
                "frames": frames_array(self._frames.frames),
                "block_tokens": np.array(tokens, dtype=np.int64),
                "block_offset": np.array(offsets, dtype=np.int64),
                "block_documents": np.array(documents, dtype=np.int64),
                "document_starts": np.concatenate(self._starts),
                "document_id_bytes": np.frombuffer(b"".join(self._ids), dtype=np.uint8),
                "document_id_offsets": np.array(ids, dtype=np.int64),
            }
        )


class ShardWriter:
    """Writes one split: `add` every document in order, then `close`. Syncs files, moves none."""

    def __init__(
        self,
        directory: Path,
        split: str,
        *,
        dtype: np.dtype,
        vocab_size: int,
        block_bytes: int,
        shard_bytes: int,
    ) -> None:
        self._directory, self._split = directory, split
        self._dtype, self._vocab_size = np.dtype(dtype), vocab_size
        self._block_bytes, self._shard_bytes = block_bytes, shard_bytes
        self._block = _Block()
        self._shard: _Shard | None = None
        self._entries: list[ShardEntry] = []

    def add(self, document_id: str, tokens: np.ndarray, *, text_bytes: int) -> None:
        """Take a document: `tokens` 1-D, its first the end-of-document id, and its text's bytes.

        Raises ValueError for ids outside the vocabulary (numpy would wrap them silently).
        """
        if tokens.ndim != 1 or not tokens.size:
            raise ValueError(f"{document_id}: tokens must be 1-D and not empty, got {tokens.shape}")
        if tokens.min() < 0 or tokens.max() >= self._vocab_size:
            raise ValueError(
                f"{document_id}: token ids {tokens.min()}..{tokens.max()} leave the vocabulary of "
                f"{self._vocab_size}"
            )
        num_bytes = tokens.size * self._dtype.itemsize
        if num_bytes > _TAR_MAX_MEMBER:
            raise ValueError(f"{document_id}: {num_bytes:,} bytes of tokens are over a tar's limit")
        if self._block.ids and self._block.num_bytes + num_bytes > self._block_bytes:
            self._write_block()
        self._block.ids.append(document_id.encode("utf-8"))
        self._block.tokens.append(tokens.astype(self._dtype, copy=False))
        self._block.num_bytes += num_bytes
        self._block.text_bytes += text_bytes
        if self._block.num_bytes >= self._block_bytes:
            self._write_block()

    def close(self) -> list[ShardEntry]:
        """Write what is left; the entries of all shards, in order."""
        if self._block.ids:
            self._write_block()
        self._close_shard()
        return self._entries

    def abandon(self) -> None:
        """Let go of the open file after an error; what was written is not a shard."""
        if self._shard:
            self._shard.abandon()

    def _write_block(self) -> None:
        block, self._block = self._block, _Block()
        if self._shard and self._shard.token_bytes + block.num_bytes > self._shard_bytes:
            self._close_shard()
        if self._shard is None:
            self._shard = _Shard(
                self._directory, self._split, len(self._entries), frame_bytes=self._block_bytes
            )
        self._shard.add(block)

    def _close_shard(self) -> None:
        if self._shard:
            self._entries.append(self._shard.close())
            self._shard = None


def _npy(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.lib.format.write_array(file, array, version=(1, 0), allow_pickle=False)
    return file.getvalue()


def _member_bytes(size: int) -> int:
    """Bytes of one tar member: its header and its content, padded to whole records."""
    return _TAR_RECORD + -(-size // _TAR_RECORD) * _TAR_RECORD
