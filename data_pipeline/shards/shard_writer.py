"""Writing one shard: documents to `<split>-<nnnnnn>.tar.zst` and its sidecar index.

Consecutive whole documents are packed into blocks. A block is one `<key>.npy` in a tar; a document
larger than a block is a block on its own. `frames.FrameWriter` compresses the tar in frames that
end where blocks end, so a reader decodes only the blocks it needs.

RAM is limited to about one block for documents of any size: tokens arrive in chunks. The chunks
of a giant document go to a temporary file, because a tar member starts with its size.

The same documents give the same bytes. Tar headers equal those of WebDataset's TarWriter; tarfile
writes them, because importing webdataset loads torch: 190 MB in every worker.
"""

import contextlib
import hashlib
import io
import os
import tarfile
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, cast

import numpy as np

from data_pipeline.errors import DataError, printable
from data_pipeline.shards.frames import FrameWriter
from data_pipeline.shards.manifest import (
    INDEX_SUFFIX,
    NO_TEXT,
    SHARD_SUFFIX,
    ShardEntry,
    TextCounts,
    shard_name,
)
from data_pipeline.shards.shard_index import DocumentIds, index_bytes, pack_documents
from data_pipeline.system.files import write_synced

MAX_DOCUMENT_BYTES = 8 * 2**30 - 2**20
"""Limit for the tokens of one document: a ustar header has room for sizes below 8 GiB."""
_TAR_RECORD = 512


def document_too_large(document_id: str) -> DataError:
    return DataError(
        f"document {printable(document_id)} has more than {MAX_DOCUMENT_BYTES:,} bytes of tokens, "
        "the limit of a tar member. Split its text into several files or records, and run this "
        "again."
    )


@dataclass(slots=True)
class _Block:
    """Documents that are collected for the next block."""

    ids: list[DocumentIds] = field(default_factory=list)
    tokens: list[np.ndarray] = field(default_factory=list)
    lengths: list[np.ndarray] = field(default_factory=list)  # tokens of each document
    num_bytes: int = 0


class ShardWriter:
    """Writes one shard: `add` every document in order, then `close`, which syncs the files.

    `header` is the dataset's description in the index (see `shard_index.index_bytes`).
    """

    def __init__(
        self,
        directory: Path,
        split: str,
        number: int,
        *,
        dtype: np.dtype,
        vocab_size: int,
        block_bytes: int,
        header: str = "{}",
    ) -> None:
        self.path = directory / shard_name(split, number)
        self._stem = self.path.name.removesuffix(SHARD_SUFFIX)
        self._dtype, self._vocab_size = np.dtype(dtype), vocab_size
        self._block_bytes, self._header = block_bytes, header
        self._file: BinaryIO = self.path.open("wb")
        self._frames = FrameWriter(self._file, frame_bytes=block_bytes)
        self._tar = tarfile.open(  # noqa: SIM115
            fileobj=cast(BinaryIO, self._frames),  # tarfile only writes to it
            mode="w|",
            format=tarfile.USTAR_FORMAT,
        )
        self._block = _Block()
        self._blocks: list[tuple[int, int, int]] = []  # tokens, raw offset, documents
        self._starts: list[np.ndarray] = []
        self._ids: list[DocumentIds] = []
        self._text_bytes = 0

    def add(self, document_id: str, chunks: Iterable[np.ndarray], *, text_bytes: int) -> None:
        """Append a document: its tokens in 1-D chunks, starting with the end-of-document id.

        `text_bytes` is the UTF-8 length of its text. Raises ValueError for ids outside the
        vocabulary, DataError for a document larger than a tar member can be.
        """
        # More than a block is spooled to a file. The npy header in front of the tokens is written
        # last, because it has their number: numpy pads it, so its length does not depend on that.
        header_bytes, itemsize = len(_npy_header(np.empty(0, self._dtype))), self._dtype.itemsize
        with tempfile.SpooledTemporaryFile(self._block_bytes, dir=str(self.path.parent)) as file:
            file.seek(header_bytes)
            for chunk in self._checked(document_id, chunks):
                file.write(chunk.tobytes())
                if file.tell() - header_bytes > MAX_DOCUMENT_BYTES:
                    raise document_too_large(document_id)
            num_tokens = (file.tell() - header_bytes) // itemsize
            ids = DocumentIds.of([document_id])
            if num_tokens * itemsize <= self._block_bytes:
                file.seek(header_bytes)
                tokens = np.frombuffer(file.read(), self._dtype)
                self.add_batch(ids, tokens, np.array([num_tokens]), text_bytes=text_bytes)
                return
            self._flush()
            file.seek(0)
            # Of an array of this shape that takes no RAM: all elements are one.
            file.write(_npy_header(np.broadcast_to(np.empty(1, self._dtype), (num_tokens,))))
            self._write_block({"npy": cast(BinaryIO, file)}, num_tokens)
        self._starts.append(np.zeros(1, np.int64))
        self._ids.append(ids)
        self._text_bytes += text_bytes

    def add_batch(
        self, ids: DocumentIds, tokens: np.ndarray, lengths: np.ndarray, *, text_bytes: int
    ) -> None:
        """Append D documents: as `add` for each, with fewer steps per document.

        `tokens` are those of all documents, 1-D, and `lengths` int64 [D] how many each has;
        `text_bytes` is the UTF-8 length of all texts. Raises ValueError as `add` does.
        """
        if len(lengths) != len(ids) or (lengths <= 0).any() or lengths.sum() != len(tokens):
            raise ValueError("every document must have tokens, and every token a document")
        (tokens,) = self._checked(f"{ids.id_of(0)} and {len(ids) - 1} others", [tokens])
        ends, first = np.cumsum(lengths), 0
        sizes = lengths * self._dtype.itemsize
        while first < len(ids):
            start = int(ends[first] - lengths[first])
            room = (self._block_bytes - self._block.num_bytes) // self._dtype.itemsize
            stop = int(np.searchsorted(ends, start + room, side="right"))
            if stop > first:
                rows, block = slice(first, stop), self._block
                block.ids.append(ids[rows])
                block.tokens.append(tokens[start : ends[stop - 1]])
                block.lengths.append(lengths[rows])
                block.num_bytes += int(sizes[rows].sum())
                first = stop
                if block.num_bytes >= self._block_bytes:
                    self._flush()
            else:
                self._flush()
                if sizes[first] > self._block_bytes:
                    self.add(ids.id_of(first), [tokens[start : ends[first]]], text_bytes=0)
                    first += 1
        self._text_bytes += text_bytes

    def close(self, text_counts: TextCounts) -> ShardEntry:
        """Finish the shard, sync it and its index. `text_counts` are those of all documents."""
        self._flush()
        self._tar.close()
        self._frames.finish()
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        tokens, offsets, documents = zip(*self._blocks, strict=True)
        table = pack_documents(np.concatenate(self._starts), self._ids)
        index = index_bytes(
            {
                "frames": np.array(self._frames.frames, dtype=np.int64),
                "block_tokens": np.array(tokens, dtype=np.int64),
                "block_offset": np.array(offsets, dtype=np.int64),
                "block_documents": np.array(documents, dtype=np.int64),
                "documents": np.frombuffer(table, dtype=np.uint8),
            },
            text_bytes=self._text_bytes,
            text_counts=text_counts,
            header=self._header,
        )
        # Synced, not renamed: the manifest, written last, makes the shard part of a dataset.
        write_synced(self.path.with_name(self._stem + INDEX_SUFFIX), index)
        return ShardEntry(
            name=self.path.name,
            bytes=self._frames.num_bytes,
            sha256=self._frames.sha256.hexdigest(),
            raw_bytes=self._frames.num_raw_bytes,
            raw_sha256=self._frames.raw_sha256.hexdigest(),
            index_bytes=len(index),
            index_sha256=hashlib.sha256(index).hexdigest(),
            documents=sum(documents),
            blocks=len(self._blocks),
            tokens=sum(tokens),
            text_bytes=self._text_bytes,
            text_counts=text_counts,
        )

    def abandon(self) -> None:
        """Close the incomplete file after an error."""
        self._frames.abandon()
        with contextlib.suppress(OSError):  # a full disk again; the first error is being raised
            self._file.close()

    def _checked(self, document_id: str, chunks: Iterable[np.ndarray]) -> Iterator[np.ndarray]:
        for tokens in chunks:
            if tokens.ndim != 1:
                raise ValueError(f"{document_id}: tokens must be 1-D, got {tokens.shape}")
            if not tokens.size:
                continue
            # Before the cast: astype would wrap an id that does not fit the dtype.
            if tokens.min() < 0 or tokens.max() >= self._vocab_size:
                raise ValueError(
                    f"{document_id}: token ids {tokens.min()}..{tokens.max()} are not all in the "
                    f"vocabulary of {self._vocab_size}"
                )
            yield tokens.astype(self._dtype, copy=False)

    def _flush(self) -> None:
        """Write the collected block; document starts are a second member if there are several."""
        block, self._block = self._block, _Block()
        if not block.ids:
            return
        lengths = np.concatenate(block.lengths)
        starts = (np.cumsum(lengths) - lengths).astype(np.int64)
        tokens = np.concatenate(block.tokens)
        members = {"npy": (_npy_header(tokens), tokens.data)}
        if len(lengths) > 1:
            members["starts.npy"] = (_npy_header(starts), starts.data)
        self._write_block(
            {name: io.BytesIO(b"".join(parts)) for name, parts in members.items()}, len(tokens)
        )
        self._starts.append(starts)
        self._ids += block.ids
        self._blocks[-1] = (*self._blocks[-1][:2], len(lengths))

    def _write_block(self, members: dict[str, BinaryIO], num_tokens: int) -> None:
        sizes = {name: content.seek(0, io.SEEK_END) for name, content in members.items()}
        # One unit for both members, so that one frame holds a small block with its document starts.
        start = self._tar.offset
        # A header, and the content padded to whole records.
        num_records = sum(1 + -(-size // _TAR_RECORD) for size in sizes.values())
        self._frames.next_unit(num_records * _TAR_RECORD)
        for name, content in members.items():
            content.seek(0)
            member = tarfile.TarInfo(f"{self._stem}-{len(self._blocks):08d}.{name}")
            member.size, member.mode = sizes[name], 0o444
            self._tar.addfile(member, content)
        headers = _TAR_RECORD + sizes["npy"] - num_tokens * self._dtype.itemsize
        self._blocks.append((num_tokens, start + headers, 1))


def _npy_header(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(file, np.lib.format.header_data_from_array_1_0(array))
    return file.getvalue()


# --- counting a text ------------------------------------------------------------------------------

_ASCII = bytes(range(128))
_OTHER_SPACES = [chr(code).encode() for code in range(128, 0x3001) if chr(code).isspace()]
_IN_WORD = bytes(code >= 128 or not chr(code).isspace() for code in range(256))
"""By byte of UTF-8: 0 for the whitespace of ASCII, else 1."""


class TextCounter:
    """Counts documents while their fragments pass through `document`."""

    counts = NO_TEXT

    def add(self, documents: Sequence[str]) -> None:
        """Count whole documents."""
        # No word continues in another document. Texts in ASCII are counted apart, which is faster.
        words = _num_words("\n".join(filter(str.isascii, documents)))
        words += _num_words("\n".join(text for text in documents if not text.isascii()))
        self._count(documents, words)

    def document(self, fragments: Iterable[str]) -> Iterator[str]:
        """Yield the fragments of one document, which may be cut anywhere, also in a word."""
        in_word = False
        for fragment in fragments:
            if fragment:
                continues = in_word and not fragment[0].isspace()
                self._count([fragment], _num_words(fragment) - continues)
                in_word = not fragment[-1].isspace()
            yield fragment

    def _count(self, texts: Sequence[str], words: int) -> None:
        line_ends = sum(text.count("\n") for text in texts)
        characters = sum(map(len, texts))
        self.counts += TextCounts(characters=characters, words=words, line_ends=line_ends)


def count_text(text: str) -> TextCounts:
    """The counts of one document."""
    counter = TextCounter()
    counter.add([text])
    return counter.counts


def _num_words(text: str) -> int:
    """len(text.split()), several times as fast, because no list of words is made."""
    encoded = text.encode()
    if not text.isascii():
        others = encoded.translate(None, _ASCII)  # of most texts little, so the search is fast
        if any(space in others for space in _OTHER_SPACES):
            return len(text.split())
    in_word = np.frombuffer(b"\0" + encoded.translate(_IN_WORD), np.uint8)
    return int(np.count_nonzero(in_word[1:] > in_word[:-1]))
