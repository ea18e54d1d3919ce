"""Preparing: a corpus to a directory of shards with a manifest.

Two passes: `corpus.py` reads every record once and keeps where it stands; then the documents are
read again in their final order, tokenized and written. So the whole corpus is shuffled and split
without holding its text. Packing is `shard_writer.py`'s, appearing all at once `atomic_files.py`'s.

Splits and shuffle come from a fixed 64-bit hash, not from a library's generator whose stream may
change: the same input and settings give the same bytes, always.
"""

import contextlib
import hashlib
import itertools
import json
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from data_pipeline.atomic_files import (
    STAGING,
    StagedDirectory,
    explain_disk_errors,
    write_file,
    write_synced,
)
from data_pipeline.corpus import Corpus, Progress, scan_corpus
from data_pipeline.errors import DataError
from data_pipeline.manifest import (
    MANIFEST_NAME,
    REJECTS_NAME,
    TOKENIZER_NAME,
    InputSummary,
    PrepareSettings,
    ShardManifest,
    SplitEntry,
    load_manifest,
)
from data_pipeline.readers import find_files, printable
from data_pipeline.shard_writer import ShardWriter
from data_pipeline.tokenizers import (
    Tokenizer,
    needs_training,
    ready_tokenizer,
    token_dtype,
    train_tokenizer,
)

DEFAULT_MAX_REJECT_RATE = 0.001


@dataclass(frozen=True, slots=True)
class Prepared:
    """What `prepare_dataset` did."""

    manifest: ShardManifest
    already_complete: bool
    ignored: dict[str, int]
    """Files of the input folders that were left out, by suffix."""
    kinds: dict[str, int]
    """Files read, by format."""


def prepare_dataset(
    inputs: Sequence[str | Path],
    out: Path,
    settings: PrepareSettings,
    *,
    tokenizer_file: Path | None = None,
    max_reject_rate: float = DEFAULT_MAX_REJECT_RATE,
    progress: Progress = lambda what, done, total: None,
) -> Prepared:
    """Write the dataset of `inputs` to `out`, or find it there already complete.

    `max_reject_rate` is the fraction of records that may be unusable; they are listed in
    `rejects.jsonl` either way. `tokenizer_file` belongs to `settings.tokenizer` file. Raises
    DataError for input without usable text, too many rejects, an `out` that holds something else,
    and a disk that is full or refuses.
    """
    found = find_files([str(given) for given in inputs], format=settings.format, exclude=out)
    ready = None if needs_training(settings) else ready_tokenizer(settings, tokenizer_file)
    all_again = all(file.rereadable for file in found.files)
    with (
        StagedDirectory(out, last=MANIFEST_NAME) as staged,
        explain_disk_errors("keeping texts that cannot be read again", out),
        contextlib.nullcontext() if all_again else tempfile.TemporaryFile(dir=out) as kept,
    ):
        existing = _existing(out, settings, ready)
        corpus = scan_corpus(found.files, settings.text_key, progress, kept=kept)
        ignored, kinds = dict(+found.ignored), dict(found.kinds)
        if existing:
            _require_same_input(existing, corpus.summary(), out)
            return Prepared(existing, already_complete=True, ignored=ignored, kinds=kinds)
        _require_usable(corpus, out, max_reject_rate)
        order = _assign(corpus, settings)
        tokenizer = ready or _trained(corpus, order["train"], settings, progress)
        with explain_disk_errors("writing shards", out):
            manifest = _write(
                corpus,
                order,
                settings=settings,
                tokenizer=tokenizer,
                staging=staged.stage(),
                progress=progress,
            )
            if not corpus.rejects:
                (out / REJECTS_NAME).unlink(missing_ok=True)  # of an earlier, failed run
            staged.publish()
    return Prepared(manifest, already_complete=False, ignored=ignored, kinds=kinds)


def _existing(
    out: Path, settings: PrepareSettings, tokenizer: Tokenizer | None
) -> ShardManifest | None:
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
    if tokenizer and manifest.tokenizer_digest != tokenizer.digest:
        changes.append(f"tokenizer: {manifest.tokenizer_digest} there, {tokenizer.digest} now")
    if changes:
        raise _other_dataset(out, changes)
    return manifest


def _require_same_input(existing: ShardManifest, now: InputSummary, out: Path) -> None:
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


def _hash64(purpose: bytes, content: bytes) -> int:
    digest = hashlib.blake2b(content, digest_size=8, person=purpose).digest()
    return int.from_bytes(digest, "little")


def _assign(corpus: Corpus, settings: PrepareSettings) -> dict[str, np.ndarray]:
    """Per split, the numbers of its documents in their final order.

    A document's split depends on its id alone, so it stays where it is when the corpus grows. A
    split that would be empty takes the document with the smallest hash from the largest one.
    """
    held_out = sorted(settings.split)  # by name: the order they were given in decides nothing
    names = ["train", *held_out]
    if len(corpus) < len(names):
        raise DataError(
            f"{len(corpus)} documents cannot fill {len(names)} splits ({', '.join(names)}). Give "
            "more documents, or ask for fewer splits with --split."
        )
    ids = (corpus.document_id(number).encode() for number in range(len(corpus)))
    hashes = np.fromiter((_hash64(b"txl-split", id_) for id_ in ids), np.uint64, len(corpus))
    widths = [int(settings.split[name] * 2**64) for name in held_out]
    bounds = np.array(list(itertools.accumulate(widths)), dtype=np.uint64)
    part = (np.searchsorted(bounds, hashes, side="right") + 1) % len(names)
    for empty in range(len(names)):
        sizes = np.bincount(part, minlength=len(names))
        if not sizes[empty]:
            donors = np.flatnonzero(part == sizes.argmax())
            part[donors[hashes[donors].argmin()]] = empty
    order = np.arange(len(corpus))
    if settings.shuffle is not None:
        seed = settings.shuffle.to_bytes(8, "little")
        keys = (_hash64(b"txl-shuffle", seed + int(n).to_bytes(8, "little")) for n in order)
        order = np.argsort(np.fromiter(keys, np.uint64, len(corpus)), kind="stable")
    return {name: order[part[order] == number] for number, name in enumerate(names)}


def _trained(
    corpus: Corpus, numbers: np.ndarray, settings: PrepareSettings, progress: Progress
) -> Tokenizer:
    """The tokenizer that the training documents give, in their final order."""
    total = sum(corpus.size[number] for number in numbers)

    def texts() -> Iterator[str]:
        done = 0
        for number, text in corpus.texts(numbers, settings.text_key):
            yield text
            done += corpus.size[number]
            progress("reading for the tokenizer", done, total)

    return train_tokenizer(settings, texts)


def _write(
    corpus: Corpus,
    order: dict[str, np.ndarray],
    *,
    settings: PrepareSettings,
    tokenizer: Tokenizer,
    staging: Path,
    progress: Progress,
) -> ShardManifest:
    """The second pass: write every file of the dataset to `staging`."""
    dtype, written = token_dtype(tokenizer.vocab_size), 0
    total, splits = sum(corpus.size), {}
    for name, numbers in order.items():
        writer = ShardWriter(
            staging,
            name,
            dtype=dtype,
            vocab_size=tokenizer.vocab_size,
            block_bytes=settings.block_bytes,
            shard_bytes=settings.shard_bytes,
        )
        try:
            for number, text in corpus.texts(numbers, settings.text_key):
                opened = _opened(tokenizer, text)
                if not opened.size:
                    raise DataError(
                        f"{printable(corpus.document_id(number))} holds nothing but blanks, and "
                        f"documents of recipe {settings.recipe} have no token of their own. Take "
                        "it out of the corpus and run this again."
                    )
                num_bytes = len(text) if text.isascii() else len(text.encode())
                writer.add(corpus.document_id(number), opened, text_bytes=num_bytes)
                written += corpus.size[number]
                progress("writing", written, total)
            splits[name] = SplitEntry.of(writer.close())
        except BaseException:
            writer.abandon()
            raise
    manifest = ShardManifest(
        tokenizer_digest=tokenizer.digest,
        vocab_size=tokenizer.vocab_size,
        end_of_document=tokenizer.end_of_document,
        dtype="uint16" if dtype.itemsize == 2 else "uint32",
        settings=settings,
        input=corpus.summary(),
        splits=splits,
    )
    write_synced(staging / TOKENIZER_NAME, tokenizer.to_json().encode() + b"\n")
    if corpus.rejects:
        write_synced(staging / REJECTS_NAME, corpus.reject_list())
    write_synced(staging / MANIFEST_NAME, manifest.to_bytes())
    return manifest


def _opened(tokenizer: Tokenizer, text: str) -> np.ndarray:
    """A document's tokens, behind the end-of-document token if that opens documents."""
    tokens = tokenizer.encode(text)
    if not tokenizer.opens_documents:
        return tokens
    return np.concatenate([np.array([tokenizer.end_of_document], dtype=tokens.dtype), tokens])
