"""Preparing: a corpus to a directory of shards with a manifest.

Three steps, of which the first and the last are work units that any number of workers share
(`work_units.py`): scan every range of the input once and keep where documents stand; decide from
that which document goes into which shard (`assignment.py`); read the documents again in that order,
shard by shard, tokenize and write. So the whole corpus is shuffled and split without holding its
text, and the same input and settings give the same bytes for any number of workers.

What is finished stays in the staging folder when the program is killed, and the same command goes
on from it. Appearing all at once is `atomic_files.py`'s business.
"""

import json
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from data_pipeline.assignment import assign
from data_pipeline.atomic_files import (
    STAGING,
    StagedDirectory,
    explain_disk_errors,
    write_file,
    write_synced,
)
from data_pipeline.build_tokenizer import build_tokenizer
from data_pipeline.corpus import Corpus, Progress, first_of_each_text
from data_pipeline.documents import InputFile, find_files, printable
from data_pipeline.errors import DataError
from data_pipeline.manifest import (
    MANIFEST_NAME,
    REJECTS_NAME,
    TOKENIZER_NAME,
    DatasetHeader,
    IndexHeader,
    InputSummary,
    PrepareSettings,
    ShardEntry,
    ShardManifest,
    SplitEntry,
    load_manifest,
)
from data_pipeline.scan import Scan, plan_scan, scan
from data_pipeline.staged_work import claim_staging, fingerprint_of
from data_pipeline.tokenizers import Tokenizer, token_dtype
from data_pipeline.work_units import ShardUnit, Task, Unit, run_task
from data_pipeline.workers import InProcess, Workers, peak_memory_bytes

DEFAULT_MAX_REJECT_RATE = 0.001


@dataclass(frozen=True, slots=True)
class Prepared:
    """What `prepare_dataset` did."""

    manifest: ShardManifest
    already_complete: bool
    ignored: dict[str, int]
    """Files of the input folders that were left out, by suffix."""
    workers: int
    units: int
    """Scans and shards of the dataset."""
    reused_units: int
    """Those found finished by an earlier run that did not end."""
    peak_memory_bytes: int
    """The largest resident set of this process or of one worker."""
    seconds: float


def prepare_dataset(
    inputs: list[Path],
    out: Path,
    settings: PrepareSettings,
    *,
    max_reject_rate: float = DEFAULT_MAX_REJECT_RATE,
    workers: Workers | None = None,
    progress: Progress = lambda what, done, total: None,
    note: Callable[[str], None] = lambda line: None,
) -> Prepared:
    """Write the dataset of `inputs` to `out`, or find it there already complete.

    `max_reject_rate` is the fraction of records that may be unusable; they are listed in
    `rejects.jsonl` either way. `workers` None: in this process. `note` receives lines for people.
    Raises DataError for input without usable text, too many rejects, an `out` that holds something
    else; UnfinishedError, with finished units kept, for a disk that is full and dead workers.
    """
    started = time.monotonic()
    workers = workers or InProcess()
    found = find_files(inputs, format=settings.format, exclude=out)
    with StagedDirectory(out, last=MANIFEST_NAME) as staged:
        existing = _existing(out, settings)
        if existing:
            manifest, run = existing, None
            _require_same_input(existing, _summary(found.files, settings, workers, progress), out)
        else:
            with explain_disk_errors("writing shards", out):
                run = _Run(found.files, settings, staged, workers, progress, note)
                manifest = run.write(max_reject_rate)
    return Prepared(
        manifest=manifest,
        already_complete=run is None,
        ignored=dict(+found.ignored),
        workers=workers.num_workers,
        units=run.units if run else 0,
        reused_units=run.reused if run else 0,
        peak_memory_bytes=max(peak_memory_bytes(), workers.peak_memory_bytes),
        seconds=time.monotonic() - started,
    )


class _Run:
    """One run over a claimed staging folder: its steps, and the count of its units."""

    def __init__(
        self,
        files: list[InputFile],
        settings: PrepareSettings,
        staged: StagedDirectory,
        workers: Workers,
        progress: Progress,
        note: Callable[[str], None],
    ) -> None:
        self._files, self._settings, self._staged = files, settings, staged
        self._workers, self._progress = workers, progress
        self._fingerprint = fingerprint_of(files, settings)
        self._staging = claim_staging(staged, self._fingerprint, note).absolute()
        self.units = self.reused = 0

    def write(self, max_reject_rate: float) -> ShardManifest:
        """Scan, assign, write, publish."""
        out, staging = self._staged.directory, self._staging
        corpus = self._scan()
        _require_usable(corpus, out, max_reject_rate)
        self._progress("ordering", 0, 0)
        shards = assign(corpus, self._settings)
        tokenizer = build_tokenizer(corpus, shards, self._settings)
        write_synced(staging / TOKENIZER_NAME, tokenizer.to_json().encode() + b"\n")
        header = _header(tokenizer, corpus, self._settings)
        splits = self._write_shards(corpus, shards, header)
        manifest = ShardManifest(**dict(header), splits=splits)
        names = [*manifest.file_names()]
        if corpus.rejects:
            write_synced(staging / REJECTS_NAME, corpus.reject_list())
            names.append(REJECTS_NAME)
        else:
            (out / REJECTS_NAME).unlink(missing_ok=True)  # of an earlier, failed run
        write_synced(staging / MANIFEST_NAME, manifest.to_bytes())
        self._staged.publish(names)
        return manifest

    def _scan(self) -> Corpus:
        units = plan_scan(self._files, self._settings.text_key)
        results = self._do("reading", units, sum(unit.size for unit in units))
        places = {number: str(result["scan"]) for number, result in results}
        corpus = Corpus(self._files, units)
        corpus.fill(lambda number: Scan.load(self._staging / places[number]))
        return corpus

    def _write_shards(
        self, corpus: Corpus, shards: dict[str, list[np.ndarray]], header: DatasetHeader
    ) -> dict[str, SplitEntry]:
        places = [(split, number) for split in shards for number in range(len(shards[split]))]
        known = IndexHeader(dataset=header, shards={split: len(shards[split]) for split in shards})
        units = (
            ShardUnit.of(corpus, shards[split][number], split=split, number=number, header=known)
            for split, number in places
        )
        total = sum(int(corpus.text_bytes[n].sum()) for some in shards.values() for n in some)
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
            done += sizes.pop(number)
            self._progress(what, done, total)
            yield number, outcome.result


def _header(tokenizer: Tokenizer, corpus: Corpus, settings: PrepareSettings) -> DatasetHeader:
    return DatasetHeader(
        tokenizer_digest=tokenizer.digest,
        vocab_size=tokenizer.vocab_size,
        end_of_document=tokenizer.end_of_document,
        dtype="uint16" if token_dtype(tokenizer.vocab_size).itemsize == 2 else "uint32",
        settings=settings,
        input=corpus.summary(),
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
    corpus = Corpus(files, units)
    corpus.fill(scans.__getitem__)
    if settings.dedup == "exact":
        first_of_each_text(corpus)
    return corpus.summary()


def _existing(out: Path, settings: PrepareSettings) -> ShardManifest | None:
    """The manifest of a complete dataset with these settings; None for a free directory."""
    names = sorted(entry.name for entry in out.iterdir() if entry.name != STAGING)
    if MANIFEST_NAME not in names:
        foreign = [name for name in names if not _is_reject_list(out / name)]
        if foreign:
            shown = ", ".join(printable(name) for name in foreign[:5])
            more = f" and {len(foreign) - 5} more" if len(foreign) > 5 else ""
            raise DataError(
                f"{out} holds files that are not of a dataset: {shown}{more}. Nothing was "
                "touched; choose an empty or new directory for --out."
            )
        return None
    manifest = load_manifest(out)
    before, now = manifest.settings.model_dump(), settings.model_dump()
    changes = [f"{key}: {before[key]!r} there, {now[key]!r} now" for key in now]
    changes = [text for text, key in zip(changes, now, strict=True) if before[key] != now[key]]
    if changes:
        raise _other_dataset(out, changes)
    return manifest


def _require_same_input(existing: ShardManifest, now: InputSummary, out: Path) -> None:
    """The same input and settings give the same tokenizer and shards: only they are compared."""
    before = existing.input
    if before != now:
        changes = [
            f"input {name}: {getattr(before, name)} there, {getattr(now, name)} now"
            for name in type(now).model_fields
            if getattr(before, name) != getattr(now, name)
        ]
        raise _other_dataset(out, changes)
    missing = [name for name in existing.file_names() if not (out / name).is_file()]
    if missing:
        raise DataError(
            f"{out} has the manifest of this dataset but not {', '.join(missing[:5])}. Restore "
            f"them, or remove {out} and run this again. To list all damage: txl data verify {out}"
        )


def _other_dataset(out: Path, changes: list[str]) -> DataError:
    return DataError(
        f"{out} holds another dataset: {'; '.join(changes)}. Nothing was touched; choose another "
        f"--out, or remove {out} and run this again. To look inside: txl data inspect {out}"
    )


def _is_reject_list(path: Path) -> bool:
    """Whether this is the list a failed run left; someone else's file of that name is not."""
    if path.name != REJECTS_NAME or not path.is_file():
        return False
    with path.open("rb") as file:
        try:
            return set(json.loads(file.readline())) == {"file", "line", "byte", "reason"}
        except (ValueError, TypeError):
            return False


def _require_usable(corpus: Corpus, out: Path, max_reject_rate: float) -> None:
    records = len(corpus) + corpus.empty + len(corpus.rejects)
    rejected = len(corpus.rejects)
    if rejected and (rejected > max_reject_rate * records or not len(corpus)):
        with explain_disk_errors("writing the list of rejects", out):
            write_file(out / REJECTS_NAME, corpus.reject_list())
        shown = "".join(f"\n  {reject}" for reject in corpus.rejects[:5])
        more = f"\n  and {rejected - 5:,} more" if rejected > 5 else ""
        advice = (
            ", or leave them out with a higher --max-reject-rate"
            if len(corpus)
            else "; no usable document is left"
        )
        raise DataError(
            f"{rejected:,} of {records:,} records cannot be used, the limit is "
            f"{max_reject_rate:.4%}; no dataset was written.{shown}{more}\nAll are listed in "
            f"{out / REJECTS_NAME}. Repair them and run this again{advice}."
        )
    if not len(corpus):
        raise DataError(
            f"the input holds no text: {len(corpus.files)} files, {corpus.empty} empty documents "
            f"and no other. Give files with text in them: txl prepare INPUT --out {out}"
        )
