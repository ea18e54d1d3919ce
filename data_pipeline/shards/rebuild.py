"""`txl data rebuild`: make a lost or damaged manifest again from the shards and their indexes.

Every index contains the dataset's header and a digest of its arrays. File sizes and sha256s are
computed from the files, after each shard's content was compared with its index: otherwise the new
manifest would declare a damaged shard, or two shards with swapped names, to be correct. The result
is the lost manifest, byte for byte.

Shards, indexes and `tokenizer.json` cannot be rebuilt here. Run `txl prepare` again for those.
"""

import contextlib
import hashlib
import json
import re
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, cast

import numpy as np
from pydantic import ValidationError

from data_pipeline.errors import DataError, printable
from data_pipeline.shards.frames import seek_table
from data_pipeline.shards.manifest import (
    MANIFEST_NAME,
    SHARD_SUFFIX,
    DatasetHeader,
    IndexHeader,
    ShardEntry,
    ShardManifest,
    SplitEntry,
    index_name,
    load_manifest,
    open_tokenizer,
    shard_name,
)
from data_pipeline.shards.prepare_settings import SPLIT_PATTERN
from data_pipeline.shards.shard_files import damaged_file, read_frame
from data_pipeline.shards.shard_index import ShardIndex, read_index, read_unlisted_index
from data_pipeline.system.files import (
    explain_disk_errors,
    require_writable,
    sha256_file,
    write_file,
)
from data_pipeline.system.progress import Progress
from data_pipeline.system.remote_path import DatasetPath
from data_pipeline.system.workers import InProcess, Workers
from data_pipeline.tokenizers import Tokenizer

_SHARD = re.compile(rf"({SPLIT_PATTERN})-(\d{{6}}){re.escape(SHARD_SUFFIX)}")


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


@dataclass(frozen=True, slots=True)
class Rebuilt:
    manifest: ShardManifest
    was_complete: bool
    """The manifest was already complete and is unchanged."""


def rebuild_manifest(
    directory: Path,
    *,
    workers: Workers | None = None,
    progress: Progress = lambda *_: None,
) -> Rebuilt:
    """Write `manifest.json` again.

    Raises DataError if a shard is missing, damaged or of another dataset, or the tokenizer is
    missing or another one; ConfigError if the directory is not writable. Then nothing is written.
    """
    with contextlib.suppress(DataError):  # missing and damaged manifests are both rebuilt
        return Rebuilt(load_manifest(directory), was_complete=True)
    workers = workers or InProcess()
    paths = _list_shards(directory)
    require_writable(directory)  # fail before all shards are read
    headers = {paths[number]: header for number, header in workers.map(_read_header, paths)}
    header = _common_header(directory, headers)
    tokenizer = open_tokenizer(directory, header.dataset)
    ids, expected = (
        (each.vocab_size, each.end_of_document) for each in (header.dataset, tokenizer)
    )
    if ids != expected:  # no digest covers the header
        raise DataError(
            f"{directory}: vocab_size and end_of_document are {ids} in the indexes, {expected} in "
            f"tokenizer.json. An index is damaged; restore it, or run txl prepare INPUT --out "
            f"{directory} again elsewhere."
        )
    rules = TokenRules.of(header.dataset, tokenizer)

    done, total = 0, sum(path.stat().st_size for path in paths)
    entries: dict[str, ShardEntry] = {}
    progress("reading shards", done, total)
    for _, entry in workers.map(_rebuild_entry, [_Shard(path, rules) for path in paths]):
        entries[entry.name] = entry
        done += entry.bytes
        progress("reading shards", done, total)
    splits = {
        split: SplitEntry.of([entries[shard_name(split, number)] for number in range(count)])
        for split, count in header.shards.items()
    }
    manifest = ShardManifest(**dict(header.dataset), splits=splits)
    with explain_disk_errors("writing the manifest", directory):
        write_file(directory / MANIFEST_NAME, manifest.to_bytes())
    return Rebuilt(manifest, was_complete=False)


def _list_shards(directory: Path) -> list[Path]:
    if not directory.is_dir():
        raise DataError(f"{directory}: no such directory. Give the one that txl prepare wrote.")
    paths = [path for path in sorted(directory.absolute().iterdir()) if _SHARD.fullmatch(path.name)]
    if not paths:
        raise DataError(
            f"{directory} contains no shards to rebuild a manifest from. Create the dataset: txl "
            f"prepare INPUT --out {directory}"
        )
    return paths


def _read_header(path: Path) -> IndexHeader:
    """The dataset's description in the index of the shard at `path`."""
    index_path = path.with_name(index_name(path.name))
    _, metadata = read_unlisted_index(index_path)
    try:
        return IndexHeader.model_validate_json(json.dumps(metadata["header"]))
    except (KeyError, ValidationError) as error:
        problem = f"does not describe a dataset ({error})"
        raise damaged_file(index_path, path.parent, problem) from error


def _common_header(directory: Path, headers: dict[Path, IndexHeader]) -> IndexHeader:
    """The header that all shards have. Raises DataError unless all of its shards are there."""
    first, header = next(iter(headers.items()))
    for path, other in headers.items():
        if other != header:
            raise DataError(
                f"{directory}: {path.name} and {first.name} are of different datasets. Move the "
                "shards that do not belong here elsewhere, and run this again."
            )
    expected = {shard_name(s, n) for s, count in header.shards.items() for n in range(count)}
    names = {path.name for path in headers}
    if names != expected:
        missing, extra = sorted(expected - names), sorted(names - expected)
        raise DataError(
            f"{directory}: the dataset had {len(expected)} shards; missing: "
            f"{', '.join(missing) or 'none'}; extra: {', '.join(extra) or 'none'}. Restore or "
            "move them, and run this again."
        )
    return header


@dataclass(frozen=True, slots=True, eq=False)
class _Shard:
    """One shard to read: the unit of work."""

    path: Path
    rules: TokenRules

    def __str__(self) -> str:
        return self.path.name


def _rebuild_entry(shard: _Shard) -> ShardEntry:
    """The manifest's entry of a shard, after its content was compared with its index."""
    path, directory = shard.path, shard.path.parent
    index_path = path.with_name(index_name(path.name))
    arrays, metadata = read_unlisted_index(index_path)
    try:
        entry = ShardEntry(
            name=path.name,
            bytes=path.stat().st_size,
            sha256=sha256_file(path),
            raw_bytes=int(arrays["frames"][-1, 2:4].sum()),
            raw_sha256="0" * 64,  # known once the content is read
            index_bytes=index_path.stat().st_size,
            index_sha256=sha256_file(index_path),
            documents=int(arrays["block_documents"].sum()),
            blocks=len(arrays["block_tokens"]),
            tokens=int(arrays["block_tokens"].sum()),
            text_bytes=metadata["text_bytes"],
            text_counts=metadata["text_counts"],
        )
    except (KeyError, IndexError, ValueError, OSError) as error:
        problem = f"does not describe a shard ({error})"
        raise damaged_file(index_path, directory, problem) from error
    index = read_index(directory, entry, shard.rules.dtype.itemsize)
    raw_sha256 = check_content(directory, entry, index, shard.rules)
    _check_seek_table(path, index)
    return entry.model_copy(update={"raw_sha256": raw_sha256})


def _check_seek_table(path: Path, index: ShardIndex) -> None:
    """The bytes after the last frame: no checksum of a frame covers them."""
    expected = seek_table([index.frame(number) for number in range(len(index.frames))])
    with path.open("rb") as file:
        file.seek(int(index.frames[-1, :2].sum()))
        if file.read(len(expected) + 1) != expected:
            raise damaged_file(path, path.parent, "does not end in its seek table")


# --- the content of a shard -----------------------------------------------------------------------


_CHUNK_ELEMENTS = 2**20


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
