"""Work units of `txl prepare`: what a worker is given, does and hands back.

A unit is either a range of the input to scan (`scan.py`) or one shard to write. It depends on input
and settings alone, so units can be done by any worker, in any order, twice, and by a later run: the
outcome is the same files. Who runs them is `workers.py`'s business.
"""

import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from data_pipeline.atomic_files import explain_disk_errors, write_synced
from data_pipeline.build_tokenizer import token_pieces
from data_pipeline.corpus import CHECK_BYTES, Corpus, document_id
from data_pipeline.documents import InputFile, printable
from data_pipeline.errors import DataError
from data_pipeline.finished_units import (
    FINGERPRINT,
    RECORDS,
    FileSum,
    attempt,
    finish,
    finished,
)
from data_pipeline.manifest import TOKENIZER_NAME, IndexHeader, shard_name
from data_pipeline.scan import ScanUnit, scan
from data_pipeline.shard_writer import ShardWriter
from data_pipeline.texts import read_pieces
from data_pipeline.tokenizers import Tokenizer, load_tokenizer


@dataclass(frozen=True, slots=True, eq=False)
class ShardUnit:
    """One shard to write: where its D documents stand, in order."""

    split: str
    number: int
    header: str
    """JSON of the IndexHeader."""
    text_key: str
    block_bytes: int
    files: tuple[InputFile, ...]
    """Those the documents are from."""
    file: np.ndarray
    """int64 [D]: which of `files`."""
    spill: np.ndarray
    """int64 [D]: the scan unit whose spill file holds the text, -1: it is in the file itself."""
    place: np.ndarray
    """uint64 [D, 3]: offset, size, line."""
    text_bytes: np.ndarray
    check: np.ndarray
    """uint8 [D, CHECK_BYTES] of the text's sha256."""

    @classmethod
    def of(
        cls, corpus: Corpus, numbers: np.ndarray, *, split: str, number: int, header: IndexHeader
    ) -> "ShardUnit":
        used, file = np.unique(corpus.file[numbers], return_inverse=True)
        files = tuple(corpus.files[place] for place in used.tolist())
        spilled = np.array([not each.rereadable for each in files])[file]
        return cls(
            split=split,
            number=number,
            header=header.model_dump_json(),
            text_key=header.dataset.settings.text_key,
            block_bytes=header.dataset.settings.block_bytes,
            files=files,
            file=file,
            spill=np.where(spilled, corpus.unit_of(numbers), -1),
            place=corpus.place[numbers],
            text_bytes=corpus.text_bytes[numbers],
            check=corpus.check[numbers],
        )

    @property
    def name(self) -> str:
        return f"{self.split}-{self.number:06d}"

    @property
    def size(self) -> int:
        return int(self.text_bytes.sum())

    @property
    def key(self) -> str:
        names = [file.name for file in self.files]
        digest = hashlib.sha256(json.dumps([self.name, self.header, names]).encode())
        for array in (self.file, self.spill, self.place, self.text_bytes, self.check):
            digest.update(array.tobytes())
        return digest.hexdigest()

    def __str__(self) -> str:
        more = f" and {len(self.files) - 1} more files" if len(self.files) > 1 else ""
        return f"{self.name}, {len(self.place):,} documents of {self.files[0].name}{more}"

    def texts(self, document: int, staging: Path) -> Iterator[str]:
        """A document's text in pieces. Raises DataError if it is not the one that was scanned."""
        file = self.files[self.file[document]]
        unit = int(self.spill[document])
        spill = staging / RECORDS / f"spill-{unit:06d}" if unit >= 0 else None
        offset, size, line = self.place[document].tolist()
        digest = hashlib.sha256()
        pieces = read_pieces(file, self.text_key, (offset, size, line), spill)
        while True:
            try:
                text = next(pieces, None)
            except (OSError, ValueError):
                raise _changed(file) from None
            if text is None:
                break
            digest.update(text.encode("utf-8", errors="replace"))
            yield text
        if digest.digest()[:CHECK_BYTES] != self.check[document].tobytes():
            raise _changed(file)


def _changed(file: InputFile) -> DataError:
    return DataError(
        f"{printable(str(file.path))} changed while it was being read. Nothing was "
        "written; run this again when nobody writes to the corpus."
    )


Unit = ScanUnit | ShardUnit


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
    result = finished(staging, unit.name, unit.key)
    if result is not None:
        return Done(result, reused=True)
    with (
        explain_disk_errors(f"writing {unit.name}", staging.parent),
        attempt(staging, unit.name) as folder,
    ):
        if isinstance(unit, ScanUnit):
            result, files = _scan(unit, staging, folder)
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
        spill = folder / unit.spill_name
        with spill.open("wb") as file:
            data = scan(unit, file).to_bytes()
            file.flush()
            os.fsync(file.fileno())
        files.append(_moved(spill, staging, f"{RECORDS}/{spill.name}"))
    write_synced(folder / name, data)
    files.append(_moved(folder / name, staging, f"{RECORDS}/{name}"))
    return {"scan": f"{RECORDS}/{name}"}, files


def _write_shard(
    unit: ShardUnit, staging: Path, folder: Path
) -> tuple[dict[str, Any], list[FileSum]]:
    header = IndexHeader.model_validate_json(unit.header).dataset
    tokenizer = _tokenizer(staging / TOKENIZER_NAME, header.tokenizer_digest)
    writer = ShardWriter(
        folder,
        unit.split,
        unit.number,
        dtype=np.dtype(header.dtype),
        vocab_size=header.vocab_size,
        block_bytes=unit.block_bytes,
        header=unit.header,
    )
    try:
        for document, text_bytes in enumerate(unit.text_bytes.tolist()):
            name = unit.files[unit.file[document]].name
            writer.add(
                document_id(name, int(unit.place[document, 2])),
                token_pieces(tokenizer, unit.texts(document, staging)),
                text_bytes=text_bytes,
            )
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


@lru_cache(maxsize=1)
def _tokenizer(path: Path, digest: str) -> Tokenizer:
    """Loaded once a worker; `digest` tells the tokenizers of two runs in one process apart."""
    tokenizer = load_tokenizer(path)
    if tokenizer.digest != digest:
        raise DataError(f"{path} has digest {tokenizer.digest}, expected {digest}. Run this again.")
    return tokenizer
