"""The tokenizer of a dataset: ready by the settings or as a file, or trained on the train split.

The one place between the corpus and the shards where a tokenizer comes from and is used.
"""

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np

from data_pipeline.errors import DataError, printable
from data_pipeline.preparation.document_batch import DocumentBatch
from data_pipeline.preparation.finished_units import FileSum, finish, finished
from data_pipeline.preparation.settings import PrepareSettings
from data_pipeline.shards.manifest import TOKENIZER_NAME
from data_pipeline.storage.atomic_files import sha256_file, write_synced
from data_pipeline.tokenizers import (
    SymbolCounts,
    Tokenizer,
    cuts_of,
    load_tokenizer,
    train_tokenizer,
)
from data_pipeline.tokenizers.text_parts import text_parts

PIECE_CHARS = 2**19
"""Longer texts are tokenized in pieces. Where a text has no place to be cut this decides tokens.

tiktoken fails on a million blanks in a row, so it must be less."""
_UNIT = "tokenizer"


def trained_tokenizer(
    staging: Path, key: str, train: Callable[[], Tokenizer]
) -> tuple[Tokenizer, bool]:
    """The tokenizer of `train()`, kept in the staging folder, and whether it was there already.

    `key` is a digest of all that it depends on.
    """
    path = staging / TOKENIZER_NAME
    if finished(staging, _UNIT, key) is not None:
        return load_tokenizer(path), True
    tokenizer = train()
    keep_tokenizer(tokenizer, staging)
    sums = [FileSum(TOKENIZER_NAME, path.stat().st_size, sha256_file(path))]
    finish(staging, _UNIT, key, result={}, files=sums)
    return tokenizer, False


def keep_tokenizer(tokenizer: Tokenizer, staging: Path) -> None:
    write_synced(staging / TOKENIZER_NAME, tokenizer.to_json().encode() + b"\n")


def train_on_beginning(
    settings: PrepareSettings, shards: Iterable[DocumentBatch], staging: Path
) -> Tokenizer:
    """bpe, of the first `train_bytes` of these documents."""

    def texts() -> Iterator[str]:
        for documents in shards:
            for number in range(len(documents)):
                # Cut where bpe may be cut, so that a giant document is not held.
                pieces = documents.texts(number, staging)
                yield from text_parts(pieces, max_chars=PIECE_CHARS, cuts="space")

    return train_tokenizer(settings, texts)


def counted_pieces(settings: PrepareSettings, texts: Iterable[str]) -> Iterator[str]:
    """A document in the pieces that its symbols are counted in."""
    return text_parts(texts, max_chars=PIECE_CHARS, cuts=cuts_of(settings))


def train_on_counts(settings: PrepareSettings, counts: Iterable[Path]) -> Tokenizer:
    """char or word, of the counts in these files."""
    parts = (SymbolCounts.from_bytes(path.read_bytes()) for path in counts)
    return train_tokenizer(settings, SymbolCounts.merge(parts))


def token_pieces(
    tokenizer: Tokenizer, texts: Iterable[str], *, document_id: str
) -> Iterator[np.ndarray]:
    """A document's tokens in pieces, the end-of-document token first if that opens documents.

    `texts` are its text in pieces cut anywhere; the tokens are those of the whole. Raises DataError
    for a document without any token, or with the end-of-document token inside.
    """
    empty = not tokenizer.opens_documents
    if tokenizer.opens_documents:
        yield np.array([tokenizer.end_of_document])
    for text in text_parts(texts, max_chars=PIECE_CHARS, cuts=tokenizer.cuts):
        tokens = tokenizer.encode(text)
        empty = empty and not tokens.size
        if tokenizer.opens_documents and (tokens == tokenizer.end_of_document).any():
            raise DataError(
                f"{printable(document_id)} holds text of which this tokenizer makes its "
                f"end-of-document token, id {tokenizer.end_of_document}. Use another tokenizer, or "
                "take the document out of the corpus, and run this again."
            )
        yield tokens
    if empty:
        raise DataError(
            f"{printable(document_id)} holds nothing but blanks, and documents of this recipe have "
            "no token of their own. Take it out of the corpus and run this again."
        )
