"""`txl data rebuild`: make a lost or damaged manifest again from the shards and their indexes.

Every index contains the dataset's header and a digest of its arrays. File sizes and sha256s are
computed from the files, after each shard's content was compared with its index
(`shard_content.py`): otherwise the new manifest would declare a damaged shard to be correct. The
result is the lost manifest, byte for byte.

Shards, indexes and `tokenizer.json` cannot be rebuilt here. Run `txl prepare` again for those.
"""

import contextlib
import json
import re
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from data_pipeline.errors import DataError
from data_pipeline.shards.frames import seek_table
from data_pipeline.shards.manifest import (
    MANIFEST_NAME,
    SHARD_SUFFIX,
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
from data_pipeline.shards.shard_content import TokenRules, check_content
from data_pipeline.shards.shard_files import damaged_file
from data_pipeline.shards.shard_index import ShardIndex, read_index, read_unlisted_index
from data_pipeline.system.files import (
    explain_disk_errors,
    require_writable,
    sha256_file,
    write_file,
)
from data_pipeline.system.progress import Progress
from data_pipeline.system.workers import InProcess, Workers

_SHARD = re.compile(rf"({SPLIT_PATTERN})-(\d{{6}}){re.escape(SHARD_SUFFIX)}")


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
    rules = TokenRules.of(header.dataset, open_tokenizer(directory, header.dataset))

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
            text_counts=metadata.get("text_counts"),
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
