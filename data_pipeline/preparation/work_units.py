"""Work units of `txl prepare`: what a worker is given, does and hands back.

A unit is a range of the input to scan (`scan.py`), a shard's documents to count symbols in, for
vocabularies that are counted, or a shard to write. It depends on input and settings alone, so units
can be done by any worker, in any order, twice, and by a later run: the outcome is the same files.
Who runs them is `workers.py`'s business.
"""

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from data_pipeline.errors import DataError, printable
from data_pipeline.preparation.document_batch import DocumentBatch
from data_pipeline.preparation.finished_units import (
    FINGERPRINT,
    RECORDS,
    FileSum,
    attempt,
    finish,
    finished,
)
from data_pipeline.preparation.scan import ScanUnit, scan, spill_name
from data_pipeline.preparation.settings import PrepareSettings
from data_pipeline.preparation.tokenizer_training import counted_pieces, token_pieces
from data_pipeline.shards.manifest import TOKENIZER_NAME, IndexHeader, shard_name
from data_pipeline.shards.shard_writer import ShardWriter
from data_pipeline.storage.atomic_files import explain_disk_errors, write_synced
from data_pipeline.tokenizers import SymbolCounter, Tokenizer, load_tokenizer


@dataclass(frozen=True, slots=True, eq=False)
class CountUnit:
    """Symbols to be counted for a vocabulary, in the documents of one shard of train."""

    number: int
    settings: str
    """JSON of the PrepareSettings."""
    documents: DocumentBatch

    @property
    def name(self) -> str:
        return f"train-{self.number:06d}.count"  # no shard and no scan can have this name

    @property
    def size(self) -> int:
        return self.documents.size

    @property
    def key(self) -> str:
        return self.documents.digest([self.name, self.settings])

    def __str__(self) -> str:
        return f"{self.name}, {self.documents}"


@dataclass(frozen=True, slots=True, eq=False)
class ShardUnit:
    """One shard to write."""

    split: str
    number: int
    header: str
    """JSON of the IndexHeader."""
    documents: DocumentBatch

    @property
    def name(self) -> str:
        return f"{self.split}-{self.number:06d}"

    @property
    def size(self) -> int:
        return self.documents.size

    @property
    def key(self) -> str:
        return self.documents.digest([self.name, self.header])

    def __str__(self) -> str:
        return f"{self.name}, {self.documents}"


Unit = ScanUnit | CountUnit | ShardUnit


@dataclass(frozen=True, slots=True, eq=False)
class Task:
    """A unit and where its files go."""

    unit: Unit
    staging: Path
    fingerprint: str
    """Content of the staging folder's fingerprint: proof that a worker sees the same folder."""

    def __str__(self) -> str:
        return printable(str(self.unit))


@dataclass(frozen=True, slots=True)
class Done:
    result: dict[str, Any]
    reused: bool


def run_task(task: Task) -> Done:
    """Do a unit, or find it finished. Raises DataError for input that changed, and disk errors."""
    unit, staging = task.unit, task.staging
    _require_same_folder(task)
    # Without a mark nothing tells whether the file is still what a scan took its texts from.
    again = isinstance(unit, ScanUnit) and any(
        not part.file.rereadable and not part.file.mark for part in unit.parts
    )
    result = None if again else finished(staging, unit.name, unit.key)
    if result is not None:
        return Done(result, reused=True)
    with (
        explain_disk_errors(f"writing {unit.name}", staging.parent),
        attempt(staging, unit.name) as folder,
    ):
        if isinstance(unit, ScanUnit):
            result, files = _scan(unit, staging, folder)
        elif isinstance(unit, CountUnit):
            result, files = _count(unit, staging, folder)
        else:
            result, files = _write_shard(unit, staging, folder)
        finish(staging, unit.name, unit.key, result=result, files=files)
    return Done(result, reused=False)


def _require_same_folder(task: Task) -> None:
    path = task.staging / RECORDS / FINGERPRINT
    try:
        same = path.read_text("utf-8") == task.fingerprint
    except OSError:
        same = False
    if not same:
        raise DataError(
            f"a worker on {os.uname().nodename} does not see {path} as the main process does. On a "
            "cluster --out and the input must be on a path that all machines share; or run on this "
            "machine alone, with --on local."
        )


def _scan(unit: ScanUnit, staging: Path, folder: Path) -> tuple[dict[str, Any], list[FileSum]]:
    files = []
    name = f"{unit.name}.safetensors"
    if all(part.file.rereadable for part in unit.parts):
        data = scan(unit).to_bytes()
    else:
        spill = folder / spill_name(unit.number)
        with spill.open("wb") as file:
            data = scan(unit, file).to_bytes()
            file.flush()
            os.fsync(file.fileno())
        files.append(_moved(spill, staging, f"{RECORDS}/{spill.name}"))
    write_synced(folder / name, data)
    files.append(_moved(folder / name, staging, f"{RECORDS}/{name}"))
    return {"scan": f"{RECORDS}/{name}"}, files


def _count(unit: CountUnit, staging: Path, folder: Path) -> tuple[dict[str, Any], list[FileSum]]:
    settings, documents = PrepareSettings.model_validate_json(unit.settings), unit.documents
    texts = (
        text
        for number in range(len(documents))
        for text in counted_pieces(settings, documents.texts(number, staging))
    )
    path = folder / f"{unit.name}s"
    write_synced(path, SymbolCounter(settings).count(texts).to_bytes())
    place = f"{RECORDS}/{path.name}"
    return {"counts": place}, [_moved(path, staging, place)]


def _write_shard(
    unit: ShardUnit, staging: Path, folder: Path
) -> tuple[dict[str, Any], list[FileSum]]:
    header, documents = IndexHeader.model_validate_json(unit.header).dataset, unit.documents
    tokenizer = _tokenizer(staging / TOKENIZER_NAME, header.tokenizer_digest)
    writer = ShardWriter(
        folder,
        unit.split,
        unit.number,
        dtype=np.dtype(header.dtype),
        vocab_size=header.vocab_size,
        block_bytes=header.settings.block_bytes,
        header=unit.header,
    )
    try:
        for number, text_bytes in enumerate(documents.text_bytes.tolist()):
            id_ = documents.document_id(number)
            tokens = token_pieces(tokenizer, documents.texts(number, staging), document_id=id_)
            writer.add(id_, tokens, text_bytes=text_bytes)
        entry = writer.close()
    except BaseException:
        writer.abandon()
        raise
    assert entry.name == shard_name(unit.split, unit.number)
    for name in (entry.name, entry.index_name):
        (folder / name).replace(staging / name)
    return entry.model_dump(mode="json"), [
        FileSum(entry.name, entry.bytes, entry.sha256),
        FileSum(entry.index_name, entry.index_bytes, entry.index_sha256),
    ]


def _moved(path: Path, staging: Path, place: str) -> FileSum:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    size = path.stat().st_size
    path.replace(staging / place)
    return FileSum(place, size, digest)


_loaded: dict[str, Tokenizer] = {}
"""The tokenizer of this process, by digest."""


def keep_loaded(tokenizer: Tokenizer) -> None:
    """Have shards written by this process use `tokenizer` instead of loading it again."""
    _loaded.clear()
    _loaded[tokenizer.digest] = tokenizer


def _tokenizer(path: Path, digest: str) -> Tokenizer:
    if digest not in _loaded:
        tokenizer = load_tokenizer(path)
        if tokenizer.digest != digest:
            raise DataError(
                f"{path} has digest {tokenizer.digest}, expected {digest}. Run this again."
            )
        keep_loaded(tokenizer)
    return _loaded[digest]
