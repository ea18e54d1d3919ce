r"""Words as tokens, and a token for the end of a line, as in the paper. Whitespace separates words.

The end of a line is the character "\n". A blank line has one, and a text that does not end in "\n",
such as a prompt, has none at its end. Papers call this token `<eos>`; the characters `<eos>` in a
text are an ordinary word. Words without an id are encoded as `<unk>`, the word that prepared
datasets use for it. Decoding writes one space between two words: the original whitespace is lost.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from data_pipeline.system.strict import StrictModel
from data_pipeline.system.strict_json import canonical_json, sha256_of
from data_pipeline.tokenizers.interface import Cuts, checked_ids, token_dtype
from data_pipeline.tokenizers.vocabulary import require_distinct

UNKNOWN = "<unk>"
LINE_END = "\n"
Lines = Literal["end", "both"]
"""`end`: a token ends each line (`<eos>`). `both`: it also begins each line (`<S>` of lm1b)."""


class WordDescription(StrictModel):
    """Content of `tokenizer.json`."""

    type: Literal["word"] = "word"
    version: Literal[1] = 1
    symbols: list[str]
    lines: Lines = "end"
    opens_documents: bool = True


class _Ids(dict[str, int]):
    def __missing__(self, word: str) -> int:
        return self[UNKNOWN]


def symbols_of(text: str, lines: Lines) -> Iterator[list[str]]:
    """The symbols of each line. The last line has no end symbol unless `text` ends in "\\n"."""
    *closed, last = text.split("\n")
    opening = [LINE_END] if lines == "both" else []
    for line in closed:
        yield [*opening, *line.split(), LINE_END]
    if words := last.split():
        yield [*opening, *words]


class WordTokenizer:
    """The id of a symbol is its position in `symbols`. The next id is end-of-document.

    Raises ValueError for symbols that are not words or occur twice.
    """

    lossless = False

    def __init__(
        self, symbols: list[str], *, lines: Lines = "end", opens_documents: bool = True
    ) -> None:
        require_distinct(symbols)
        for symbol in symbols:
            if symbol != LINE_END and symbol.split() != [symbol]:
                raise ValueError(f"symbol {symbol[:20]!r} is not one word")
            symbol.encode()
        if missing := {UNKNOWN, LINE_END} - {*symbols}:
            raise ValueError(f"symbol {min(missing)!r} is missing")
        self.symbols, self.lines, self.opens_documents = symbols, lines, opens_documents
        self.end_of_document = len(symbols)
        self.vocab_size = len(symbols) + 1
        self.cuts: Cuts = "space" if lines == "end" else "line"
        self._id_of = _Ids({symbol: number for number, symbol in enumerate(symbols)})

    @classmethod
    def from_description(cls, content: dict[str, Any]) -> "WordTokenizer":
        """Raises ValueError for content that `to_json` does not write."""
        fields = WordDescription.model_validate(content)
        return cls(fields.symbols, lines=fields.lines, opens_documents=fields.opens_documents)

    @property
    def digest(self) -> str:
        return sha256_of(self._description())

    def encode(self, text: str) -> np.ndarray:
        """[words and line ends]. Raises UnicodeEncodeError for lone surrogates."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        ids: list[int] = []
        ends = [0]
        for text in texts:
            text.encode("utf-8")
            for symbols in symbols_of(text, self.lines):
                ids.extend(map(self._id_of.__getitem__, symbols))
            ends.append(len(ids))
        return np.array(ids, dtype=token_dtype(self.vocab_size)), np.diff(ends)

    def unknown_symbols(self, text: str) -> Counter[str]:
        """Words without an id. The word `<unk>`, which prepared datasets contain, has one."""
        symbols = (symbol for line in symbols_of(text, self.lines) for symbol in line)
        return Counter(symbol for symbol in symbols if symbol not in self._id_of)

    def decode(self, ids: npt.ArrayLike) -> str:
        """Joins the words of a line with spaces. With `lines` "both", blank lines are lost."""
        text, after_word = [], False
        for id_ in checked_ids(ids, self.vocab_size).tolist():
            if id_ == self.end_of_document:
                after_word = False
            elif (symbol := self.symbols[id_]) != LINE_END:
                text.append(" " + symbol if after_word else symbol)
                after_word = True
            elif after_word or self.lines == "end":
                text.append("\n")
                after_word = False
        return "".join(text)

    def decode_bytes(self, ids: npt.ArrayLike) -> bytes:
        return self.decode(ids).encode()

    def token_bytes(self) -> np.ndarray:
        """By convention, a word counts with one space after it, and a line end counts one byte."""
        lengths = [len(symbol.encode()) + 1 for symbol in self.symbols]
        # With "both", the space counted after the last word of a line is the line end.
        lengths[self._id_of[LINE_END]] = 1 if self.lines == "end" else 0
        return np.array([*lengths, 0], dtype=np.int32)

    def to_json(self) -> str:
        return canonical_json(self._description())

    def _description(self) -> dict[str, Any]:
        return WordDescription(
            symbols=self.symbols, lines=self.lines, opens_documents=self.opens_documents
        ).model_dump()
