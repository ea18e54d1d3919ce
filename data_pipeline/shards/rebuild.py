"""`txl data rebuild`: make a lost or damaged manifest again from the shards and their indexes.

Every index contains the dataset's header and a digest of its arrays, among them a checksum of every
frame. File sizes and sha256s are computed from the files, after each shard was compared with its
index: otherwise the new manifest would declare a damaged shard, or two shards with swapped names,
to be correct. The result is the lost manifest, byte for byte.

Shards, indexes and `tokenizer.json` cannot be rebuilt here. Run `txl prepare` again for those.
"""

import contextlib
import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from pydantic import ValidationError

from data_pipeline.errors import DataError, printable
from data_pipeline.shards.frames import Frame, seek_table
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

_SHARD = re.compile(rf"({SPLIT_PATTERN})-(\d{{6}}){re.escape(SHARD_SUFFIX)}")


@dataclass(frozen=True, slots=True)
class Rebuilt:
    manifest: ShardManifest
    was_complete: bool
    """The manifest was already complete and is unchanged."""


def rebuild_manifest(directory: Path, *, progress: Progress = lambda *_: None) -> Rebuilt:
    """Write `manifest.json` again.

    Raises DataError if a shard is missing, damaged or of another dataset, or the tokenizer is
    missing or another one; ConfigError if the directory is not writable. Then nothing is written.
    """
    with contextlib.suppress(DataError):  # missing and damaged manifests are both rebuilt
        return Rebuilt(load_manifest(directory), was_complete=True)
    paths = _list_shards(directory)
    require_writable(directory)  # fail before all shards are read
    header = _common_header(directory, {path: _read_header(path) for path in paths})
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
    bytes_of_id = tokenizer.token_bytes() if tokenizer.lossless else None
    rules = _TokenRules(header.dataset, tokenizer.opens_documents, bytes_of_id)
    done, total = 0, sum(path.stat().st_size for path in paths)
    entries: dict[str, ShardEntry] = {}
    progress("reading shards", done, total)
    for path in paths:
        entries[path.name] = _rebuild_entry(path, rules)
        done += entries[path.name].bytes
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
    names = sorted(path.name for path in directory.iterdir()) if directory.is_dir() else []
    paths = [directory.absolute() / name for name in names if _SHARD.fullmatch(name)]
    if not paths:
        raise DataError(
            f"{directory} contains no shards to rebuild a manifest from. Give the directory that "
            f"txl prepare wrote, or create the dataset: txl prepare INPUT --out {directory}"
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
        raise damaged_file(index_path, problem) from error


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


# --- one shard ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class _TokenRules:
    """The properties of a dataset's tokens that its shards are checked against."""

    dataset: DatasetHeader
    opens_documents: bool
    """Whether every document begins with the end-of-document token."""
    bytes_of_id: np.ndarray | None
    """int32 [vocab_size]: UTF-8 bytes of each token; None if the tokenizer is not lossless."""


def _rebuild_entry(path: Path, rules: _TokenRules) -> ShardEntry:
    """The manifest's entry of a shard, after its content was compared with its index."""
    directory = path.parent
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
        raise damaged_file(index_path, problem) from error
    index = read_index(directory, entry, np.dtype(rules.dataset.dtype).itemsize)
    try:
        raw_sha256 = _check_content(path, entry, index, rules)
    except ValueError as error:
        raise damaged_file(path, f"does not match its index: {error}") from error
    return entry.model_copy(update={"raw_sha256": raw_sha256})


def _check_content(path: Path, entry: ShardEntry, index: ShardIndex, rules: _TokenRules) -> str:
    """Compare a shard with its index, frame by frame; returns the sha256 of its tar stream.

    Raises ValueError with the first difference, DataError for a damaged frame.
    """
    dtype = np.dtype(rules.dataset.dtype)
    digest, text_bytes = hashlib.sha256(), 0
    # Raw byte of the first token of every document.
    starts = np.repeat(index.block_offset, index.block_documents)
    starts += index.document_starts * dtype.itemsize
    for number in range(len(index.frames)):
        frame = index.frame(number)
        raw = read_frame(path.parent, entry, frame, number)
        digest.update(raw)
        if number == 0:
            _check_first_member(raw, entry.name)
        for offset, tokens in _tokens_of(raw, frame, index, dtype):
            _check_tokens(rules, offset, tokens, starts)
            if rules.bytes_of_id is not None:
                text_bytes += int(rules.bytes_of_id[tokens].sum(dtype=np.int64))
    if rules.bytes_of_id is not None and text_bytes != entry.text_bytes:
        raise ValueError(f"{text_bytes:,} bytes of text, the index has {entry.text_bytes:,}")
    _check_seek_table(path, index)
    return digest.hexdigest()


def _check_first_member(raw: bytes, shard: str) -> None:
    """The names in the tar contain the shard's name: a shard renamed with its index is refused."""
    expected = f"{shard.removesuffix(SHARD_SUFFIX)}-00000000.npy"
    name = raw[:100].rstrip(b"\0")  # the first field of a tar header
    if name != expected.encode():
        raise ValueError(f"expected {expected}, got {printable(name.decode(errors='replace'))}")


def _tokens_of(
    raw: bytes, frame: Frame, index: ShardIndex, dtype: np.dtype
) -> Iterator[tuple[int, np.ndarray]]:
    """(raw byte of the first, tokens) of the part of every block that is in a frame."""
    block_end = index.block_offset + index.block_tokens * dtype.itemsize
    start, stop = frame.raw_offset, frame.raw_offset + frame.raw_size
    for block in np.flatnonzero((index.block_offset < stop) & (block_end > start)):
        first, last = max(start, index.block_offset[block]), min(stop, block_end[block])
        num_tokens = (last - first) // dtype.itemsize
        yield first, np.frombuffer(raw, dtype, num_tokens, offset=first - start)


def _check_tokens(rules: _TokenRules, offset: int, tokens: np.ndarray, starts: np.ndarray) -> None:
    """Check tokens in the vocabulary, and that documents begin at the raw bytes `starts`."""
    if (largest := tokens.max()) >= rules.dataset.vocab_size:
        raise ValueError(f"it has token {largest}, outside the vocabulary")
    # No text encodes to end_of_document, so every occurrence starts a document.
    places = np.flatnonzero(tokens == rules.dataset.end_of_document)
    openers = offset + places * tokens.itemsize
    first, last = np.searchsorted(starts, [offset, offset + tokens.nbytes])
    expected = starts[first : last if rules.opens_documents else first]
    if not np.array_equal(openers, expected):
        raise ValueError("documents do not start where the index says")


def _check_seek_table(path: Path, index: ShardIndex) -> None:
    """The bytes after the last frame: no checksum of a frame covers them."""
    expected = seek_table([index.frame(number) for number in range(len(index.frames))])
    with path.open("rb") as file:
        file.seek(int(index.frames[-1, :2].sum()))
        if file.read(len(expected) + 1) != expected:
            raise ValueError("it does not end in its seek table")
