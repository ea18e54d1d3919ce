"""Which documents go into which shard of which split, and in which order.

One process decides this for the whole input, from arrays without text. The result depends on input
and settings only, so any number of workers can then write the shards independently.

The split of a document is given with its file, by a hash, or by its place in a long text:

- The input gives splits to its files (`readers/split_names.py`). `--split none` merges them.
- `--split valid=0.1` holds out that fraction of train by a hash: of the document, or of the work
  that it is a part of (`--split-by`). Splits that only file names give are then ignored; those of
  inputs named `train=A test=B` stay.
- A recipe with fixed splits, or `--split-by position`, replaces the only document by one document
  per split, each a range of the original. Later stages treat them like other documents.

A work is by default the file for JSON files of token ids (tracks of a song), and in tar files the
documents `STEM_1`, `STEM_2` or `STEM/1` of the same stem; otherwise the document.
"""

import hashlib
import itertools
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np

from data_pipeline.errors import ConfigError, DataError, printable
from data_pipeline.preparation.documents import CHUNK_BYTES
from data_pipeline.preparation.scan import InputIndex
from data_pipeline.readers import InputFile, InputFiles
from data_pipeline.readers.split_names import (
    TRAIN,
    count_by_split,
    list_names,
    list_splits,
    split_order,
    unclear_files,
)
from data_pipeline.shards.manifest import PrepareSettings
from data_pipeline.system.sources import scheme_of, shown
from data_pipeline.tokenizers.training import FIXED_SPLIT, recipe_of

Unit = Literal["bytes", "characters", "ids"]
"""What the positions of `--split-by position` count."""


@dataclass(frozen=True, slots=True)
class ShardAssignment:
    index: InputIndex
    settings: PrepareSettings
    staging: Path
    """Has the texts, if the only document must be read to cut it."""
    note: Callable[[str], None]
    """Receives messages for the user."""

    def shards(self) -> dict[str, list[np.ndarray]]:
        """Split -> its shards; a shard is the numbers of its documents, in their final order.

        Raises ConfigError for splits that contradict each other, and DataError for an input that
        cannot fill all splits.
        """
        index, settings, documents = self.index, self.settings, self.index.documents
        recipe = recipe_of(settings.recipe)
        if recipe.published_bytes not in (None, documents.size):
            self.note(
                f"{settings.recipe} as published has {recipe.published_bytes:,} bytes, this input "
                f"has {documents.size:,}: scores cannot be compared with published ones"
            )
        # Splits that the input gives take the place of a recipe's.
        has_fixed_split = recipe.fixed_split and not any(file.split for file in index.files)
        if has_fixed_split or settings.split_by == "position":
            return self._cut_only_document()
        numbers = np.arange(len(documents))
        if settings.dedup == "exact":
            numbers = first_of_each_text(index)
        names, split_of = self._split_documents(numbers)
        if settings.shuffle is not None:
            # Keys of document numbers, not of ranks among `numbers`: deduplication keeps the order.
            seed = settings.shuffle.to_bytes(8, "little")
            keys = (hash64(b"txl-shuffle", seed + int(n).to_bytes(8, "little")) for n in numbers)
            shuffled = np.argsort(np.fromiter(keys, np.uint64, len(numbers)), kind="stable")
            numbers, split_of = numbers[shuffled], split_of[shuffled]
        orders = {name: numbers[split_of == position] for position, name in enumerate(names)}
        return {
            name: _cut_into_shards(order, documents.text_bytes[order], settings.shard_bytes)
            for name, order in orders.items()
        }

    def _split_documents(self, numbers: np.ndarray) -> tuple[list[str], np.ndarray]:
        """Names of the splits, train first, and int8 [len(numbers)]: the split of these documents.

        The split depends on the id of the document, or the name of its work, so it does not change
        when documents are added at the end of the input (docs/how_to/keep_splits.md has the
        exceptions). An empty split takes the work with the smallest hash of the largest split.
        """
        fractions = self.settings.split
        given = [file.split or TRAIN for file in self.index.files]
        names = [TRAIN, *sorted({*given, *fractions} - {TRAIN})]
        of_file = np.array([names.index(split) for split in given], np.int8)
        split_of = of_file[self.index.documents.file[numbers]]
        if fractions:
            held_out = sorted(fractions)
            if repeated := {*held_out} & {*given}:
                raise ConfigError(
                    f"--split: the inputs give {', '.join(repeated)} already; omit it"
                )
            is_train = split_of == 0
            hashes = self._hash_works()[numbers][is_train]
            chosen, filled = _choose_splits(hashes, [fractions[name] for name in held_out])
            for position in filled:
                self.note(
                    f"split {(TRAIN, *held_out)[position]} took a document of another split, "
                    "because none fell into it; in a larger input it may give it back"
                )
            positions = np.array([names.index(name) for name in (TRAIN, *held_out)], np.int8)
            split_of[is_train] = positions[chosen]
        for position, name in enumerate(names):
            if not (split_of == position).any():
                raise DataError(f"split {name}: its files hold no document with text. Give others.")
        return names, split_of

    def _hash_works(self) -> np.ndarray:
        """uint64 [D]: the hash of the work of every document."""
        settings, num_documents = self.settings, len(self.index.documents)
        works = _works(self.index, settings.split_by)
        hashes = (hash64(b"txl-split", work.encode()) for work in works)
        hash_of = np.fromiter(hashes, np.uint64, num_documents)
        num_works = len(np.unique(hash_of))
        if num_works < num_documents and not settings.split_by:
            self.note(
                f"splits keep the parts of a work together: {num_works:,} works, "
                f"{num_documents:,} documents. To split by document: --split-by document"
            )
        if num_works <= len(settings.split):
            names = ", ".join([TRAIN, *sorted(settings.split)])
            raise DataError(
                f"{num_works} works or documents cannot fill the splits {names}. Give more "
                "documents, or fewer splits with --split. One long document is cut by "
                "--split-by position."
            )
        return hash_of

    def _cut_only_document(self) -> dict[str, list[np.ndarray]]:
        """Replace the only document by one document per split, each a shard.

        With byte tokens, a boundary inside a character moves to its first byte; with token ids, the
        boundaries are between ids. Raises DataError if the input is not one document or too short.
        """
        settings, documents = self.settings, self.index.documents
        self._require_one_document()
        name = settings.recipe or "the corpus"
        unit: Unit = "characters" if settings.tokenizer == "char" else "bytes"
        if settings.format == "ids":
            unit = "ids"
        text = documents.mapped_text(self.staging)
        length = sum(map(len, _starts(text, unit))) if unit != "bytes" else len(text)
        try:
            bounds = _bounds(length, settings.split or FIXED_SPLIT)
        except ValueError as error:
            raise DataError(
                f"{documents.document_id(0)}: {error}. Give the whole text of {name}."
            ) from error
        places = [_place_of(text, start, unit) for start, _ in bounds.values()]
        # One blank separates two ids and is part of neither.
        stops = [*(place - (unit == "ids") for place in places[1:]), len(text)]
        parts = [
            (start, stop, hashlib.sha256(text[start:stop].data).digest())
            for start, stop in zip(places, stops, strict=True)
        ]
        if any(start == stop for start, stop, _ in parts):
            raise DataError(f"{documents.document_id(0)}: too short for {len(parts)} splits.")
        self.index.documents = documents.cut(parts)
        return {name: [np.array([number])] for number, name in enumerate(bounds)}

    def _require_one_document(self) -> None:
        recipe, documents = self.settings.recipe, self.index.documents
        cause = f"recipe {recipe}" if recipe else "--split-by position"
        if len(documents) != 1:
            names = ", ".join(map(printable, itertools.islice(documents.ids(), 3)))
            raise DataError(
                f"{cause} takes one document, whose last parts become the held-out splits; "
                f"the input has {len(documents)}: {names}{', ...' * (len(documents) > 3)}. Give "
                "one file, with --format text if it is read as another format, or omit the option."
            )


def _works(index: InputIndex, split_by: str | None) -> Iterator[str]:
    """The work of every document, as a name; see the module docstring.

    Names are short ones, so that another input with a file of the same name changes none.
    """
    names = [file.short_name or file.name for file in index.files]
    documents = replace(index.documents, names=names)
    if split_by == "document":
        return documents.ids()
    if split_by == "file":
        return (names[file] for file in documents.file)
    is_song = [bool(file.ids) and file.kind == "json" for file in index.files]
    stems = [_stem(key) for key in documents.keys]
    if len({*stems}) < _MIN_STEMS:
        stems = []
    rows = zip(documents.file, stems or itertools.repeat(""), documents.ids(), strict=False)
    return (
        names[file] if is_song[file] else f"{names[file]}:{stem}" if stem else id_
        for file, stem, id_ in rows
    )


def _cut_into_shards(
    order: np.ndarray, text_bytes: np.ndarray, shard_bytes: int
) -> list[np.ndarray]:
    """Greedy: consecutive documents with at most `shard_bytes` of text, or one larger document."""
    ends = np.cumsum(text_bytes)
    shards, first = [], 0
    while first < len(order):
        before = int(ends[first]) - int(text_bytes[first])
        # A uint64 limit: with a Python int, NumPy compares `ends` as float64, exact below 2**53.
        limit = np.uint64(before + shard_bytes)
        stop = max(int(np.searchsorted(ends, limit, side="right")), first + 1)
        shards.append(order[first:stop])
        first = stop
    return shards


def first_of_each_text(index: InputIndex) -> np.ndarray:
    """Numbers of the documents to keep, ascending. Sets `index.duplicates` to the others' count.

    Texts are equal if the first 16 bytes of their sha256 are equal. They are sorted, which takes a
    few words of RAM per document; a hash table of Python objects would take more.
    """
    documents = index.documents
    words = np.ascontiguousarray(documents.text_hash).view("<u8")  # [D, 2]
    is_held_out = np.array([file.split not in ("", TRAIN) for file in index.files])[documents.file]
    # The sort is stable: equal texts stay in input order, those of held-out splits before train.
    order = np.lexsort((~is_held_out, words[:, 1], words[:, 0]))
    is_repeat = np.zeros(len(order), bool)
    is_repeat[1:] = (words[order[1:]] == words[order[:-1]]).all(axis=1)
    is_repeat &= ~is_held_out[order]
    first = np.sort(order[~is_repeat])
    index.duplicates = len(documents) - len(first)
    return first


# --- splits ---------------------------------------------------------------------------------------


_MIN_STEMS = 10
"""Fewer stems are not works but a common name: `sample_000001`."""


def choose_given_splits(
    found: InputFiles, settings: PrepareSettings, note: Callable[[str], None]
) -> list[InputFile]:
    """The input files with the splits that count; reports them to `note`.

    Raises ConfigError if names of files give splits and none is train, or if some say train and
    others nothing.
    """
    counts, listed = count_by_split(found.files), list_splits(found.files)
    if found.are_named:
        if settings.merge_splits:
            raise ConfigError("--split none: the inputs are given with the names of their splits")
        note(f"splits as given: {listed}")
        return found.files
    if settings.merge_splits or settings.split:
        if len(counts) > 1:
            option = "--split none merges" if settings.merge_splits else "--split overrides"
            note(f"{option} the splits in the names of the files: {listed}")
    elif unclear := unclear_files(found.files):
        trained = [file for file in found.files if file.split == TRAIN]
        named, unnamed = (list_names([file.name for file in each]) for each in (trained, unclear))
        raise ConfigError(
            f"the names of some files say train ({named}), and those of others give no split "
            f"({unnamed}): they may be text to hold out. Name the splits: "
            f"train={shown(trained[0].place)} valid={shown(unclear[0].place)} (each may have "
            "several inputs), or train on all files: --split none"
        )
    elif len(counts) > 1 and TRAIN in counts:
        note(f"splits by the names of the files, {listed}")
        return found.files
    elif len(counts) > 1:
        raise ConfigError(
            f"the names of the files give the splits {', '.join(counts)}, and none is train "
            f"({listed}). Add the training text, name it (train=PATH valid=PATH), or merge all "
            "files with --split none"
        )
    elif TRAIN not in counts:
        (only,) = counts
        note(f"all files have names of the split {only}, and become train: the only split")
    return [replace(file, split="") if file.split else file for file in found.files]


def require_distinct_files(
    files: list[InputFile], note: Callable[[str], None], *, are_named: bool
) -> None:
    """Report files that are read twice, through links.

    Raises ConfigError if one is in train and in another split, and the user has named both: trees
    of a package store have links between files such as LICENSE.
    """
    seen: dict[tuple[int, int, str], InputFile] = {}
    linked = []
    marks = Counter(file.mark for file in files)  # one file has one mark
    for file in files:
        path = file.archive or file.path
        if scheme_of(path) or not file.size or not file.mark or marks[file.mark] == 1:
            continue
        status = os.stat(path)  # noqa: PTH116 - faster for many files
        if not status.st_ino:  # a file system without such numbers
            continue
        first = seen.setdefault((status.st_dev, status.st_ino, file.member), file)
        splits = {first.split or TRAIN, file.split or TRAIN}
        if are_named and TRAIN in splits and len(splits) > 1:
            raise ConfigError(
                f"{shown(first.place)} in {first.split or TRAIN} and {shown(file.place)} in "
                f"{file.split or TRAIN} are one file, through a link. Give it in one split, or "
                "--dedup exact, which drops it from train"
            )
        linked += [file.name] * (first is not file)
    if linked:
        note(
            f"links to other files of the input, which are read again: {list_names(linked)} "
            "(--dedup exact keeps one, and none in train of those that are held out)"
        )


def _stem(key: str) -> str:
    """The key of a document in a tar file without the number of the part; "" without a key."""
    part = re.fullmatch(r"(.*[^/_.-])[/_.-]+[a-z]*\d+", key, re.IGNORECASE)
    return part[1] if part else key


def _choose_splits(hashes: np.ndarray, fractions: list[float]) -> tuple[np.ndarray, list[int]]:
    """int [D]: 0 for train, i for the split of the i-th fraction. Equal hashes stay together.

    And the splits that were empty, which took a work of another.
    """
    bounds = np.array(list(itertools.accumulate(int(f * 2**64) for f in fractions)), np.uint64)
    num_splits, filled = len(fractions) + 1, []
    split_of = (np.searchsorted(bounds, hashes, side="right") + 1) % num_splits
    for split in range(num_splits):
        if (split_of == split).any():
            continue
        works = [len(np.unique(hashes[split_of == each])) for each in range(num_splits)]
        is_donor = split_of == np.argmax(works)
        split_of[is_donor & (hashes == hashes[is_donor].min())] = split
        filled.append(split)
    return split_of, filled


def hash64(purpose: bytes, content: bytes) -> int:
    """A fixed hash. The stream of a library's generator may change between its versions."""
    digest = hashlib.blake2b(content, digest_size=8, person=purpose).digest()
    return int.from_bytes(digest, "little")


def _bounds(length: int, fractions: dict[str, float]) -> dict[str, tuple[int, int]]:
    """Split -> [start, stop): train first. Raises ValueError if a split would be empty."""
    names = sorted(fractions, key=split_order)
    sizes = [int(fractions[name] * length) for name in names]
    if not all(sizes):
        raise ValueError(f"{length} tokens are too few for these splits")
    starts = [length - sum(sizes[number:]) for number in range(len(sizes))]
    bounds = itertools.pairwise([0, *starts, length])
    return dict(zip([TRAIN, *names], bounds, strict=True))


def _place_of(text: np.ndarray, number: int, unit: Unit) -> int:
    """The byte of `text`, its UTF-8, at which the unit with this number begins."""
    if unit == "bytes":
        while text[number] & 0xC0 == 0x80:  # not the first byte of a character
            number -= 1
        return number
    for starts in _starts(text, unit):
        if number < len(starts):
            return int(starts[number])
        number -= len(starts)
    raise IndexError(number)


def _starts(text: np.ndarray, unit: Unit) -> Iterator[np.ndarray]:
    """The bytes at which characters or ids begin, for one chunk of the text after another."""
    if unit == "ids":
        yield np.array([0])
    for begin in range(0, len(text), CHUNK_BYTES):
        chunk = text[begin : begin + CHUNK_BYTES]
        is_id = unit == "ids"
        is_start = chunk == ord(" ") if is_id else (chunk & 0xC0) != 0x80
        yield begin + np.flatnonzero(is_start) + is_id
