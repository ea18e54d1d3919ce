"""Token ids that come from elsewhere (music, genomes, other tokenizers), written as text.

The text of ids is their decimal numbers, separated by spaces, "60 62 64": prompts are given
and generated ids are printed like this. With names (`id_names.py`), text is printed in names, and a
prompt may have both.
"""

from collections import Counter
from collections.abc import Sequence
from functools import cached_property
from typing import Annotated, Any, Literal

import numpy as np
import numpy.typing as npt
from pydantic import Field

from data_pipeline.errors import ConfigError, printable
from data_pipeline.system.strict import StrictModel
from data_pipeline.system.strict_json import canonical_json, sha256_of
from data_pipeline.tokenizers.id_names import require_usable_names
from data_pipeline.tokenizers.interface import Cuts, checked_ids, token_dtype

_DECIMAL = "0123456789 "


class IdDescription(StrictModel):
    """Content of `tokenizer.json`."""

    type: Literal["ids"] = "ids"
    version: Literal[1] = 1
    vocab_size: Annotated[int, Field(ge=2, le=2**32)]
    end_of_document: Annotated[int, Field(ge=0)]
    names: list[str]
    """Name of each id; "" for an id without one. May be shorter than the vocabulary."""


class IdTokenizer:
    """Ids 0 to vocab_size - 1, with names for none, some or all of them.

    Raises ValueError for an end-of-document id outside the vocabulary and for names that are not
    usable (`require_usable_names`).
    """

    opens_documents = True
    cuts: Cuts = "space"
    lossless = False  # the decimal numbers are not a text that bits per byte could refer to

    def __init__(self, vocab_size: int, end_of_document: int, names: dict[int, str]) -> None:
        if not 0 <= end_of_document < vocab_size:
            raise ValueError(f"end-of-document id {end_of_document} is not below {vocab_size}")
        require_usable_names(names, vocab_size)
        self.vocab_size, self.end_of_document, self.names = vocab_size, end_of_document, names
        self._id_of = {name: id_ for id_, name in names.items()}

    @classmethod
    def from_description(cls, content: dict[str, Any]) -> "IdTokenizer":
        """Raises ValueError for content that `to_json` does not write."""
        fields = IdDescription.model_validate(content)
        names = {id_: name for id_, name in enumerate(fields.names) if name}
        return cls(fields.vocab_size, fields.end_of_document, names)

    @cached_property
    def digest(self) -> str:
        """Of a vocabulary without names: names are labels, which a model never sees."""
        return sha256_of({**self._description(), "names": []})

    def encode(self, text: str) -> np.ndarray:
        """[ids]. Raises ConfigError for anything but ids, and their names, between whitespace."""
        if text.strip(_DECIMAL):
            ids = np.array([self._id(word) for word in text.split()], dtype=np.int64)
        else:  # decimal numbers only, the text that the readers write
            ids = np.fromstring(text, dtype=np.int64, sep=" ")
        if ids.size and ids.max() >= self.vocab_size:
            raise self._unknown(str(ids[ids.argmax()]))
        if (ids == self.end_of_document).any():
            raise ConfigError(
                f"token id {self.end_of_document} is the end-of-document id, which begins every "
                "document and no text may contain; omit it."
            )
        return ids.astype(token_dtype(self.vocab_size))

    def encode_batch(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        arrays = [self.encode(text) for text in texts]
        return np.concatenate(arrays), np.array([len(array) for array in arrays], dtype=np.int64)

    def unknown_symbols(self, text: str) -> Counter[str]:
        return Counter()  # `encode` refuses them

    def decode(self, ids: npt.ArrayLike) -> str:
        array = checked_ids(ids, self.vocab_size)
        words = array[array != self.end_of_document].tolist()
        return " ".join(self.names.get(id_) or str(id_) for id_ in words)

    def decode_bytes(self, ids: npt.ArrayLike) -> bytes:
        return self.decode(ids).encode()

    def token_bytes(self) -> np.ndarray:
        """All 0: there is no text whose bytes could be counted."""
        return np.zeros(self.vocab_size, dtype=np.int32)

    def to_json(self) -> str:
        return canonical_json(self._description())

    def _description(self) -> dict[str, Any]:
        names = [self.names.get(id_, "") for id_ in range(max(self.names, default=-1) + 1)]
        return IdDescription(
            vocab_size=self.vocab_size, end_of_document=self.end_of_document, names=names
        ).model_dump()

    def _id(self, word: str) -> int:
        if word in self._id_of:
            return self._id_of[word]
        if word.isascii() and word.isdecimal() and len(word) < 11:
            return int(word)
        raise self._unknown(word)

    def _unknown(self, word: str) -> ConfigError:
        names = f", and {len(self.names):,} of them have names" if self.names else ""
        return ConfigError(
            f"{printable(word)[:40]!r} is not a token id: the vocabulary has the ids 0 to "
            f"{self.vocab_size - 1}{names}. This model was trained on ids: write them with spaces "
            "between them, such as '60 62 64'; txl data inspect DATASET shows some."
        )
