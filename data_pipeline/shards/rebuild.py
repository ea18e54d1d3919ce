"""Rebuilding: a lost or damaged manifest, made again from the shards and what their indexes know.

Every index carries the dataset's header and vouches for its own arrays; sizes and hashes of files
are taken anew. Before the result is put in place every shard is checked against it in full, so a
damaged shard is refused, not vouched for. The outcome is the lost manifest, byte for byte.

What this cannot replace: shards, indexes and `tokenizer.json`. For those, run `txl prepare` again.
"""

import json
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from pydantic import ValidationError

from data_pipeline.errors import DataError
from data_pipeline.preparation.settings import SPLIT_PATTERN
from data_pipeline.processes.progress import Progress
from data_pipeline.processes.workers import InProcess, Workers
from data_pipeline.shards.frames import seek_table
from data_pipeline.shards.manifest import (
    INDEX_SUFFIX,
    MANIFEST_NAME,
    SHARD_SUFFIX,
    DatasetHeader,
    IndexHeader,
    ShardEntry,
    ShardManifest,
    SplitEntry,
    load_manifest,
    open_tokenizer,
    shard_name,
)
from data_pipeline.shards.shard_check import RawStream
from data_pipeline.shards.shard_index import read_about, read_index, refusal
from data_pipeline.shards.verify import shard_problems
from data_pipeline.storage.atomic_files import (
    explain_disk_errors,
    require_writable,
    sha256_file,
    write_file,
)

_SHARD = re.compile(rf"({SPLIT_PATTERN})-(\d{{6}}){re.escape(SHARD_SUFFIX)}")


@dataclass(frozen=True, slots=True)
class Rebuilt:
    manifest: ShardManifest
    was_sound: bool
    """The manifest was there and is untouched."""


@dataclass(frozen=True, slots=True)
class _Found:
    """A shard by its name alone."""

    directory: Path
    split: str
    number: int

    def __str__(self) -> str:
        return shard_name(self.split, self.number)


def rebuild_manifest(
    directory: Path,
    *,
    workers: Workers | None = None,
    progress: Progress = lambda what, done, total: None,
) -> Rebuilt:
    """Put `manifest.json` back. Raises DataError when a shard is missing, damaged or of another
    dataset, and for a lost tokenizer, ConfigError when nothing may be written there; then nothing
    is.
    """
    try:
        return Rebuilt(load_manifest(directory), was_sound=True)
    except DataError:
        pass
    workers = workers or InProcess()
    found = _shards(directory)
    require_writable(directory)
    total = sum((directory / str(shard)).stat().st_size for shard in found)
    done = 0
    known: dict[tuple[str, int], tuple[IndexHeader, ShardEntry]] = {}
    for number, outcome in workers.map(_read_back, found):
        known[found[number].split, found[number].number] = outcome
        done += outcome[1].bytes
        progress("reading shards", done, total)
    manifest = _put_together(directory, known)
    tokenizer = open_tokenizer(directory, manifest)
    found_in_shards = shard_problems(directory, manifest, tokenizer, workers, progress)
    problems = found_in_shards.problems + found_in_shards.unread
    if problems:
        listed = "".join(f"\n  {problem}" for problem in problems)
        raise DataError(
            f"{directory}: no manifest was written, for {len(problems)} problems:{listed}\nRestore "
            "these files from a copy, or run txl prepare again into another directory."
        )
    with explain_disk_errors("writing the manifest", directory):
        write_file(directory / MANIFEST_NAME, manifest.to_bytes())
    return Rebuilt(manifest, was_sound=False)


def _shards(directory: Path) -> list[_Found]:
    if not directory.is_dir():
        raise DataError(f"{directory}: no such directory. Give the one that txl prepare wrote.")
    matches = [_SHARD.fullmatch(path.name) for path in sorted(directory.iterdir())]
    found = [_Found(directory.absolute(), m[1], int(m[2])) for m in matches if m]
    if not found:
        raise DataError(
            f"{directory} holds no shards, so there is nothing to rebuild a manifest from. Create "
            f"the dataset: txl prepare INPUT --out {directory}"
        )
    return found


def _read_back(shard: _Found) -> tuple[IndexHeader, ShardEntry]:
    """The header in a shard's index, and the shard's entry as it was in the manifest."""
    path = shard.directory / str(shard)
    index_path = path.with_name(path.name.removesuffix(SHARD_SUFFIX) + INDEX_SUFFIX)
    arrays, about = read_about(index_path)
    try:
        header = IndexHeader.model_validate_json(json.dumps(about["header"]))
        fields = {
            "name": path.name,
            "bytes": path.stat().st_size,
            "sha256": sha256_file(path),
            "raw_bytes": int(arrays["frames"][-1, 2:4].sum()),
            "index_bytes": index_path.stat().st_size,
            "index_sha256": sha256_file(index_path),
            "documents": int(arrays["block_documents"].sum()),
            "blocks": len(arrays["block_tokens"]),
            "tokens": int(arrays["block_tokens"].sum()),
            "text_bytes": about["text_bytes"],
        }
        entry = ShardEntry(**fields, raw_sha256="0" * 64)
    except ValidationError as error:
        raise refusal(
            index_path,
            shard.directory,
            f"describes no dataset of ours ({error.errors()[0]['msg']})",
        ) from error
    except (KeyError, IndexError, ValueError, OSError) as error:
        raise refusal(index_path, shard.directory, f"describes no shard ({error})") from error
    itemsize = np.dtype(header.dataset.dtype).itemsize
    index = read_index(shard.directory, entry, itemsize)
    stream = RawStream(shard.directory, entry, index)
    stream.drain()
    table = seek_table([index.frame(number) for number in range(len(index.frames))])
    with path.open("rb") as file:
        file.seek(int(index.frames[-1, :2].sum()))
        end = file.read(len(table) + 1)
    if end != table:
        raise refusal(path, shard.directory, "does not end in its table of frames")
    return header, ShardEntry(**fields, raw_sha256=stream.sha256.hexdigest())


def _put_together(
    directory: Path, known: dict[tuple[str, int], tuple[IndexHeader, ShardEntry]]
) -> ShardManifest:
    (first, (header, _)), *others = known.items()
    for place, (other, _) in others:
        if other != header:
            raise DataError(
                f"{directory}: {shard_name(*place)} and {shard_name(*first)} are of different "
                "datasets. Move the shards that do not belong here elsewhere, and run this again."
            )
    expected = [(split, n) for split, count in header.shards.items() for n in range(count)]
    missing = [shard_name(*place) for place in expected if place not in known]
    extra = [shard_name(*place) for place in known if place not in expected]
    if missing or extra:
        raise DataError(
            f"{directory}: the dataset had {len(expected)} shards; missing: "
            f"{', '.join(missing) or 'none'}; not of it: {', '.join(extra) or 'none'}. Restore or "
            "move them, and run this again."
        )
    splits = {
        split: SplitEntry.of([known[split, number][1] for number in range(count)])
        for split, count in header.shards.items()
    }
    dataset: DatasetHeader = header.dataset
    return ShardManifest(**dict(dataset), splits=splits)
