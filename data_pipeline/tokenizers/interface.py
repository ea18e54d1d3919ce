"""The interface that shards, evaluation and generation use, and helpers for all tokenizers."""

from collections import Counter
from collections.abc import Iterable, Sequence, Sized
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt

Cuts = Literal["anywhere", "space", "line", "never"]
"""Where a text may be cut without changing its tokens. `text_parts.py` defines the positions."""


class Tokenizer(Protocol):
    """Text to ids and back. Special tokens that occur in the text are ordinary text."""

    @property
    def vocab_size(self) -> int:
        """Number of ids, `end_of_document` included."""

    @property
    def end_of_document(self) -> int:
        """An id that no text encodes to. The first token of a document if `opens_documents`."""

    @property
    def opens_documents(self) -> bool:
        """Whether documents begin with `end_of_document`. False for some recipes."""

    @property
    def cuts(self) -> Cuts:
        """Where a text may be cut so that the ids of its parts are those of the whole text."""

    @property
    def lossless(self) -> bool:
        """Whether `token_bytes` over the ids of any text sums to its UTF-8 length."""

    @property
    def digest(self) -> str:
        """Hex sha256 of the canonical JSON."""

    def encode(self, text: str) -> np.ndarray:
        """Token ids of `text`: 1-D, unsigned, without `end_of_document`.

        Raises UnicodeEncodeError for lone surrogates, which UTF-8 cannot represent.
        """

    def encode_batch(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """Token ids of all texts, 1-D, and int64 [texts] how many each has; `encode` of each."""

    def unknown_symbols(self, text: str) -> Counter[str]:
        """How often each symbol of `text` occurs that `encode` replaces by an unknown token."""

    def decode(self, ids: npt.ArrayLike) -> str:
        """Text of `ids`, without `end_of_document`. Invalid UTF-8 becomes U+FFFD."""

    def decode_bytes(self, ids: npt.ArrayLike) -> bytes:
        """The bytes of `ids`. Raises ValueError for an id outside the vocabulary."""

    def token_bytes(self) -> np.ndarray:
        """int32 [vocab_size]: UTF-8 bytes of text per id, 0 for `end_of_document`."""

    def to_json(self) -> str:
        """Canonical JSON, the content of `tokenizer.json`."""


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
