"""Work units of `txl prepare`, how a worker executes one, and how they are distributed to workers.

Three kinds: scan ranges of the input (`scan.py`); count the symbols in the documents of one shard,
for a vocabulary that is trained; write one shard. A unit depends on input and settings alone.
Any worker can execute it, in any order, more than once, and in a later run: the files are the same.
`data_pipeline/system/workers.py` has the workers.
"""

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal, NamedTuple

import numpy as np

from data_pipeline.errors import DataError, UnfinishedError, printable
from data_pipeline.preparation.documents import RECORDS, Documents, read_groups, texts_path
from data_pipeline.preparation.output import (
    FINGERPRINT,
    FinishedFile,
    load_finished,
    record_finished,
)
from data_pipeline.preparation.scan import MAX_EXTENSIONS, ScanUnit, scan
from data_pipeline.shards.manifest import TOKENIZER_NAME, IndexHeader, PrepareSettings
from data_pipeline.shards.shard_index import DocumentIds
from data_pipeline.shards.shard_writer import ShardWriter, TextCounter
from data_pipeline.system.files import (
    StagedDirectory,
    explain_disk_errors,
    sha256_file,
    write_synced,
)
from data_pipeline.system.sources import count_bytes
from data_pipeline.system.strict_json import canonical_json
from data_pipeline.system.workers import Progress, Workers
from data_pipeline.tokenizers import Tokenizer, cuts_of, load_tokenizer
from data_pipeline.tokenizers.interface import MAX_PART_CHARS, text_parts
from data_pipeline.tokenizers.training import count_symbols


@dataclass(frozen=True, slots=True, eq=False)
class BatchUnit:
    """A unit that reads the documents of one shard again.

    `shard`: tokenize and write them; `context` is the IndexHeader. `count`: count symbols for a
    vocabulary; `context` is the PrepareSettings, for bpe with the `train_bytes` of its share.
    """

    kind: Literal["shard", "count"]
    split: str
    number: int
    context: str  # JSON of all else that determines the result
    documents: Documents

    @property
    def name(self) -> str:
        return f"{self.split}-{self.number:06d}" + ".count" * (self.kind == "count")

    @property
    def size(self) -> int:
        return self.documents.size

    @property
    def key(self) -> str:
        return self.documents.digest([self.name, self.context])

    def __str__(self) -> str:
        return printable(f"{self.name}, {self.documents}")


Unit = ScanUnit | BatchUnit


class Outcome(NamedTuple):
    result: dict[str, Any]
    size: int
    """Bytes of the unit."""
    reused: bool
    """Whether an earlier run had finished the unit."""


# The result of a unit and its files, which are then in the staging directory.
_Executed = tuple[dict[str, Any], list[FinishedFile]]


def run_unit(staging: Path, fingerprint: str, unit: Unit) -> Outcome:
    """Execute a unit, or reuse it if it is finished. Its files are written to `staging`.

    `fingerprint` is expected there: it shows that a worker sees the same directory. Raises
    DataError for an input that changed since the scan, and UnfinishedError for disk errors.
    """
    _require_shared_staging(staging, fingerprint)
    # Without a version mark (a URL without time and tag), a changed file is not detected, and the
    # texts of an earlier scan could be outdated. Such files are always scanned again.
    unmarked = isinstance(unit, ScanUnit) and not all(each.file.mark for each in unit.ranges)
    result = None if unmarked else load_finished(staging, unit.name, unit.key)
    if result is not None:
        return Outcome(result, unit.size, reused=True)
    with (
        explain_disk_errors(f"writing {unit.name}", staging.parent),
        # Two executions of the same unit at the same time never share files.
        TemporaryDirectory(
            prefix=f"{unit.name}-", dir=staging / RECORDS, ignore_cleanup_errors=True
        ) as folder,
    ):
        scratch = Path(folder)
        if isinstance(unit, ScanUnit):
            result, files = _scan(unit, staging, scratch)
        elif unit.kind == "count":
            result, files = _count_symbols(unit, staging, scratch)
        else:
            result, files = _write_shard(unit, staging, scratch)
        record_finished(staging, unit.name, unit.key, result=result, files=files)
    return Outcome(result, unit.size, reused=False)


def _require_shared_staging(staging: Path, fingerprint: str) -> None:
    path = staging / RECORDS / FINGERPRINT
    with suppress(OSError):
        if path.read_text("utf-8") == fingerprint:
            return
    raise UnfinishedError(  # it may see it the next time: finished work stays
        f"a worker on {os.uname().nodename} does not see {path} as the main process does. On a "
        "cluster --out and the input must be on a path that all machines share; or run on this "
        "machine alone, with --on processes."
    )


def _scan(unit: ScanUnit, staging: Path, scratch: Path) -> _Executed:
    texts = scratch / texts_path(staging, unit.number).name
    with texts.open("wb") as file:
        result = scan(unit, file)
        file.flush()
        os.fsync(file.fileno())
    path = scratch / f"{unit.name}.safetensors"
    write_synced(path, result.to_bytes())
    files = [_move_to_staging(each, staging) for each in (path, texts)]
    return {"scan": files[0].path, "unread": dict(result.unread.most_common(MAX_EXTENSIONS))}, files


def _count_symbols(unit: BatchUnit, staging: Path, scratch: Path) -> _Executed:
    settings, documents = PrepareSettings.model_validate_json(unit.context), unit.documents
    texts = (documents.read_text(number, staging) for number in range(len(documents)))
    cut = partial(text_parts, max_chars=MAX_PART_CHARS, cuts=cuts_of(settings))
    counts = count_symbols(settings, chain.from_iterable(map(cut, texts)))
    path = scratch / f"{unit.name}s"
    write_synced(path, canonical_json(counts).encode())
    file = _move_to_staging(path, staging)
    return {"counts": file.path}, [file]


def _write_shard(unit: BatchUnit, staging: Path, scratch: Path) -> _Executed:
    header, documents = IndexHeader.model_validate_json(unit.context).dataset, unit.documents
    tokenizer = _tokenizer_of(staging / TOKENIZER_NAME, header.tokenizer_digest)
    writer = ShardWriter(
        scratch,
        unit.split,
        unit.number,
        dtype=np.dtype(header.dtype),
        vocab_size=header.vocab_size,
        block_bytes=header.settings.block_bytes,
        header=unit.context,
    )
    counter = TextCounter()
    try:
        for first, texts in read_groups(documents, staging):
            rows = slice(first, first + len(texts or [""]))
            text_bytes = int(documents.text_bytes[rows].sum())
            if texts is None:
                id_ = documents.document_id(first)
                text = counter.document(documents.read_text(first, staging))
                tokens = tokenize_document(tokenizer, text, document_id=id_)
                writer.add(id_, tokens, text_bytes=text_bytes)
            else:
                counter.add(texts)
                ids = documents.stored_ids(rows)
                tokenized = tokenize_texts(tokenizer, texts, ids)
                writer.add_batch(ids, *tokenized, text_bytes=text_bytes)
                count_bytes(text_bytes)
        entry = writer.close(counter.counts)
    except BaseException:
        writer.abandon()
        raise
    # The writer has hashed both files while writing them, so they are not read again here.
    for name in (entry.name, entry.index_name):
        (scratch / name).replace(staging / name)
    return entry.model_dump(mode="json"), [
        FinishedFile(entry.name, entry.bytes, entry.sha256),
        FinishedFile(entry.index_name, entry.index_bytes, entry.index_sha256),
    ]


def _move_to_staging(path: Path, staging: Path) -> FinishedFile:
    """Move a synced file from a scratch directory to `staging / RECORDS`."""
    file = FinishedFile(f"{RECORDS}/{path.name}", path.stat().st_size, sha256_file(path))
    path.replace(staging / file.path)
    return file


# --- distribution to workers ----------------------------------------------------------------------


class UnitRunner:
    """Runs the work units of one staging directory. `staging` is its absolute path."""

    def __init__(
        self,
        staged: StagedDirectory,
        staging: Path,
        fingerprint: str,
        workers: Workers,
        progress: Progress,
    ) -> None:
        self.staged, self.staging = staged, staging
        self.progress = progress
        self.finished = self.reused = 0
        self._fingerprint, self._workers = fingerprint, workers

    def run(
        self, label: str, units: Iterable[Unit], total_bytes: int
    ) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield (number, result) of every unit in the order in which they finish.

        Reports progress in bytes under the name `label`.
        """
        done_bytes = 0
        self.progress(label, 0, total_bytes)
        function = partial(run_unit, self.staging, self._fingerprint)
        for number, outcome in self._workers.map(function, units):
            self.staged.keep_staging = True  # when the run is stopped
            self.finished += 1
            self.reused += outcome.reused
            # Reused units lower the total instead of raising the rate, which is of real work.
            total_bytes -= outcome.size * outcome.reused
            done_bytes += outcome.size * (not outcome.reused)
            self.progress(label, done_bytes, total_bytes)
            yield number, outcome.result


# --- tokens of documents --------------------------------------------------------------------------


@lru_cache(maxsize=1)
def _tokenizer_of(path: Path, digest: str) -> Tokenizer:
    """The tokenizer at `path`: a process loads it once, not once per shard."""
    tokenizer = load_tokenizer(path)
    if tokenizer.digest != digest:
        raise DataError(f"{path} has digest {tokenizer.digest}, expected {digest}. Run this again.")
    return tokenizer


def tokenize_texts(
    tokenizer: Tokenizer, texts: Sequence[str], ids: DocumentIds
) -> tuple[np.ndarray, np.ndarray]:
    """The tokens of whole documents as one array, and int64 [texts] how many each has.

    `ids` name the documents in errors. As `tokenize_document` for each.
    """
    tokens, lengths = tokenizer.encode_batch(texts)
    if not tokenizer.opens_documents:
        if not lengths.all():
            raise _no_tokens(ids.id_of(int(np.flatnonzero(lengths == 0)[0])))
        return tokens, lengths
    ends = np.cumsum(lengths)
    marks = np.flatnonzero(tokens == tokenizer.end_of_document)
    if marks.size:
        raise _contains_end(tokenizer, ids.id_of(int(np.searchsorted(ends, marks[0], "right"))))
    return np.insert(tokens, ends - lengths, tokenizer.end_of_document), lengths + 1


def tokenize_document(
    tokenizer: Tokenizer, texts: Iterable[str], *, document_id: str
) -> Iterator[np.ndarray]:
    """Yield the tokens of a document in consecutive arrays.

    The first token is end-of-document if the tokenizer opens documents with it. `texts` is the text
    in fragments cut anywhere. Raises DataError for a document without tokens, or one that
    contains the end-of-document token.
    """
    is_empty = not tokenizer.opens_documents
    if tokenizer.opens_documents:
        yield np.array([tokenizer.end_of_document])
    for part in text_parts(texts, max_chars=MAX_PART_CHARS, cuts=tokenizer.cuts):
        tokens = tokenizer.encode(part)
        is_empty = is_empty and not tokens.size
        # Lanes reset the memory at this token, so it must not occur inside a document.
        if tokenizer.opens_documents and (tokens == tokenizer.end_of_document).any():
            raise _contains_end(tokenizer, document_id)
        yield tokens
    if is_empty:
        raise _no_tokens(document_id)


def _contains_end(tokenizer: Tokenizer, document_id: str) -> DataError:
    return DataError(
        f"{printable(document_id)} contains text that this tokenizer encodes as its "
        f"end-of-document token, id {tokenizer.end_of_document}. Use another tokenizer, or "
        "remove the document from the input, and run this again."
    )


def _no_tokens(document_id: str) -> DataError:
    return DataError(
        f"{printable(document_id)} has no tokens: it contains only whitespace, and this recipe "
        "adds no end-of-document token. Remove it from the input and run this again."
    )
