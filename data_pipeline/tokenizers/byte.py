"""Bytes as tokens: needs no training and is lossless."""

from collections import Counter
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from data_pipeline.system.strict import StrictModel
from data_pipeline.system.strict_json import canonical_json, sha256_of
from data_pipeline.tokenizers.interface import Cuts, checked_ids, lengths_of


class ByteDescription(StrictModel):
    """Content of `tokenizer.json`."""

    type: Literal["byte"] = "byte"
    version: Literal[1] = 1
    vocab_size: Literal[257] = 257
    end_of_document: Literal[256] = 256
    opens_documents: bool = True


class ByteTokenizer:
    """Ids 0..255 are the UTF-8 bytes of the text, 256 is `end_of_document`."""

    vocab_size = 257
    end_of_document = 256
    cuts: Cuts = "anywhere"
    lossless = True

    def __init__(self, *, opens_documents: bool = True) -> None:
        self.opens_documents = opens_documents

    @classmethod
    def from_description(cls, content: dict[str, Any]) -> "ByteTokenizer":
        """Raises ValueError for content that `to_json` does not write."""
        description = ByteDescription.model_validate(content)
        return cls(opens_documents=description.opens_documents)

    @property
    def digest(self) -> str:
        return sha256_of(self._description())

    def encode(self, text: str) -> np.ndarray:
        """uint16 [UTF-8 bytes]. Raises UnicodeEncodeError for lone surrogates."""
        return np.frombuffer(text.encode("utf-8"), dtype=np.uint8).astype(np.uint16)

    def encode_batch(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        raws = [text.encode("utf-8") for text in texts]
        return np.frombuffer(b"".join(raws), np.uint8).astype(np.uint16), lengths_of(raws)

    def unknown_symbols(self, text: str) -> Counter[str]:
        return Counter()  # every byte has an id

    def decode(self, ids: npt.ArrayLike) -> str:
        return self.decode_bytes(ids).decode("utf-8", errors="replace")

    def decode_bytes(self, ids: npt.ArrayLike) -> bytes:
        """Raises ValueError for an id outside the vocabulary."""
        array = checked_ids(ids, self.vocab_size)
        return array[array != self.end_of_document].astype(np.uint8).tobytes()

    def token_bytes(self) -> np.ndarray:
        lengths = np.ones(self.vocab_size, dtype=np.int32)
        lengths[self.end_of_document] = 0
        return lengths

    def to_json(self) -> str:
        return canonical_json(self._description())

    def _description(self) -> dict[str, Any]:
        return ByteDescription(opens_documents=self.opens_documents).model_dump()
