"""`txl prepare`: the stages from input files to a published dataset, in order.

The input is read once, to hash each document and to copy its text. One process then assigns all
documents to shards from their locations alone, before they are tokenized. The same input and
settings give the same bytes for any number of workers. Finished units stay in the staging directory
when the program is stopped or killed, and a rerun of the same command reuses them.
"""

import itertools
import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from data_pipeline.errors import ConfigError, printable
from data_pipeline.preparation.documents import Documents
from data_pipeline.preparation.output import (
    claim_staging,
    find_existing,
    fingerprint_of,
    require_usable_input,
)
from data_pipeline.preparation.scan import (
    MAX_EXTENSIONS,
    InputIndex,
    ScanResult,
    ScanUnit,
    plan_scan,
    scan,
)
from data_pipeline.preparation.splits import (
    ShardAssignment,
    choose_given_splits,
    first_of_each_text,
    require_distinct_files,
)
from data_pipeline.preparation.work_units import BatchUnit, UnitRunner
from data_pipeline.readers import InputFile, find_files
from data_pipeline.readers.split_names import count_by_split, list_names
from data_pipeline.readers.unpack import UNPACKED, removed_afterwards
from data_pipeline.shards import REJECTS_NAME
from data_pipeline.shards.manifest import (
    MANIFEST_NAME,
    TOKENIZER_NAME,
    DatasetHeader,
    IndexHeader,
    InputSummary,
    PrepareSettings,
    ShardEntry,
    ShardManifest,
    SplitEntry,
)
from data_pipeline.shards.shard_writer import MAX_DOCUMENT_BYTES, document_too_large
from data_pipeline.system.files import (
    StagedDirectory,
    explain_disk_errors,
    write_synced,
)
from data_pipeline.system.workers import InProcess, Progress, Workers, peak_memory_bytes
from data_pipeline.tokenizers import (
    Tokenizer,
    needs_training,
    ready_tokenizer,
    sum_of_counts,
    token_dtype,
    tokenizer_of_counts,
)

DEFAULT_MAX_REJECT_RATE = 0.001
LARGE_TEXT_BYTES = 64 * 2**20
RAM_PER_TEXT_BYTE = 160
"""Of a document that `tokenizers` encodes as a whole, in bytes."""
KINDS_WITHOUT_KEYS = {"text", "lines", "blank_lines", "wikitext", "binary"}
"""Kinds of files of which `--text-key` decides nothing."""


@dataclass(frozen=True, slots=True)
class PrepareReport:
    """The dataset that `prepare_dataset` wrote or found, and the work it took."""

    manifest: ShardManifest
    already_complete: bool
    ignored: dict[str, int]  # number of files in input folders that were ignored, by suffix or name
    read_as: dict[str, dict[str, int]]  # number of files read, by format and then by suffix
    given_splits: dict[str, int]  # number of files by the split that the input gives; {} if none
    workers: int
    units: int  # work units of the dataset: scans, counts and shards
    reused_units: int  # units that an earlier, interrupted run had finished
    peak_memory_bytes: int  # the largest resident set of this process or of one worker
    seconds: float


def prepare_dataset(
    inputs: Sequence[str | Path],
    out: Path,
    settings: PrepareSettings,
    *,
    tokenizer_file: Path | None = None,
    max_reject_rate: float = DEFAULT_MAX_REJECT_RATE,
    workers: Workers | None = None,
    progress: Progress = lambda label, done, total: None,
    note: Callable[[str], None] = lambda line: None,
) -> PrepareReport:
    """Write the dataset of `inputs` to `out`, or return the complete one that is already there.

    Args:
        inputs: files, folders, patterns and URLs; or all of them as SPLIT=INPUT, to give their
            splits. Otherwise the names of the files may give splits (`readers/split_names.py`).
        tokenizer_file: required if `settings.tokenizer` is "file". For "ids" it may be given: the
            names of the ids, or the `tokenizer.json` of a vocabulary. Other tokenizers take none.
        max_reject_rate: fraction of records that may be unusable. They are listed in
            `rejects.jsonl`. Files that end early are accepted only with 1, because the number of
            records they lose is unknown.
        workers: None runs everything in this process.
        note: receives messages for the user, one line each.

    Raises ConfigError for splits that contradict each other, and for a key of files that have none.
    Raises DataError for an input without usable text, for too many rejects and for an `out` that
    holds something else. Raises UnfinishedError for a full or failing disk, a failing server and
    dead workers; finished units are then kept.
    """
    started = time.monotonic()
    workers = workers or InProcess()
    runner = None
    with (
        # Bad input does not cost the finished work of an earlier run.
        StagedDirectory(out, last=MANIFEST_NAME, keeps_unused=True) as staged,
        removed_afterwards(out / UNPACKED),
    ):
        inputs_found = find_files(
            [str(path) for path in inputs],
            format=settings.format,
            out=out,
            ids=settings.id_rules,
            text_key=settings.text_key,
            is_wikitext=settings.recipe in ("wt103", "wt2"),
        )
        read_as = inputs_found.read_as
        note(f"reading {list_read_as(read_as)}")
        files = choose_given_splits(inputs_found, settings, note)
        if settings.dedup != "exact":
            require_distinct_files(files, note, are_named=inputs_found.are_named)
        if settings.text_key != "text" and {file.kind for file in files} <= KINDS_WITHOUT_KEYS:
            raise ConfigError(
                f"--text-key {settings.text_key!r}: no file of the input has keys or columns, it "
                f"is read {list_read_as(read_as)}; omit it"
            )
        # Not of kind text, which are counted as empty documents, such as __init__.py. A URL without
        # a version mark may have an unknown size.
        empty = [f.name for f in files if not f.size and f.mark and f.kind != "text"]
        if empty:
            note(f"{len(empty):,} of {len(files):,} files have 0 bytes: {list_names(empty)}")
        tokenizer = None if needs_training(settings) else ready_tokenizer(settings, tokenizer_file)
        large = [f for f in files if f.kind == "text" and f.size > LARGE_TEXT_BYTES]
        if large and tokenizer and tokenizer.cuts == "never":
            largest = max(large, key=lambda file: file.size)
            note(
                f"{printable(largest.name)} is one document, and this tokenizer encodes documents "
                f"as a whole: expect {largest.size * RAM_PER_TEXT_BYTE / 2**30:,.0f} GiB of RAM. "
                "For less, divide the text into documents (JSON lines, or --format lines)"
            )
        summarize_input = partial(_summarize_input, files, settings, workers, progress)
        manifest = find_existing(out, settings, tokenizer, summarize_input)
        if not manifest:
            with explain_disk_errors("writing shards", out):
                fingerprint = fingerprint_of(files, settings, tokenizer)
                staging = claim_staging(staged, fingerprint, note).absolute()
                runner = UnitRunner(staged, staging, fingerprint, workers, progress)
                manifest = _write_dataset(files, settings, tokenizer, runner, max_reject_rate, note)
    return PrepareReport(
        manifest=manifest,
        already_complete=runner is None,
        ignored=dict(+inputs_found.ignored),
        read_as=read_as,
        given_splits=count_by_split(files) if any(file.split for file in files) else {},
        workers=workers.num_workers,
        units=runner.finished if runner else 0,
        reused_units=runner.reused if runner else 0,
        peak_memory_bytes=max(peak_memory_bytes(), workers.peak_memory_bytes),
        seconds=time.monotonic() - started,
    )


def _write_dataset(
    files: list[InputFile],
    settings: PrepareSettings,
    tokenizer: Tokenizer | None,
    runner: UnitRunner,
    max_reject_rate: float,
    note: Callable[[str], None],
) -> ShardManifest:
    """Run all stages. `tokenizer` is None if it is trained on the input."""
    index = _scan_input(files, settings, runner, note)
    require_usable_input(index, runner.staging, runner.staged.directory, max_reject_rate)
    runner.progress("ordering", 0, 0)
    shards = ShardAssignment(index, settings, runner.staging, note).shards()
    _require_small_documents(index.documents, shards, settings, runner.staging)
    tokenizer = tokenizer or _train_tokenizer(index.documents, shards["train"], settings, runner)
    write_synced(runner.staging / TOKENIZER_NAME, tokenizer.to_json().encode() + b"\n")
    header = DatasetHeader(
        tokenizer_digest=tokenizer.digest,
        vocab_size=tokenizer.vocab_size,
        end_of_document=tokenizer.end_of_document,
        dtype="uint16" if token_dtype(tokenizer.vocab_size).itemsize == 2 else "uint32",
        settings=settings,
        input=index.summary(),
    )
    if tokenizer.slow_reason:
        note(
            f"encoding with {tokenizer.encoder}, which is slower than gigatoken: "
            f"{tokenizer.slow_reason}"
        )
    splits = _write_shards(index.documents, shards, header, runner)
    manifest = ShardManifest(**dict(header), splits=splits)
    names = manifest.file_names()
    if manifest.input.rejected:
        names.append(REJECTS_NAME)
    else:  # an earlier, failed run may have left its list
        (runner.staged.directory / REJECTS_NAME).unlink(missing_ok=True)
    tools = {"encoder": tokenizer.encoder} if tokenizer.encoder else None
    write_synced(runner.staging / MANIFEST_NAME, manifest.to_bytes(tools=tools))
    runner.staged.publish(names)
    return manifest


def _scan_input(
    files: list[InputFile],
    settings: PrepareSettings,
    runner: UnitRunner,
    note: Callable[[str], None],
) -> InputIndex:
    """Scan all units and join the results. Writes the list of rejects to staging."""
    units = plan_scan(files, settings.text_key)
    results = sorted(runner.run("reading", units, sum(unit.size for unit in units)))
    paths = [runner.staging / result["scan"] for _, result in results]
    unread = Counter[str]()
    for _, result in results:
        unread.update(result["unread"])
    if unread:
        counts = (f"{n:,} .{printable(name)}" for name, n in unread.most_common(MAX_EXTENSIONS))
        note(f"members of samples that are not read (see --text-key): {', '.join(counts)}")
    with (runner.staging / REJECTS_NAME).open("wb") as rejects:
        # From disk, because all scans in RAM would take another 70 bytes per document.
        index = InputIndex(files, units, map(ScanResult.load, paths), rejects)
        rejects.flush()
        os.fsync(rejects.fileno())
    return index


def _require_small_documents(
    documents: Documents,
    shards: dict[str, list[np.ndarray]],
    settings: PrepareSettings,
    staging: Path,
) -> None:
    """Raise DataError for a document with more tokens than a shard can hold.

    Only for bytes and characters, which can be counted without a tokenizer: the writer of a shard
    would find them after hours. It checks all documents.
    """
    if settings.tokenizer not in ("byte", "char"):
        return
    max_tokens = MAX_DOCUMENT_BYTES // token_dtype(1).itemsize - 1  # one begins the document
    for numbers in itertools.chain.from_iterable(shards.values()):
        for number in numbers[documents.text_bytes[numbers] > max_tokens].tolist():
            text = documents.read_text(number, staging) if settings.tokenizer == "char" else None
            if text is None or sum(map(len, text)) > max_tokens:
                raise document_too_large(documents.document_id(number))


def _train_tokenizer(
    documents: Documents, train: list[np.ndarray], settings: PrepareSettings, runner: UnitRunner
) -> Tokenizer:
    """Train on the shards of the train split.

    Work units count the symbols of each shard: characters, words, or for bpe the words of about
    `train_bytes` that are spread over train. This process adds the counts and builds the
    vocabulary.
    """
    sizes = [int(documents.text_bytes[numbers].sum()) for numbers in train]
    contexts = [settings] * len(train)
    total = sum(sizes)
    if settings.tokenizer == "bpe" and total > settings.train_bytes:
        shares = [-(-size * settings.train_bytes // total) for size in sizes]
        contexts = [settings.model_copy(update={"train_bytes": share}) for share in shares]
        train = list(map(partial(_sample_of_shard, documents), train, shares))
        sizes = [int(documents.text_bytes[numbers].sum()) for numbers in train]
    units = (
        BatchUnit("count", "train", number, context.model_dump_json(), documents.take(numbers))
        for number, (context, numbers) in enumerate(zip(contexts, train, strict=True))
    )
    results = runner.run("counting", units, sum(sizes))
    paths = sorted(runner.staging / result["counts"] for _, result in results)
    runner.progress("training the tokenizer", 0, 0)
    return tokenizer_of_counts(settings, sum_of_counts(paths))


def _sample_of_shard(documents: Documents, numbers: np.ndarray, num_bytes: int) -> np.ndarray:
    """Documents of a shard with at least `num_bytes` of text, in the order of their hashes."""
    hashes = np.ascontiguousarray(documents.text_hash[numbers]).view("<u8")[:, 0]
    sample = numbers[np.argsort(hashes, kind="stable")]
    ends = np.cumsum(documents.text_bytes[sample])
    return sample[: np.searchsorted(ends, np.uint64(num_bytes)) + 1]


def _write_shards(
    documents: Documents,
    shards: dict[str, list[np.ndarray]],
    header: DatasetHeader,
    runner: UnitRunner,
) -> dict[str, SplitEntry]:
    """Tokenize and write all shards. Return the manifest's entry of every split."""
    counts = {split: len(of_split) for split, of_split in shards.items()}
    context = IndexHeader(dataset=header, shards=counts).model_dump_json()
    units = (
        BatchUnit("shard", split, number, context, documents.take(numbers))
        for split, of_split in shards.items()
        for number, numbers in enumerate(of_split)
    )
    all_shards = itertools.chain.from_iterable(shards.values())
    total_bytes = sum(int(documents.text_bytes[numbers].sum()) for numbers in all_shards)
    results = sorted(runner.run("writing", units, total_bytes))  # the shards of each split in order
    entries = (ShardEntry.model_validate(result) for _, result in results)
    return {
        split: SplitEntry.of(list(itertools.islice(entries, count)))
        for split, count in counts.items()
    }


def _summarize_input(
    files: list[InputFile], settings: PrepareSettings, workers: Workers, progress: Progress
) -> InputSummary:
    """Scan the input without writing anything, to compare it with an existing dataset."""
    units = plan_scan(files, settings.text_key)
    total_bytes, done_bytes = sum(unit.size for unit in units), 0
    scans: dict[int, ScanResult] = {}
    for number, result in workers.map(_scan_alone, units):
        scans[number] = result
        done_bytes += units[number].size
        progress("reading", done_bytes, total_bytes)
    with Path(os.devnull).open("wb") as nowhere:
        index = InputIndex(files, units, (scans.pop(n) for n in range(len(units))), nowhere)
    if settings.dedup == "exact":
        first_of_each_text(index)
    return index.summary()


def _scan_alone(unit: ScanUnit) -> ScanResult:
    """The scan of a unit, without the texts."""
    with Path(os.devnull).open("wb") as nowhere:
        return scan(unit, nowhere)


def list_read_as(read_as: dict[str, dict[str, int]]) -> str:
    formats = (
        f"{kind}: {', '.join(f'{count:,} {printable(suffix)}' for suffix, count in counts.items())}"
        for kind, counts in read_as.items()
    )
    return f"as {'; '.join(formats)}"
