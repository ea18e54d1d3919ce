"""Characters as tokens. Frequent characters have low ids."""

from collections import Counter
from collections.abc import Sequence
from functools import cached_property
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from data_pipeline.system.strict import StrictModel
from data_pipeline.system.strict_json import canonical_json, sha256_of
from data_pipeline.tokenizers.interface import Cuts, checked_ids, lengths_of, token_dtype
from data_pipeline.tokenizers.vocabulary import require_distinct

UNKNOWN = ""
"""The symbol for all characters without an id. It is decoded as U+FFFD."""
_NUM_CODE_POINTS = 0x110000
_REPLACEMENT = 0xFFFD


class CharDescription(StrictModel):
    """Content of `tokenizer.json`."""

    type: Literal["char"] = "char"
    version: Literal[1] = 1
    symbols: list[str]
    opens_documents: bool = True


class CharTokenizer:
    """The id of a symbol is its position in `symbols`: characters, and `UNKNOWN` for all others.

    The next id is end-of-document. Raises ValueError for symbols that are not single characters or
    occur twice.
    """

    cuts: Cuts = "anywhere"
    lossless = False  # the number of bytes of an unknown character is lost

    def __init__(self, symbols: list[str], *, opens_documents: bool = True) -> None:
        require_distinct(symbols)
        if UNKNOWN not in symbols:
            raise ValueError("the symbol for unknown characters, an empty string, is missing")
        for symbol in symbols:
            if symbol and (len(symbol) != 1 or "\ud800" <= symbol <= "\udfff"):
                raise ValueError(f"symbol {symbol[:20]!r} is not one character")
        self.symbols, self.opens_documents = symbols, opens_documents
        self.end_of_document = len(symbols)
        self.vocab_size = len(symbols) + 1
        self._unknown = symbols.index(UNKNOWN)

    @classmethod
    def from_description(cls, content: dict[str, Any]) -> "CharTokenizer":
        """Raises ValueError for content that `to_json` does not write."""
        description = CharDescription.model_validate(content)
        return cls(description.symbols, opens_documents=description.opens_documents)

    @property
    def digest(self) -> str:
        return sha256_of(self._description())

    @cached_property
    def _code_points(self) -> np.ndarray:
        """uint32 [symbols]: the character of each id."""
        points = [ord(symbol) if symbol else _REPLACEMENT for symbol in self.symbols]
        return np.array(points, dtype="<u4")

    @cached_property
    def _id_of(self) -> np.ndarray:
        """[code points]: the id of each character. 2.2 MB of uint16, so `encode` is one lookup."""
        table = np.full(_NUM_CODE_POINTS, self._unknown, dtype=token_dtype(self.vocab_size))
        known = np.flatnonzero(np.arange(len(self.symbols)) != self._unknown)
        table[self._code_points[known]] = known
        return table

    def encode(self, text: str) -> np.ndarray:
        """[characters]. Raises UnicodeEncodeError for lone surrogates."""
        return self._id_of[np.frombuffer(text.encode("utf-32-le"), dtype="<u4")]

    def encode_batch(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        return self.encode("".join(texts)), lengths_of(texts)

    def unknown_symbols(self, text: str) -> Counter[str]:
        is_unknown = self.encode(text) == self._unknown
        return Counter(text[place] for place in np.flatnonzero(is_unknown).tolist())

    def decode(self, ids: npt.ArrayLike) -> str:
        array = checked_ids(ids, self.vocab_size)
        points = self._code_points[array[array != self.end_of_document]]
        return points.tobytes().decode("utf-32-le")

    def decode_bytes(self, ids: npt.ArrayLike) -> bytes:
        return self.decode(ids).encode()

    def token_bytes(self) -> np.ndarray:
        """See `Tokenizer.token_bytes`. An unknown character counts as U+FFFD, three bytes."""
        lengths = [len(chr(point).encode()) for point in self._code_points]
        return np.array([*lengths, 0], dtype=np.int32)

    def to_json(self) -> str:
        return canonical_json(self._description())

    def _description(self) -> dict[str, Any]:
        return CharDescription(
            symbols=self.symbols, opens_documents=self.opens_documents
        ).model_dump()
