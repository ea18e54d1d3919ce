"""Verifying: every byte of a dataset against its manifest, every problem listed, none skipped.

Stricter than opening a split for training, which checks sizes, indexes and the frames it reads:
here all files are hashed, all frames decoded, and the tar inside is walked as a stock reader would,
member by member, against the index and the vocabulary.
"""

import hashlib
import io
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from data_pipeline.atomic_files import sha256_file
from data_pipeline.corpus import Progress
from data_pipeline.errors import DataError
from data_pipeline.manifest import (
    INDEX_SUFFIX,
    SHARD_SUFFIX,
    ShardEntry,
    ShardManifest,
    is_dataset_file,
    load_manifest,
    open_tokenizer,
)
from data_pipeline.readers import printable
from data_pipeline.remote import DatasetPath
from data_pipeline.shard_index import ShardIndex, read_frame, read_index
from data_pipeline.tokenizers import Tokenizer


@dataclass(frozen=True, slots=True)
class Verified:
    """What `verify_dataset` found. No problems: everything is as it was written."""

    manifest: ShardManifest
    problems: list[str]
    num_bytes: int
    """Compressed bytes of all shards and indexes that the manifest lists."""


def verify_dataset(
    directory: DatasetPath, *, progress: Progress = lambda what, done, total: None
) -> Verified:
    """Read everything again. Raises DataError only when there is no manifest to verify against."""
    manifest = load_manifest(directory)
    problems = _name_problems(directory, manifest)
    try:
        tokenizer = open_tokenizer(directory, manifest)
    except DataError as error:
        problems.append(str(error))
        tokenizer = None
    shards = [shard for entry in manifest.splits.values() for shard in entry.shards]
    owners = {entry.sha256: entry.name for entry in shards}
    owners |= {entry.index_sha256: entry.index_name for entry in shards}
    total, done = sum(entry.bytes + entry.index_bytes for entry in shards), 0
    for entry in shards:
        progress(f"verifying {entry.name}", done, total)
        sound = [
            _is_sound(directory / name, expected, owners, problems)
            for name, expected in (
                (entry.name, (entry.bytes, entry.sha256)),
                (entry.index_name, (entry.index_bytes, entry.index_sha256)),
            )
        ]
        if all(sound):
            problems += _content_problems(directory, entry, manifest, tokenizer)
        done += entry.bytes + entry.index_bytes
    progress("verifying", total, total)
    return Verified(manifest, problems, total)


def _name_problems(directory: DatasetPath, manifest: ShardManifest) -> list[str]:
    """Shards and indexes that are there but not listed, and what they hold if one is missing."""
    listed = {*manifest.file_names()}
    missing = {name for name in listed if not (directory / name).is_file()}
    contents = {
        (size, digest): name
        for entry in manifest.splits.values()
        for shard in entry.shards
        for name, size, digest in (
            (shard.name, shard.bytes, shard.sha256),
            (shard.index_name, shard.index_bytes, shard.index_sha256),
        )
        if name in missing
    }
    sizes = {size for size, _ in contents}
    problems = []
    for path in [directory / name for name in sorted(entry.name for entry in directory.iterdir())]:
        if path.name in listed or not path.is_file():
            continue
        size = path.stat().st_size
        owner = contents.get((size, sha256_file(path))) if size in sizes else None
        belongs = path.name.endswith((SHARD_SUFFIX, INDEX_SUFFIX))
        if owner:
            problems.append(f"{printable(path.name)}: is {owner} under another name; move it back")
        elif belongs and is_dataset_file(path.name):
            problems.append(f"{path.name}: extra: not in the manifest; move it elsewhere")
        elif belongs:
            problems.append(f"{printable(path.name)}: extra: no name that txl gives; move it away")
    return problems


def _is_sound(
    path: DatasetPath, expected: tuple[int, str], owners: dict[str, str], problems: list[str]
) -> bool:
    """Whether the file has the expected size and sha256; if not, the problem is added."""
    try:
        size, digest = path.stat().st_size, sha256_file(path)
    except FileNotFoundError:
        problems.append(f"{path.name}: missing")
        return False
    except OSError as error:
        problems.append(f"{path.name}: cannot be read: {error.strerror}")
        return False
    if (size, digest) == expected:
        return True
    if digest in owners:
        problem = f"holds the content of {owners[digest]}: the two were swapped or renamed"
    elif size != expected[0]:
        problem = f"is {size:,} bytes, expected {expected[0]:,}: cut short or overwritten"
    else:
        problem = f"has sha256 {digest}, expected {expected[1]}: damaged or overwritten"
    problems.append(f"{path.name}: {problem}")
    return False


def _content_problems(
    directory: DatasetPath, entry: ShardEntry, manifest: ShardManifest, tokenizer: Tokenizer | None
) -> list[str]:
    """The tar inside a shard whose files are as listed: against index, manifest and vocabulary."""
    try:
        index = read_index(directory, entry, np.dtype(manifest.dtype).itemsize)
        stream = _RawStream(directory, entry, index)
        problems = list(_member_problems(stream, entry, index, manifest, tokenizer))
        while stream.read(2**20):  # what follows the tar's end still counts for the hash
            pass
    except DataError as error:
        return [str(error)]
    except (tarfile.TarError, ValueError, EOFError) as error:
        return [f"{entry.name}: the tar inside is damaged: {error}"]
    if stream.sha256.hexdigest() != entry.raw_sha256:
        problems.append(f"{entry.name}: its tar stream has another sha256 than the manifest says")
    return problems


def _member_problems(
    stream: "_RawStream",
    entry: ShardEntry,
    index: ShardIndex,
    manifest: ShardManifest,
    tokenizer: Tokenizer | None,
) -> Iterator[str]:
    stem = entry.name.removesuffix(SHARD_SUFFIX)
    blocks = np.split(index.document_starts, np.cumsum(index.block_documents)[:-1])
    text_bytes = 0
    bytes_of_id = tokenizer.token_bytes() if tokenizer and tokenizer.lossless else None
    opened = tokenizer is None or tokenizer.opens_documents
    with tarfile.open(fileobj=stream, mode="r|") as tar:
        for number, starts in enumerate(blocks):
            key = f"{stem}-{number:08d}"
            tokens, offset = _next_array(tar, f"{key}.npy")
            if len(starts) > 1:
                written, _ = _next_array(tar, f"{key}.starts.npy")
                if not np.array_equal(written, starts):
                    yield f"{entry.name}: {key}.starts.npy differs from the index"
            if tokens.dtype != manifest.dtype or tokens.shape != (index.block_tokens[number],):
                yield f"{entry.name}: {key} is {tokens.dtype} {tokens.shape}, not as in the index"
                continue
            if offset != index.block_offset[number]:
                yield f"{entry.name}: {key} is at byte {offset}, not where the index says"
            if tokens.max() >= manifest.vocab_size:
                yield f"{entry.name}: {key} holds token {tokens.max()}, outside the vocabulary"
                continue
            ends = np.flatnonzero(tokens == manifest.end_of_document)
            if not np.array_equal(ends, starts if opened else []):
                yield f"{entry.name}: {key}: documents do not start where the index says"
            if bytes_of_id is not None:
                text_bytes += int(bytes_of_id[tokens].sum(dtype=np.int64))
        extra = tar.next()
    if extra:
        yield f"{entry.name}: the tar has a member more than the index: {printable(extra.name)}"
    if bytes_of_id is not None and text_bytes != entry.text_bytes:
        yield f"{entry.name}: {text_bytes:,} bytes of text, the manifest says {entry.text_bytes:,}"


def _next_array(tar: tarfile.TarFile, name: str) -> tuple[np.ndarray, int]:
    """The next member, which must be `name`, and the raw byte where its first element lies."""
    member = tar.next()
    if member is None or member.name != name or not member.isreg():
        raise ValueError(
            f"expected {name}, found {printable(member.name) if member else 'its end'}"
        )
    file = tar.extractfile(member)
    content = file.read() if file else b""
    array = np.lib.format.read_array(io.BytesIO(content), allow_pickle=False)
    return array, member.offset_data + len(content) - array.nbytes


class _RawStream(io.RawIOBase):
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
