"""Corpora of one document whose parts are the splits: enwik8 and text8 of the paper.

The parts are documents by themselves, places inside the one that was scanned, so all that follows
treats them as any other. Where they end is `tokenizers/recipes.py`'s business.
"""

import hashlib
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from data_pipeline.errors import DataError, printable
from data_pipeline.preparation.document_batch import DocumentBatch
from data_pipeline.preparation.input_index import InputIndex
from data_pipeline.preparation.settings import PrepareSettings
from data_pipeline.storage.urls import shown
from data_pipeline.tokenizers.recipes import fixed_split


def cut_into_splits(
    index: InputIndex, settings: PrepareSettings, staging: Path
) -> dict[str, list[np.ndarray]]:
    """Have the parts in place of the only document. Per split, its shards, as `assign`.

    Reads the document once for characters, to count them, and once to hash the parts. A cut inside
    a character, which only bytes as tokens can ask for, moves to where it begins. Raises DataError
    for an input of several documents or too short a one.
    """
    _require_one_text(index, settings)
    document, characters = DocumentBatch.of(index, np.array([0])), settings.tokenizer == "char"
    length = document.size
    if characters:
        length = sum(map(len, document.texts(0, staging)))
    try:
        places = fixed_split(length)
        cuts = [stop for _, stop in places.values()][:-1]
        sizes, checks = _parts(document.texts(0, staging), cuts, characters=characters)
    except ValueError as error:
        raise DataError(
            f"{index.document_id(0)}: {error}. Give the whole text of {settings.recipe}."
        ) from error
    index.cut_only_document(sizes, checks)
    return {name: [np.array([number])] for number, name in enumerate(places)}


def _require_one_text(index: InputIndex, settings: PrepareSettings) -> None:
    if len(index) != 1:
        names = ", ".join(
            printable(index.document_id(number)) for number in range(min(len(index), 3))
        )
        raise DataError(
            f"recipe {settings.recipe} takes one document, whose last parts become valid and test; "
            f"the input has {len(index)}: {names}{', ...' if len(index) > 3 else ''}. Give the "
            "one file, with --format text if it is not read as that, or leave the recipe out."
        )
    (file,) = {index.files[number] for number in index.file}
    if file.rereadable and not file.holds_plain_texts:
        raise DataError(
            f"{shown(file.path)} is read as {file.kind}; recipe {settings.recipe} takes a file of "
            "text, also compressed."
        )


def _parts(
    texts: Iterable[str], cuts: list[int], *, characters: bool
) -> tuple[list[int], list[bytes]]:
    """UTF-8 bytes and sha256 of every part of a text, cut at these characters or bytes of it."""
    sizes, digests, at = [0], [hashlib.sha256()], 0
    left = [*cuts]
    for text in texts:
        rest = text
        while rest:
            wanted = left[0] - at if left else len(rest)
            taken = rest[:wanted]
            if left and not characters:
                taken = rest.encode()[:wanted].decode(errors="ignore")
            raw = taken.encode()
            digests[-1].update(raw)
            sizes[-1] += len(raw)
            at += len(taken) if characters else len(raw)
            rest = rest[len(taken) :]
            if left and rest:
                del left[0]
                sizes.append(0)
                digests.append(hashlib.sha256())
    if left or not all(sizes):
        raise ValueError("it is too short for three splits")
    return sizes, [digest.digest() for digest in digests]
