"""What shards, evaluation and generation need of a tokenizer, and what all tokenizers share."""

from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt

Cuts = Literal["anywhere", "space", "line", "never"]
"""Where a text may be cut without changing its tokens: `text_parts.py` has the exact places."""


class Tokenizer(Protocol):
    """Text to ids and back. A special token written in the text is ordinary text."""

    @property
    def vocab_size(self) -> int:
        """Number of ids, `end_of_document` included."""

    @property
    def end_of_document(self) -> int:
        """An id that no text encodes to; it opens every document if `opens_documents`."""

    @property
    def opens_documents(self) -> bool:
        """Whether documents begin with `end_of_document`: yes, but for some recipes."""

    @property
    def cuts(self) -> Cuts:
        """Where a text may be cut so that its pieces' ids are the whole text's."""

    @property
    def lossless(self) -> bool:
        """Whether `token_bytes` over the ids of any text sums to its UTF-8 length."""

    @property
    def digest(self) -> str:
        """Hex sha256 of the canonical JSON."""

    def encode(self, text: str) -> np.ndarray:
        """Token ids of `text`, 1-D, unsigned, without `end_of_document`.

        Raises UnicodeEncodeError for lone surrogates: they are no text.
        """

    def decode(self, ids: npt.ArrayLike) -> str:
        """Text of `ids`; bytes that are no UTF-8 become U+FFFD, `end_of_document` is dropped."""

    def decode_bytes(self, ids: npt.ArrayLike) -> bytes:
        """The bytes of `ids`. Raises ValueError for an id outside the vocabulary."""

    def token_bytes(self) -> np.ndarray:
        """int32 [vocab_size]: UTF-8 bytes of text that each id stands for, 0 for the end."""

    def to_json(self) -> str:
        """Canonical JSON, the content of `tokenizer.json`."""


def token_dtype(vocab_size: int) -> np.dtype:
    """The smallest of uint16 and uint32, little-endian, that holds every id."""
    if not 1 <= vocab_size <= 2**32:
        raise ValueError(f"vocab_size={vocab_size} must lie in [1, 2**32]")
    return np.dtype("<u2" if vocab_size <= 2**16 else "<u4")


def checked_ids(ids: npt.ArrayLike, vocab_size: int) -> np.ndarray:
    """`ids` as int64, 1-D. Raises ValueError for one outside the vocabulary."""
    array = np.asarray(ids, dtype=np.int64).reshape(-1)
    if array.size and not 0 <= array.min() <= array.max() < vocab_size:
        raise ValueError(
            f"token ids must lie in [0, {vocab_size}), got {array.min()}..{array.max()}"
        )
    return array
