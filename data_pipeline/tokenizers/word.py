r"""Words between whitespace as tokens, and a token for the ends of lines, as the paper has them.

The end of a line is the character "\n" itself, so blank lines have one, and a text that does not
end in "\n" (a prompt) is not closed. `<eos>` is only how people call it: `<eos>` written in the
text is a word. Words without an id become the word `<unk>`, which is how corpora write them.
What is lost is the kind and number of blanks: reading back gives one space between two words.
"""

from collections.abc import Iterator
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from data_pipeline.storage.strict_json import canonical, sha256_of
from data_pipeline.storage.strict_model import StrictModel
from data_pipeline.tokenizers.interface import Cuts, checked_ids, token_dtype
from data_pipeline.tokenizers.vocabulary import require_distinct

UNKNOWN = "<unk>"
LINE_END = "\n"
Lines = Literal["end", "both"]
"""`end`: a token closes each line (`<eos>`). `both`: it also opens it (`<S>` of lm1b)."""


class WordDescription(StrictModel):
    """`tokenizer.json`."""

    type: Literal["word"] = "word"
    version: Literal[1] = 1
    symbols: list[str]
    lines: Lines = "end"
    opens_documents: bool = True


class _Ids(dict[str, int]):
    def __missing__(self, word: str) -> int:
        return self[UNKNOWN]


def symbols_of(text: str, lines: Lines) -> Iterator[list[str]]:
    """The symbols of each line, the last one without its end if the text does not end in one."""
    *closed, last = text.split("\n")
    opening = [LINE_END] if lines == "both" else []
    for line in closed:
        yield [*opening, *line.split(), LINE_END]
    if words := last.split():
        yield [*opening, *words]


class WordTokenizer:
    """Ids are the places of `symbols`; the end of a document is the id after them.

    Raises ValueError for symbols that are no words or there twice.
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
        """Raises ValueError for any other content than `to_json` writes."""
        given = WordDescription.model_validate(content)
        return cls(given.symbols, lines=given.lines, opens_documents=given.opens_documents)

    @property
    def digest(self) -> str:
        return sha256_of(self._description())

    def encode(self, text: str) -> np.ndarray:
        """[words and line ends]. Raises UnicodeEncodeError for lone surrogates."""
        text.encode("utf-8")
        ids: list[int] = []
        for symbols in symbols_of(text, self.lines):
            ids.extend(map(self._id_of.__getitem__, symbols))
        return np.array(ids, dtype=token_dtype(self.vocab_size))

    def decode(self, ids: npt.ArrayLike) -> str:
        """Words of a line joined by spaces. With `lines` both, blank lines vanish."""
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
        """A convention: a word counts with one blank behind it, and the end of a line one byte.

        With `lines` both, the ends of lines count nothing: the last word's blank is the line end.
        """
        lengths = [len(symbol.encode()) + 1 for symbol in self.symbols]
        lengths[self._id_of[LINE_END]] = 1 if self.lines == "end" else 0
        return np.array([*lengths, 0], dtype=np.int32)

    def to_json(self) -> str:
        return canonical(self._description())

    def _description(self) -> dict[str, Any]:
        return WordDescription(
            symbols=self.symbols, lines=self.lines, opens_documents=self.opens_documents
        ).model_dump()
