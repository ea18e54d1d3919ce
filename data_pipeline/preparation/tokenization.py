"""Tokenize documents, and the tokenizer that each process keeps for it."""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

from data_pipeline.errors import DataError, printable
from data_pipeline.shards.shard_index import DocumentIds
from data_pipeline.tokenizers import Tokenizer, load_tokenizer, token_dtype
from data_pipeline.tokenizers.interface import MAX_PART_CHARS, text_parts

_cache: dict[str, Tokenizer] = {}
"""The last tokenizer of this process, by digest. A worker loads it once, not once per shard."""


def cache_tokenizer(tokenizer: Tokenizer) -> None:
    """Use `tokenizer` for all shards that this process writes, without loading it."""
    _cache.clear()
    _cache[tokenizer.digest] = tokenizer


def load_cached_tokenizer(path: Path, digest: str) -> Tokenizer:
    """The tokenizer with this digest, loaded from `path` unless cached."""
    if digest not in _cache:
        tokenizer = load_tokenizer(path)
        if tokenizer.digest != digest:
            raise DataError(
                f"{path} has digest {tokenizer.digest}, expected {digest}. Run this again."
            )
        cache_tokenizer(tokenizer)
    return _cache[digest]


def encoder_of(tokenizer: Tokenizer) -> tuple[str, str]:
    """The library that encodes with its version, and why it is not gigatoken; "" if neither is."""
    # Imported here: tiktoken and tokenizers take 0.1 s to import.
    from data_pipeline.tokenizers.pretrained import PretrainedTokenizer

    if not isinstance(tokenizer, PretrainedTokenizer):
        return "", ""
    return tokenizer.encoder, tokenizer.slow_reason


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
    starts = ends - lengths + np.arange(len(ends))  # with one more token per earlier document
    is_text = np.ones(len(tokens) + len(ends), bool)
    is_text[starts] = False
    opened = np.full(len(is_text), tokenizer.end_of_document, token_dtype(tokenizer.vocab_size))
    opened[is_text] = tokens
    return opened, lengths + 1


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
