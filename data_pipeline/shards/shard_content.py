"""The decoded content of one shard compared with its index: every tar member, every token.

Only `rebuild.py` needs this. It has no manifest, so it does not know the sha256 of a shard, and
two shards renamed into each other's place, with their indexes, look intact from outside. With a
manifest, `verify.py` compares sha256s instead, which covers every byte.

The tar is read as a stock reader would, member by member. Tokens are read in chunks: a document
may be larger than memory.
"""

import hashlib
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO, cast

import numpy as np

from data_pipeline.errors import printable
from data_pipeline.shards.manifest import SHARD_SUFFIX, DatasetHeader, ShardEntry
from data_pipeline.shards.shard_files import damaged_file, read_frame
from data_pipeline.shards.shard_index import ShardIndex
from data_pipeline.system.remote_path import DatasetPath
from data_pipeline.tokenizers import Tokenizer

_CHUNK_ELEMENTS = 2**20


@dataclass(frozen=True, slots=True, eq=False)
class TokenRules:
    """The properties of a dataset's tokens that its shards are checked against."""

    dtype: np.dtype
    vocab_size: int
    end_of_document: int
    opens_documents: bool
    """Whether every document begins with `end_of_document`."""
    bytes_of_id: np.ndarray | None
    """int32 [vocab_size]: UTF-8 bytes of each token; None if the tokenizer is not lossless."""

    @classmethod
    def of(cls, dataset: DatasetHeader, tokenizer: Tokenizer) -> "TokenRules":
        return cls(
            np.dtype(dataset.dtype),
            dataset.vocab_size,
            dataset.end_of_document,
            tokenizer.opens_documents,
            tokenizer.token_bytes() if tokenizer.lossless else None,
        )


def check_content(
    directory: DatasetPath, entry: ShardEntry, index: ShardIndex, rules: TokenRules
) -> str:
    """Compare a shard's content with its index; returns the sha256 of its tar stream.

    Raises DataError naming the shard and the first difference.
    """
    stream = _TarStream(directory, entry, index)
    try:
        _check_members(stream, entry, index, rules)
    except (tarfile.TarError, ValueError, EOFError) as error:
        path = directory / entry.name
        raise damaged_file(path, directory, f"does not match its index: {error}") from error
    while stream.read(2**20):  # the sha256 includes the padding after the tar's end
        pass
    return stream.sha256.hexdigest()


def _check_members(
    stream: "_TarStream", entry: ShardEntry, index: ShardIndex, rules: TokenRules
) -> None:
    stem = entry.name.removesuffix(SHARD_SUFFIX)
    starts_of_block = np.split(index.document_starts, np.cumsum(index.block_documents)[:-1])
    text_bytes = 0
    file = cast(IO[bytes], stream)  # tarfile only reads from it
    with tarfile.open(fileobj=file, mode="r|") as tar:
        for number, starts in enumerate(starts_of_block):
            key = f"{stem}-{number:08d}"
            block = _next_array(tar, f"{key}.npy")
            shape = (int(index.block_tokens[number]),)
            if block.offset != index.block_offset[number]:
                raise ValueError(f"{key} is at byte {block.offset}, not where the index says")
            if block.dtype != rules.dtype or block.shape != shape:
                raise ValueError(f"{key} is {block.dtype} {block.shape}, not as in the index")
            text_bytes += _check_block(block, key, starts, rules)
            if len(starts) > 1:  # a block of one document has no second member
                member = _next_array(tar, f"{key}.starts.npy")
                stored = np.concatenate([chunk for _, chunk in member.chunks()])
                if member.dtype != np.int64 or not np.array_equal(stored, starts):
                    raise ValueError(f"{key}.starts.npy differs from the index")
        extra = tar.next()
    if extra:
        raise ValueError(f"the tar has one more member: {printable(extra.name)}")
    if rules.bytes_of_id is not None and text_bytes != entry.text_bytes:
        raise ValueError(f"{text_bytes:,} bytes of text, the index has {entry.text_bytes:,}")


def _check_block(block: "_Array", key: str, starts: np.ndarray, rules: TokenRules) -> int:
    """Check the tokens of one block; returns their text bytes, 0 if they cannot be counted."""
    text_bytes = num_starts = 0
    for first, tokens in block.chunks():
        if (largest := tokens.max()) >= rules.vocab_size:
            raise ValueError(f"{key} has token {largest}, outside the vocabulary")
        openers = first + np.flatnonzero(tokens == rules.end_of_document)
        # No text encodes to end_of_document, so every occurrence starts a document.
        last = int(np.searchsorted(starts, first + len(tokens)))
        expected = starts[num_starts : last if rules.opens_documents else num_starts]
        if not np.array_equal(openers, expected):
            raise ValueError(f"{key}: documents do not start where the index says")
        num_starts = last
        if rules.bytes_of_id is not None:
            text_bytes += int(rules.bytes_of_id[tokens].sum(dtype=np.int64))
    return text_bytes


@dataclass(frozen=True, slots=True)
class _Array:
    """A 1-D array in a tar member, read in chunks."""

    file: IO[bytes]
    offset: int
    """Raw byte of its first element in the tar stream."""
    dtype: np.dtype
    shape: tuple[int, ...]

    def chunks(self) -> Iterator[tuple[int, np.ndarray]]:
        """(number of the first element, elements) of one chunk after the other."""
        total = self.shape[0]
        for first in range(0, total, _CHUNK_ELEMENTS):
            count = min(total - first, _CHUNK_ELEMENTS)
            data = self.file.read(count * self.dtype.itemsize)
            yield first, np.frombuffer(data, self.dtype, count)


def _next_array(tar: tarfile.TarFile, name: str) -> _Array:
    """The next member, which must be `name` and contain exactly one 1-D array of numbers."""
    member = tar.next()
    file = tar.extractfile(member) if member is not None and member.isreg() else None
    if member is None or file is None or member.name != name:
        raise ValueError(f"expected {name}, got {printable(member.name) if member else 'its end'}")
    if np.lib.format.read_magic(file) != (1, 0):
        raise ValueError(f"{name} is not an npy file of format 1.0")
    shape, _, dtype = np.lib.format.read_array_header_1_0(file)
    header = file.tell()
    if dtype.hasobject or len(shape) != 1 or header + shape[0] * dtype.itemsize != member.size:
        raise ValueError(f"{name} is {dtype} {shape} in {member.size:,} bytes")
    return _Array(file, member.offset_data + header, dtype, shape)


class _TarStream:
    """The tar stream of a shard, decoded frame by frame and hashed while it is read."""

    def __init__(self, directory: DatasetPath, entry: ShardEntry, index: ShardIndex) -> None:
        self.sha256 = hashlib.sha256()
        self._frames = (
            read_frame(directory, entry, index.frame(number), number)
            for number in range(len(index.frames))
        )
        self._buffer = b""

    def read(self, size: int) -> bytes:
        while len(self._buffer) < size and (frame := next(self._frames, b"")):
            self.sha256.update(frame)
            self._buffer += frame
        data, self._buffer = self._buffer[:size], self._buffer[size:]
        return data
