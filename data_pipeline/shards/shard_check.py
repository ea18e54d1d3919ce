"""One shard against its manifest entry, in full: files, frames, the tar inside, every token.

Stricter than opening a split for training, which checks sizes, indexes and the frames it reads:
here both files are hashed, all frames decoded, and the tar inside is walked as a stock reader
would, member by member, against the index and the vocabulary. In pieces, for a document may be
larger than memory.
"""

import hashlib
import io
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO

import numpy as np

from data_pipeline.errors import DataError, printable
from data_pipeline.shards.manifest import SHARD_SUFFIX, ShardEntry
from data_pipeline.shards.shard_index import ShardIndex, check_sizes, read_frame, read_index
from data_pipeline.storage.atomic_files import sha256_file
from data_pipeline.storage.remote_path import DatasetPath
from data_pipeline.storage.source_errors import is_unread

_PIECE_ELEMENTS = 2**20


@dataclass(frozen=True, slots=True, eq=False)
class ShardCheck:
    """All that a worker needs to check one shard."""

    directory: DatasetPath
    entry: ShardEntry
    dtype: str
    vocab_size: int
    end_of_document: int
    bytes_of_id: np.ndarray | None
    """int32 [vocab_size], None if the tokenizer cannot be read or is not lossless."""
    opens_documents: bool
    """Whether every document begins with `end_of_document`."""

    def __str__(self) -> str:
        return self.entry.name

    @property
    def num_bytes(self) -> int:
        return self.entry.bytes + self.entry.index_bytes


@dataclass(frozen=True, slots=True)
class OtherContent:
    """A file whose bytes are not those the manifest lists for its name."""

    name: str
    size: int
    sha256: str
    expected_size: int
    expected_sha256: str

    def explain(self, owners: dict[str, str]) -> str:
        """The problem in words; `owners` are the names of all listed files by their sha256."""
        if self.sha256 in owners:
            problem = f"holds the content of {owners[self.sha256]}: the two were swapped or renamed"
        elif self.size != self.expected_size:
            problem = (
                f"is {self.size:,} bytes, expected {self.expected_size:,}: cut short or overwritten"
            )
        else:
            problem = (
                f"has sha256 {self.sha256}, expected {self.expected_sha256}: damaged or overwritten"
            )
        return f"{self.name}: {problem}"


@dataclass(frozen=True, slots=True)
class Unread:
    """A file that could not be read now: it may be sound."""

    problem: str


Finding = str | OtherContent | Unread


def check_shard(check: ShardCheck) -> list[Finding]:
    """Every problem of a shard and its index."""
    entry = check.entry
    found = [
        _file_problem(check.directory / name, size, sha256)
        for name, size, sha256 in (
            (entry.name, entry.bytes, entry.sha256),
            (entry.index_name, entry.index_bytes, entry.index_sha256),
        )
    ]
    problems = [problem for problem in found if problem]
    return problems or list(_content_problems(check))


def glance(check: ShardCheck) -> list[Finding]:
    """What opening a shard for training would notice: sizes, and the index in full."""
    try:
        check_sizes(check.directory, [check.entry])
        read_index(check.directory, check.entry, np.dtype(check.dtype).itemsize)
    except DataError as error:
        return [_finding(error)]
    return []


def _finding(error: DataError) -> Finding:
    return Unread(str(error)) if is_unread(error) else str(error)


def _file_problem(path: DatasetPath, size: int, sha256: str) -> Finding | None:
    """What keeps a file from being the one expected, if anything."""
    try:
        found_size, found_sha256 = path.stat().st_size, sha256_file(path)
    except FileNotFoundError:
        return f"{path.name}: missing"
    except OSError as error:
        problem = f"{path.name}: cannot be read: {error.strerror}"
        return Unread(problem) if is_unread(error) else problem
    if (found_size, found_sha256) == (size, sha256):
        return None
    return OtherContent(path.name, found_size, found_sha256, size, sha256)


def _content_problems(check: ShardCheck) -> list[Finding]:
    """The tar inside a shard whose files are as listed: against index, manifest and vocabulary."""
    entry = check.entry
    try:
        index = read_index(check.directory, entry, np.dtype(check.dtype).itemsize)
        stream = RawStream(check.directory, entry, index)
        problems: list[Finding] = list(_member_problems(stream, check, index))
        stream.drain()  # what follows the tar's end still counts for the hash
    except DataError as error:
        return [_finding(error)]
    except (tarfile.TarError, ValueError, EOFError) as error:
        return [f"{entry.name}: the tar inside is damaged: {error}"]
    if stream.sha256.hexdigest() != entry.raw_sha256:
        problems.append(f"{entry.name}: its tar stream has another sha256 than the manifest says")
    return problems


def _member_problems(stream: "RawStream", check: ShardCheck, index: ShardIndex) -> Iterator[str]:
    entry, bytes_of_id = check.entry, check.bytes_of_id
    stem = entry.name.removesuffix(SHARD_SUFFIX)
    blocks = np.split(index.document_starts, np.cumsum(index.block_documents)[:-1])
    text_bytes = 0
    with tarfile.open(fileobj=stream, mode="r|") as tar:
        for number, starts in enumerate(blocks):
            key = f"{stem}-{number:08d}"
            member = _next_array(tar, f"{key}.npy")
            shape = (int(index.block_tokens[number]),)
            if member.offset != index.block_offset[number]:
                yield f"{entry.name}: {key} is at byte {member.offset}, not where the index says"
            if member.dtype != check.dtype or member.shape != shape:
                yield f"{entry.name}: {key} is {member.dtype} {member.shape}, not as in the index"
            else:
                opened = 0
                for first, tokens in member.pieces():
                    if (top := tokens.max()) >= check.vocab_size:
                        yield f"{entry.name}: {key} holds token {top}, outside the vocabulary"
                        break
                    found = first + np.flatnonzero(tokens == check.end_of_document)
                    last = int(np.searchsorted(starts, first + len(tokens)))
                    expected = starts[opened : last if check.opens_documents else opened]
                    if not np.array_equal(found, expected):
                        yield f"{entry.name}: {key}: documents do not start where the index says"
                        break
                    opened = last
                    if bytes_of_id is not None:
                        text_bytes += int(bytes_of_id[tokens].sum(dtype=np.int64))
            if len(starts) > 1:
                beside = _next_array(tar, f"{key}.starts.npy")
                written = [array for _, array in beside.pieces()]
                if beside.dtype != np.int64 or not np.array_equal(np.concatenate(written), starts):
                    yield f"{entry.name}: {key}.starts.npy differs from the index"
        extra = tar.next()
    if extra:
        yield f"{entry.name}: the tar has a member more than the index: {printable(extra.name)}"
    if bytes_of_id is not None and text_bytes != entry.text_bytes:
        yield f"{entry.name}: {text_bytes:,} bytes of text, the manifest says {entry.text_bytes:,}"


@dataclass(frozen=True, slots=True)
class _Array:
    """A 1-D array in a tar, read in pieces: a giant document may be larger than memory."""

    file: IO[bytes]
    offset: int
    """Raw byte of its first element."""
    dtype: np.dtype
    shape: tuple[int, ...]

    def pieces(self) -> Iterator[tuple[int, np.ndarray]]:
        """(number of the first element, elements), one piece after the other."""
        first, total = 0, self.shape[0]
        while first < total:
            count = min(total - first, _PIECE_ELEMENTS)
            data = self.file.read(count * self.dtype.itemsize)
            yield first, np.frombuffer(data, self.dtype, count)
            first += count


def _next_array(tar: tarfile.TarFile, name: str) -> _Array:
    """The next member, which must be `name` and hold one 1-D array of numbers and nothing more."""
    member = tar.next()
    if member is None or member.name != name or not member.isreg():
        raise ValueError(
            f"expected {name}, found {printable(member.name) if member else 'its end'}"
        )
    file = tar.extractfile(member)
    if file is None or np.lib.format.read_magic(file) != (1, 0):
        raise ValueError(f"{name} is no array of format 1.0")
    shape, _, dtype = np.lib.format.read_array_header_1_0(file)
    header = file.tell()
    if dtype.hasobject or len(shape) != 1 or header + shape[0] * dtype.itemsize != member.size:
        raise ValueError(f"{name} holds {dtype} {shape} in {member.size:,} bytes")
    return _Array(file, member.offset_data + header, dtype, shape)


class RawStream(io.RawIOBase):
    """The tar stream of a shard as a file to read from start to end, hashed on the way."""

    def __init__(self, directory: DatasetPath, entry: ShardEntry, index: ShardIndex) -> None:
        self.sha256 = hashlib.sha256()
        self._frames = (
            read_frame(directory, entry, index.frame(number), number)
            for number in range(len(index.frames))
        )
        self._held = b""

    def readable(self) -> bool:
        return True

    def drain(self) -> None:
        """Read to the end."""
        while self.read(2**20):
            pass

    def read(self, size: int = -1) -> bytes:
        while size < 0 or len(self._held) < size:
            frame = next(self._frames, b"")
            if not frame:
                break
            self.sha256.update(frame)
            self._held += frame
        size = len(self._held) if size < 0 else size
        data, self._held = self._held[:size], self._held[size:]
        return data
