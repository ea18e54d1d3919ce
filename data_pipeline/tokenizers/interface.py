"""The base class of all tokenizers, which shards, evaluation and generation use."""

import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence, Sized
from functools import cached_property
from typing import Literal

import numpy as np
import numpy.typing as npt

from data_pipeline.system.strict import StrictModel
from data_pipeline.system.strict_json import canonical_json, sha256_of

UNKNOWN_BYTES = -(2**40)
"""Bytes of a token that are not known. They make every sum negative, which is then not known."""
Cuts = Literal["anywhere", "space", "line", "never"]
"""Where a text may be cut without changing its tokens. `text_parts` defines the positions."""


def token_dtype(vocab_size: int) -> np.dtype:
    """The smallest of uint16 and uint32, little-endian, that holds every id."""
    if not 1 <= vocab_size <= 2**32:
        raise ValueError(f"vocab_size={vocab_size} must be in [1, 2**32]")
    return np.dtype("<u2" if vocab_size <= 2**16 else "<u4")


def lengths_of(parts: Iterable[Sized]) -> np.ndarray:
    """int64: the length of each part."""
    return np.fromiter(map(len, parts), np.int64)


def checked_ids(ids: npt.ArrayLike, vocab_size: int) -> np.ndarray:
    """`ids` as int64, 1-D. Raises ValueError for an id outside the vocabulary."""
    array = np.asarray(ids, dtype=np.int64).reshape(-1)
    if array.size and not 0 <= array.min() <= array.max() < vocab_size:
        raise ValueError(
            f"token ids must be in [0, {vocab_size}), got {array.min()}..{array.max()}"
        )
    return array


class Description(StrictModel):
    """Content of a `tokenizer.json`. Each kind has a `type`."""

    version: Literal[1] = 1


class Tokenizer(ABC):
    """Text to ids and back. Special tokens that occur in the text are ordinary text."""

    vocab_size: int
    """Number of ids, `end_of_document` included."""
    end_of_document: int
    """An id that no text encodes to. The first token of a document if `opens_documents`."""
    ends_of_text: tuple[int, ...] = ()
    """Ids at which a generated text ends, apart from `end_of_document`."""
    opens_documents: bool
    """Whether documents begin with `end_of_document`. False for some recipes."""
    cuts: Cuts
    """Where a text may be cut so that the ids of its parts are those of the whole text."""
    lossless: bool
    """Whether `token_bytes` over the ids of any text sums to its UTF-8 length."""
    unknown_id: int | None = None
    """The id of all symbols outside the vocabulary; None if the tokenizer has no such id."""
    description: Description
    encoder: str = ""
    """The library that encodes, with its version; "" if none does."""
    slow_reason: str = ""
    """Why this library is not gigatoken."""

    @cached_property
    def digest(self) -> str:
        """Hex sha256 of the canonical JSON."""
        return sha256_of(self.description.model_dump())

    def to_json(self) -> str:
        """Canonical JSON, the content of `tokenizer.json`."""
        return canonical_json(self.description.model_dump())

    @abstractmethod
    def encode(self, text: str) -> np.ndarray:
        """Token ids of `text`: 1-D, unsigned, without `end_of_document`.

        Raises UnicodeEncodeError for lone surrogates, which UTF-8 cannot represent.
        """

    def encode_batch(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """Token ids of all texts, 1-D, and int64 [texts] how many each has; `encode` of each."""
        parts = [np.empty(0, token_dtype(self.vocab_size)), *map(self.encode, texts)]
        return np.concatenate(parts), lengths_of(parts[1:])

    def unknown_symbols(self, text: str) -> Counter[str]:
        """How often each symbol of `text` occurs that `encode` replaces by an unknown token."""
        return Counter()

    def decode(self, ids: npt.ArrayLike) -> str:
        """Text of `ids`, without `end_of_document`. Invalid UTF-8 becomes U+FFFD."""
        return self.decode_bytes(ids).decode("utf-8", errors="replace")

    @abstractmethod
    def decode_bytes(self, ids: npt.ArrayLike) -> bytes:
        """The bytes of `ids`. Raises ValueError for an id outside the vocabulary."""

    def token_bytes(self) -> np.ndarray:
        """int64 [vocab_size]: UTF-8 bytes of text per id, 0 for `end_of_document`.

        `UNKNOWN_BYTES` for an id that may be any character. All 0 if the bytes of a text do not
        follow from its ids at all.
        """
        return np.zeros(self.vocab_size, dtype=np.int64)


# --- parts of a long text -------------------------------------------------------------------------


# It decides the tokens of texts that have no position to cut at: changing it changes datasets.
MAX_PART_CHARS = 2**19
# ASCII only: Python and the patterns of BPE disagree on other whitespace.
_UP_TO_LAST_BLANK_AFTER_WORD = re.compile(r"(?s:.*)(?<=\S)[ \t\n\r]")


def text_parts(fragments: Iterable[str], *, max_chars: int, cuts: Cuts = "space") -> Iterator[str]:
    """Cut a text into parts, so that the parts' tokens, joined, are the tokens of the text.

    Yields non-empty parts of at most `max_chars` characters. A part ends at the last position that
    the tokenizer's `cuts` allows:

    - `anywhere`: after any character.
    - `space`: before a space, tab or line break that follows a character other than whitespace. No
      word, and no token of byte-level BPE with GPT-2's pattern, crosses this position, and the
      tokenization before it does not depend on the text after it.
    - `line`: after a line break.
    - `never`: the whole text is one part, of any length.

    If there is none, it ends at `max_chars`; the tokens can then differ from those of the whole
    text. This is part of the encoding. The parts depend on the joined text alone, not on how it is
    divided into `fragments`. Holds at most twice `max_chars`, or twice the longest fragment.
    """
    buffer: list[str] = []
    num_chars = 0
    for fragment in fragments:
        buffer.append(fragment)
        num_chars += len(fragment)
        if num_chars > max_chars and cuts != "never":
            text, start = "".join(buffer), 0
            while len(text) - start > max_chars:
                stop = _cut(text, start, start + max_chars, cuts)
                yield text[start:stop]
                start = stop
            buffer, num_chars = [text[start:]], len(text) - start
    if num_chars:
        yield "".join(buffer)


def _cut(text: str, start: int, limit: int, cuts: Cuts) -> int:
    """The last position in (start, limit] where `text` may be cut; `limit` if there is none."""
    if cuts == "line":
        return text.rfind("\n", start, limit) + 1 or limit
    if cuts == "space" and (
        match := _UP_TO_LAST_BLANK_AFTER_WORD.match(text, start + 1, limit + 1)
    ):
        return match.end() - 1
    return limit
