"""Fixed splits of a single document: enwik8 and text8 of the paper.

The document is replaced by three documents, one per split. Each is a byte range of the original, so
the later stages treat it like any other document. `tokenizers/recipes.py` defines the boundaries.
"""

import hashlib
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from data_pipeline.errors import DataError, printable
from data_pipeline.preparation.document_batch import DocumentBatch
from data_pipeline.preparation.input_index import InputIndex
from data_pipeline.shards.prepare_settings import PrepareSettings
from data_pipeline.storage.urls import shown
from data_pipeline.tokenizers.recipes import fixed_split


def split_only_document(
    index: InputIndex, settings: PrepareSettings, staging: Path
) -> dict[str, list[np.ndarray]]:
    """Replace the only document by one document per split. Return the shards like `assign_shards`.

    Reads the text once to hash the three parts, and with character tokens once more before that to
    count characters. With byte tokens, a boundary inside a character moves to its first byte.
    Raises DataError if the input is not one document or is too short.
    """
    _require_one_text(index, settings)
    document, in_characters = DocumentBatch.of(index, np.array([0])), settings.tokenizer == "char"
    length = document.size
    if in_characters:
        length = sum(map(len, document.read_text(0, staging)))
    try:
        bounds = fixed_split(length)
        cuts = [stop for _, stop in bounds.values()][:-1]
        text = document.read_text(0, staging)
        sizes, hashes = _measure_splits(text, cuts, in_characters=in_characters)
    except ValueError as error:
        raise DataError(
            f"{index.document_id(0)}: {error}. Give the whole text of {settings.recipe}."
        ) from error
    index.replace_only_document(sizes, hashes)
    return {name: [np.array([number])] for number, name in enumerate(bounds)}


def _require_one_text(index: InputIndex, settings: PrepareSettings) -> None:
    if len(index) != 1:
        names = ", ".join(printable(index.document_id(n)) for n in range(min(len(index), 3)))
        raise DataError(
            f"recipe {settings.recipe} takes one document, whose last parts become valid and test; "
            f"the input has {len(index)}: {names}{', ...' if len(index) > 3 else ''}. Give one "
            "file, with --format text if it is read as another format, or omit the recipe."
        )
    (file,) = {index.files[number] for number in index.file}
    if file.rereadable and not file.holds_plain_texts:
        raise DataError(
            f"{shown(file.path)} is read as {file.kind}; recipe {settings.recipe} takes a text "
            "file, which may be compressed."
        )


def _measure_splits(
    texts: Iterable[str], cuts: list[int], *, in_characters: bool
) -> tuple[list[int], list[bytes]]:
    """UTF-8 bytes and sha256 of every split of a text; `cuts` are in characters or in bytes."""
    sizes, digests, position = [0], [hashlib.sha256()], 0
    cuts_left = [*cuts]
    for text in texts:
        rest = text
        while rest:
            room = cuts_left[0] - position if cuts_left else len(rest)
            head = rest[:room]
            if cuts_left and not in_characters:
                head = rest.encode()[:room].decode(errors="ignore")  # drops half a character
            raw = head.encode()
            digests[-1].update(raw)
            sizes[-1] += len(raw)
            position += len(head) if in_characters else len(raw)
            rest = rest[len(head) :]
            if cuts_left and rest:
                del cuts_left[0]
                sizes.append(0)
                digests.append(hashlib.sha256())
    if cuts_left or not all(sizes):
        raise ValueError("it is too short for three splits")
    return sizes, [digest.digest() for digest in digests]
