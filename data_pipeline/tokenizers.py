"""Tokenizers: text to token ids and back, saved as strict JSON (never pickle).

Every tokenizer has one id that no text can produce, `end_of_document`; a special token written in
the text is ordinary text. The digest of its canonical JSON ties shards and checkpoints to it.
"""

import hashlib
import json
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from data_pipeline.errors import DataError

MAX_TOKENIZER_BYTES = 256 * 2**20


class Tokenizer(Protocol):
    """What shards, evaluation and generation need of a tokenizer."""

    @property
    def vocab_size(self) -> int:
        """Number of ids, `end_of_document` included."""

    @property
    def end_of_document(self) -> int:
        """The id that opens every document; no text encodes to it."""

    @property
    def digest(self) -> str:
        """Hex sha256 of the canonical JSON."""

    def encode(self, text: str) -> np.ndarray:
        """Token ids of `text`, 1-D, without `end_of_document`."""

    def decode(self, ids: npt.ArrayLike) -> str:
        """Text of `ids`; bytes that are no UTF-8 become U+FFFD, `end_of_document` is dropped."""

    def decode_bytes(self, ids: npt.ArrayLike) -> bytes:
        """The exact bytes of `ids`."""

    def token_bytes(self) -> np.ndarray:
        """int32 [vocab_size]: UTF-8 bytes of text that each id stands for, 0 for the end."""

    def to_json(self) -> str:
        """Canonical JSON, the content of `tokenizer.json`."""


class ByteTokenizer:
    """Ids 0..255 are the UTF-8 bytes of the text, 256 is `end_of_document`."""

    vocab_size = 257
    end_of_document = 256

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    def encode(self, text: str) -> np.ndarray:
        """uint16 [UTF-8 bytes]. Raises UnicodeEncodeError for lone surrogates."""
        return np.frombuffer(text.encode("utf-8"), dtype=np.uint8).astype(np.uint16)

    def decode(self, ids: npt.ArrayLike) -> str:
        return self.decode_bytes(ids).decode("utf-8", errors="replace")

    def decode_bytes(self, ids: npt.ArrayLike) -> bytes:
        """Raises ValueError for an id outside the vocabulary."""
        array = np.asarray(ids, dtype=np.int64).reshape(-1)
        if array.size and not 0 <= array.min() <= array.max() < self.vocab_size:
            raise ValueError(
                f"token ids must lie in [0, {self.vocab_size}), got {array.min()}..{array.max()}"
            )
        return array[array != self.end_of_document].astype(np.uint8).tobytes()

    def token_bytes(self) -> np.ndarray:
        lengths = np.ones(self.vocab_size, dtype=np.int32)
        lengths[self.end_of_document] = 0
        return lengths

    def to_json(self) -> str:
        description = {
            "end_of_document": self.end_of_document,
            "type": "byte",
            "version": 1,
            "vocab_size": self.vocab_size,
        }
        return json.dumps(description, sort_keys=True, separators=(",", ":"))


def token_dtype(vocab_size: int) -> np.dtype:
    """The smallest of uint16 and uint32, little-endian, that holds every id."""
    if not 1 <= vocab_size <= 2**32:
        raise ValueError(f"vocab_size={vocab_size} must lie in [1, 2**32]")
    return np.dtype("<u2" if vocab_size <= 2**16 else "<u4")


def load_tokenizer(source: str | Path | dict[str, Any]) -> Tokenizer:
    """The tokenizer of a `tokenizer.json` or of its parsed content.

    Raises DataError when it is missing, damaged, or of a kind or version unknown here.
    """
    if isinstance(source, dict):
        return _from_description(source, "the tokenizer description")
    path = Path(source)
    try:
        if path.stat().st_size > MAX_TOKENIZER_BYTES:
            raise DataError(f"{path} is larger than {MAX_TOKENIZER_BYTES:,} bytes: no tokenizer.")
        description = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise DataError(
            f"{path}: the tokenizer cannot be read ({error.strerror}). A complete dataset has one; "
            "re-create it with txl prepare INPUT --out DIR."
        ) from error
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"{path} is not valid JSON ({error}). It was edited or damaged; re-create the dataset "
            "with txl prepare INPUT --out DIR."
        ) from error
    return _from_description(description, str(path))


def _from_description(description: object, where: str) -> Tokenizer:
    known = json.loads(ByteTokenizer().to_json())
    same_types = isinstance(description, dict) and all(
        type(description.get(key)) is type(value) for key, value in known.items()
    )
    if same_types and description == known:
        return ByteTokenizer()
    found = json.dumps(description, sort_keys=True, default=repr)[:200]
    raise DataError(
        f"{where} describes no tokenizer that this version knows: found {found}, expected "
        f"{ByteTokenizer().to_json()}. It was edited, damaged, or written by a newer txl."
    )
