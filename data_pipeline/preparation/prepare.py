"""Preparing: the input to a directory of shards with a manifest.

Four steps: scan every range of the input once and keep where documents stand; decide from that
which document goes into which shard (`shard_assignment.py`); make the tokenizer if the input
decides it
(`tokenizer_training.py`); read the documents again in their order, shard by shard, and write them.
So the whole input is shuffled and split without holding its text. What reads much is cut into work
units that any number of workers share (`work_units.py`), and the same input and settings give the
same bytes for any number of them; only bpe trains in this process.

What is finished stays in the staging folder when the program is killed, and the same command goes
on from it. Appearing all at once is `atomic_files.py`'s business.
"""

import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from data_pipeline.errors import printable
from data_pipeline.preparation.document_batch import DocumentBatch
from data_pipeline.preparation.fixed_splits import cut_into_splits
from data_pipeline.preparation.input_checks import require_usable
from data_pipeline.preparation.input_index import InputIndex, first_of_each_text
from data_pipeline.preparation.output_checks import find_existing, require_same_input
from data_pipeline.preparation.scan import Scan, plan_scan, scan
from data_pipeline.preparation.settings import PrepareSettings
from data_pipeline.preparation.shard_assignment import assign
from data_pipeline.preparation.staging_fingerprint import claim_staging, fingerprint_of
from data_pipeline.preparation.tokenizer_training import (
    keep_tokenizer,
    train_on_beginning,
    train_on_counts,
    trained_tokenizer,
)
from data_pipeline.preparation.work_units import (
    CountUnit,
    ShardUnit,
    Task,
    Unit,
    keep_loaded,
    run_task,
)
from data_pipeline.processes.progress import Progress
from data_pipeline.processes.workers import InProcess, Workers, peak_memory_bytes
from data_pipeline.readers import InputFile, find_files
from data_pipeline.shards.manifest import (
    MANIFEST_NAME,
    REJECTS_NAME,
    DatasetHeader,
    IndexHeader,
    InputSummary,
    ShardEntry,
    ShardManifest,
    SplitEntry,
)
from data_pipeline.storage.atomic_files import explain_disk_errors, write_synced
from data_pipeline.storage.staged_directory import StagedDirectory
from data_pipeline.tokenizers import Tokenizer, needs_training, ready_tokenizer, token_dtype
from data_pipeline.tokenizers.recipes import recipe_of

DEFAULT_MAX_REJECT_RATE = 0.001
_SUFFIXES_SHOWN = 8


@dataclass(frozen=True, slots=True)
class Prepared:
    """What `prepare_dataset` did."""

    manifest: ShardManifest
    already_complete: bool
    ignored: dict[str, int]
    """Files of the input folders that were left out, by suffix."""
    read_as: dict[str, dict[str, int]]
    """Files read, by format and in it by suffix."""
    workers: int
    units: int
    """Scans, counts and shards of the dataset."""
    reused_units: int
    """Those found finished by an earlier run that did not end."""
    peak_memory_bytes: int
    """The largest resident set of this process or of one worker."""
    seconds: float


def prepare_dataset(
    inputs: Sequence[str | Path],
    out: Path,
    settings: PrepareSettings,
    *,
    tokenizer_file: Path | None = None,
    max_reject_rate: float = DEFAULT_MAX_REJECT_RATE,
    workers: Workers | None = None,
    progress: Progress = lambda what, done, total: None,
    note: Callable[[str], None] = lambda line: None,
) -> Prepared:
    """Write the dataset of `inputs` to `out`, or find it there already complete.

    `max_reject_rate` is the fraction of records that may be unusable; they are listed in
    `rejects.jsonl` either way. Files that break off are accepted only with 1, for nobody knows how
    many records they lose. `tokenizer_file` belongs to `settings.tokenizer` file. `workers` None:
    in this process. `note` receives lines for people. Raises DataError for input without usable
    text, too many rejects, an `out` that holds something else; UnfinishedError, with finished units
    kept, for a disk that is full, disks and servers that cannot be read and dead workers.
    """
    started = time.monotonic()
    workers = workers or InProcess()
    found = find_files([str(given) for given in inputs], format=settings.format, exclude=out)
    note(f"reading {list_read_as(found.read_as)}")
    ready = None if needs_training(settings) else ready_tokenizer(settings, tokenizer_file)
    with StagedDirectory(out, last=MANIFEST_NAME) as staged:
        existing = find_existing(out, settings, ready.digest if ready else None)
        if existing:
            manifest, run = existing, None
            require_same_input(existing, _summary(found.files, settings, workers, progress), out)
        else:
            with explain_disk_errors("writing shards", out):
                run = _Run(found.files, settings, ready, staged, workers, progress, note)
                manifest = run.write(max_reject_rate)
    return Prepared(
        manifest=manifest,
        already_complete=run is None,
        ignored=dict(+found.ignored),
        read_as=found.read_as,
        workers=workers.num_workers,
        units=run.units if run else 0,
        reused_units=run.reused if run else 0,
        peak_memory_bytes=max(peak_memory_bytes(), workers.peak_memory_bytes),
        seconds=time.monotonic() - started,
    )


def list_read_as(read_as: dict[str, dict[str, int]]) -> str:
    """`Prepared.read_as` in words, the most frequent suffixes of every format."""
    formats = []
    for kind, counts in read_as.items():
        frequent = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
        listed = [f"{count:,} {printable(suffix)}" for suffix, count in frequent[:_SUFFIXES_SHOWN]]
        more = sum(count for _, count in frequent[_SUFFIXES_SHOWN:])
        formats.append(f"{kind}: {', '.join(listed)}" + (f" and {more:,} others" if more else ""))
    return f"as {'; '.join(formats)}"


class _Run:
    """One run over a claimed staging folder: its steps, and the count of its units."""

    def __init__(
        self,
        files: list[InputFile],
        settings: PrepareSettings,
        ready: Tokenizer | None,
        staged: StagedDirectory,
        workers: Workers,
        progress: Progress,
        note: Callable[[str], None],
    ) -> None:
        self._files, self._settings, self._staged = files, settings, staged
        self._workers, self._progress = workers, progress
        self._ready = ready
        self._fingerprint = fingerprint_of(files, settings, ready.digest if ready else None)
        self._staging = claim_staging(staged, self._fingerprint, note).absolute()
        self.units = self.reused = 0

    def write(self, max_reject_rate: float) -> ShardManifest:
        """Scan, assign, write, publish."""
        out, staging = self._staged.directory, self._staging
        index = self._scan()
        require_usable(index, staging, out, max_reject_rate)
        self._progress("ordering", 0, 0)
        if recipe_of(self._settings.recipe).fixed_split:
            shards = cut_into_splits(index, self._settings, staging)
        else:
            shards = assign(index, self._settings)
        tokenizer = self._tokenizer(index, shards["train"])
        keep_loaded(tokenizer)
        header = _header(tokenizer, index, self._settings)
        splits = self._write_shards(index, shards, header)
        manifest = ShardManifest(**dict(header), splits=splits)
        names = [*manifest.file_names()]
        if index.rejected:
            names.append(REJECTS_NAME)
        else:
            (out / REJECTS_NAME).unlink(missing_ok=True)  # of an earlier, failed run
        write_synced(staging / MANIFEST_NAME, manifest.to_bytes())
        self._staged.publish(names)
        return manifest

    def _scan(self) -> InputIndex:
        units = plan_scan(self._files, self._settings.text_key)
        results = self._do("reading", units, sum(unit.size for unit in units))
        places = {number: str(result["scan"]) for number, result in results}
        with (self._staging / REJECTS_NAME).open("wb") as rejects:
            index = InputIndex(self._files, units, rejects)
            index.fill(lambda number: Scan.load(self._staging / places[number]))
            rejects.flush()
            os.fsync(rejects.fileno())
        return index

    def _tokenizer(self, index: InputIndex, train: list[np.ndarray]) -> Tokenizer:
        """The dataset's tokenizer, which is then in the staging folder."""
        if self._ready:
            keep_tokenizer(self._ready, self._staging)
            return self._ready
        tokenizer, reused = trained_tokenizer(
            self._staging, index.digest, lambda: self._train(index, train)
        )
        self.units += 1
        self.reused += reused
        self._staged.worth_keeping = True
        return tokenizer

    def _train(self, index: InputIndex, train: list[np.ndarray]) -> Tokenizer:
        shards = (DocumentBatch.of(index, numbers) for numbers in train)
        if self._settings.tokenizer == "bpe":
            self._progress("training the tokenizer", 0, 0)
            return train_on_beginning(self._settings, shards, self._staging)
        settings = self._settings.model_dump_json()
        units = (CountUnit(number, settings, some) for number, some in enumerate(shards))
        total = sum(int(index.text_bytes[numbers].sum()) for numbers in train)
        found = [result["counts"] for _, result in self._do("counting", units, total)]
        return train_on_counts(self._settings, [self._staging / place for place in sorted(found)])

    def _write_shards(
        self, index: InputIndex, shards: dict[str, list[np.ndarray]], header: DatasetHeader
    ) -> dict[str, SplitEntry]:
        places = [(split, number) for split in shards for number in range(len(shards[split]))]
        known = IndexHeader(dataset=header, shards={split: len(shards[split]) for split in shards})
        about = known.model_dump_json()
        units = (
            ShardUnit(split, number, about, DocumentBatch.of(index, shards[split][number]))
            for split, number in places
        )
        total = sum(int(index.text_bytes[n].sum()) for some in shards.values() for n in some)
        entries = {
            places[done]: ShardEntry.model_validate(result)
            for done, result in self._do("writing", units, total)
        }
        return {
            split: SplitEntry.of([entries[split, number] for number in range(len(shards[split]))])
            for split in shards
        }

    def _do(
        self, what: str, units: Iterable[Unit], total: int
    ) -> Iterator[tuple[int, dict[str, Any]]]:
        """(number, result) of every unit as it is done."""
        sizes: dict[int, int] = {}

        def tasks() -> Iterator[Task]:
            for number, unit in enumerate(units):
                sizes[number] = unit.size
                yield Task(unit, self._staging, self._fingerprint)

        done = 0
        self._progress(what, done, total)
        for number, outcome in self._workers.map(run_task, tasks()):
            self._staged.worth_keeping = True
            self.units += 1
            self.reused += outcome.reused
            size = sizes.pop(number)
            if outcome.reused:
                total -= size
            else:
                done += size
            self._progress(what, done, total)
            yield number, outcome.result


def _header(tokenizer: Tokenizer, index: InputIndex, settings: PrepareSettings) -> DatasetHeader:
    return DatasetHeader(
        tokenizer_digest=tokenizer.digest,
        vocab_size=tokenizer.vocab_size,
        end_of_document=tokenizer.end_of_document,
        dtype="uint16" if token_dtype(tokenizer.vocab_size).itemsize == 2 else "uint32",
        settings=settings,
        input=index.summary(),
    )


def _summary(
    files: list[InputFile], settings: PrepareSettings, workers: Workers, progress: Progress
) -> InputSummary:
    """What the input is, read without writing anything."""
    units = plan_scan(files, settings.text_key)
    total, done = sum(unit.size for unit in units), 0
    scans: dict[int, Scan] = {}
    for number, found in workers.map(scan, units):
        scans[number] = found
        done += units[number].size
        progress("reading", done, total)
    index = InputIndex(files, units)
    index.fill(scans.__getitem__)
    if settings.dedup == "exact":
        first_of_each_text(index)
    return index.summary()
