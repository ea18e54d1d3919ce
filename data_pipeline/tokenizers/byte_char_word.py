r"""Tokenizers whose tokens are bytes, characters or words.

Bytes need no training and are lossless. Characters and words are counted in the training text, and
frequent ones have low ids, as the adaptive softmax expects.

Whitespace separates words. A token marks the end of a line, as in the paper: the character "\n",
which papers call `<eos>`. A blank line has one, and a text that does not end in "\n", such as a
prompt, has none at its end; the characters `<eos>` in a text are an ordinary word. Words without an
id are encoded as `<unk>`, the word that prepared datasets use for it. Decoding writes one space
between two words: the original whitespace is lost.
"""

import sys
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import chain, repeat
from typing import Literal

import numpy as np
import numpy.typing as npt

from data_pipeline.tokenizers.interface import (
    UNKNOWN_BYTES,
    Description,
    Tokenizer,
    checked_ids,
    lengths_of,
    token_dtype,
)

UNKNOWN_CHARACTER = ""
"""The symbol for all characters without an id. It is decoded as U+FFFD."""
UNKNOWN_WORD = "<unk>"
LINE_END = "\n"
Lines = Literal["end", "both"]
"""`end`: a token ends each line (`<eos>`). `both`: it also begins each line (`<S>` of lm1b)."""


class ByteDescription(Description):
    type: Literal["byte"] = "byte"
    vocab_size: Literal[257] = 257
    end_of_document: Literal[256] = 256
    opens_documents: bool = True


class CharDescription(Description):
    type: Literal["char"] = "char"
    symbols: list[str]
    opens_documents: bool = True


class WordDescription(Description):
    type: Literal["word"] = "word"
    symbols: list[str]
    lines: Lines = "end"
    opens_documents: bool = True


class ByteTokenizer(Tokenizer):
    """Ids 0..255 are the UTF-8 bytes of the text, 256 is `end_of_document`."""

    vocab_size = 257
    end_of_document = 256
    cuts = "anywhere"
    lossless = True

    def __init__(self, *, opens_documents: bool = True) -> None:
        self.opens_documents = opens_documents
        self.description = ByteDescription(opens_documents=opens_documents)

    def encode(self, text: str) -> np.ndarray:
        """uint16 [UTF-8 bytes]. Raises UnicodeEncodeError for lone surrogates."""
        return np.frombuffer(text.encode("utf-8"), dtype=np.uint8).astype(np.uint16)

    def encode_batch(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        raws = [text.encode("utf-8") for text in texts]
        return np.frombuffer(b"".join(raws), np.uint8).astype(np.uint16), lengths_of(raws)

    def decode_bytes(self, ids: npt.ArrayLike) -> bytes:
        array = checked_ids(ids, self.vocab_size)
        return array[array != self.end_of_document].astype(np.uint8).tobytes()

    def token_bytes(self) -> np.ndarray:
        return np.array([1] * self.end_of_document + [0], dtype=np.int64)


class _SymbolTokenizer(Tokenizer):
    """The id of a symbol is its position in `symbols`. The next id is end-of-document."""

    lossless = False
    unknown_id: int

    def __init__(self, symbols: list[str], required: set[str], *, opens_documents: bool) -> None:
        if len({*symbols}) < len(symbols) or not {*symbols} >= required:
            raise ValueError(f"its symbols are not distinct, or not all of {required} are there")
        "".join(symbols).encode()  # raises UnicodeEncodeError, a ValueError, for lone surrogates
        self.symbols, self.opens_documents = symbols, opens_documents
        self.end_of_document = len(symbols)
        self.vocab_size = len(symbols) + 1


class CharTokenizer(_SymbolTokenizer):
    """The symbols are characters, and one for all others, whose number of bytes is lost.

    Raises ValueError for symbols that are not single characters or occur twice.
    """

    cuts = "anywhere"

    def __init__(self, symbols: list[str], *, opens_documents: bool = True) -> None:
        super().__init__(symbols, {UNKNOWN_CHARACTER}, opens_documents=opens_documents)
        if max(map(len, symbols)) > 1:
            raise ValueError("its symbols are not characters")
        self.description = CharDescription(symbols=symbols, opens_documents=opens_documents)
        self.unknown_id = symbols.index(UNKNOWN_CHARACTER)

    @cached_property
    def _code_points(self) -> np.ndarray:
        """uint32 [symbols]: the character of each id."""
        return np.array([ord(symbol or "\ufffd") for symbol in self.symbols], dtype="<u4")

    @cached_property
    def _id_of(self) -> np.ndarray:
        """[code points]: the id of each character. 2.2 MB of uint16, so `encode` is one lookup."""
        table = np.full(sys.maxunicode + 1, self.unknown_id, dtype=token_dtype(self.vocab_size))
        known = np.flatnonzero(np.arange(len(self.symbols)) != self.unknown_id)
        table[self._code_points[known]] = known
        return table

    def encode(self, text: str) -> np.ndarray:
        """[characters]. Raises UnicodeEncodeError for lone surrogates."""
        return self._id_of[np.frombuffer(text.encode("utf-32-le"), dtype="<u4")]

    def encode_batch(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        return self.encode("".join(texts)), lengths_of(texts)

    def unknown_symbols(self, text: str) -> Counter[str]:
        is_unknown = self.encode(text) == self.unknown_id
        return Counter(text[place] for place in np.flatnonzero(is_unknown).tolist())

    def decode_bytes(self, ids: npt.ArrayLike) -> bytes:
        array = checked_ids(ids, self.vocab_size)
        points = self._code_points[array[array != self.end_of_document]]
        return points.tobytes().decode("utf-32-le").encode()

    def token_bytes(self) -> np.ndarray:
        lengths = [len(symbol.encode()) for symbol in self.symbols]
        lengths[self.unknown_id] = UNKNOWN_BYTES
        return np.array([*lengths, 0], dtype=np.int64)


class WordTokenizer(_SymbolTokenizer):
    """The symbols are words and the line end.

    Raises ValueError for symbols that are not words or occur twice.
    """

    def __init__(
        self, symbols: list[str], *, lines: Lines = "end", opens_documents: bool = True
    ) -> None:
        super().__init__(symbols, {UNKNOWN_WORD, LINE_END}, opens_documents=opens_documents)
        words = [symbol for symbol in symbols if symbol != LINE_END]
        if " ".join(words).split() != words:
            raise ValueError("its symbols are not words")
        self.description = WordDescription(
            symbols=symbols, lines=lines, opens_documents=opens_documents
        )
        self.lines = lines
        self.cuts = "space" if lines == "end" else "line"
        self._id_of = {symbol: number for number, symbol in enumerate(symbols)}
        self.unknown_id = self._id_of[UNKNOWN_WORD]

    def encode(self, text: str) -> np.ndarray:
        """[words and line ends]. Raises UnicodeEncodeError for lone surrogates."""
        text.encode("utf-8")
        symbols = chain.from_iterable(symbols_of(text, self.lines))
        ids = map(self._id_of.get, symbols, repeat(self.unknown_id))
        return np.fromiter(ids, dtype=token_dtype(self.vocab_size))

    def unknown_symbols(self, text: str) -> Counter[str]:
        """Words without an id. The word `<unk>`, which prepared datasets contain, has one."""
        symbols = chain.from_iterable(symbols_of(text, self.lines))
        return Counter(symbol for symbol in symbols if symbol not in self._id_of)

    def decode_bytes(self, ids: npt.ArrayLike) -> bytes:
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
        return "".join(text).encode()


def symbols_of(text: str, lines: Lines) -> Iterator[list[str]]:
    """The symbols of each line. The last line has no end symbol unless `text` ends in "\\n"."""
    *closed, last = text.split("\n")
    opening = [LINE_END] if lines == "both" else []
    for line in closed:
        yield [*opening, *line.split(), LINE_END]
    if words := last.split():
        yield [*opening, *words]


def rank_symbols(
    counts: Mapping[str, int],
    *,
    unknown: str,
    always: Collection[str] = (),
    vocab_size: int | None = None,
    min_freq: int | None = None,
) -> list[str]:
    """Symbols by descending count, ties by code points. The position of a symbol is its id.

    `unknown` and `always` are always included, and sorted by count like all others.
    Occurrences of symbols that `min_freq` or `vocab_size` exclude count as `unknown`. `vocab_size`
    includes the id of end-of-document, which is not among the symbols.
    """
    ranked = {symbol: counts.get(symbol, 0) for symbol in (unknown, *always)}
    others = [(-count, symbol) for symbol, count in counts.items() if symbol not in ranked]
    others.sort()
    room = len(others) if vocab_size is None else vocab_size - 1 - len(ranked)
    for number, (negative_count, symbol) in enumerate(others):
        if number < room and -negative_count >= (min_freq or 1):
            ranked[symbol] = -negative_count
        else:
            ranked[unknown] -= negative_count
    return sorted(ranked, key=lambda symbol: (-ranked[symbol], symbol))
