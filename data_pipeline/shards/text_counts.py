"""Counts of a text that do not depend on a tokenizer: characters, words and line ends.

They are the denominators of bits per character and word perplexity. A word is what whitespace
separates (`str.split`); a line end is the character "\\n", which word models predict as `<eos>`.
The text is counted as it is tokenized: nothing is detokenized, so WikiText's ` @-@ ` is a word.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated

import numpy as np
from pydantic import Field

from data_pipeline.system.strict import StrictModel

Count = Annotated[int, Field(ge=0, lt=2**63)]

_ASCII = bytes(range(128))
_OTHER_SPACES = [chr(code).encode() for code in range(128, 0x3001) if chr(code).isspace()]
_IN_WORD = bytes(code >= 128 or not chr(code).isspace() for code in range(256))
"""By byte of UTF-8: 0 for the whitespace of ASCII, else 1."""


class TextCounts(StrictModel):
    """Counts of one text, or of several documents."""

    characters: Count
    words: Count
    line_ends: Count

    def __add__(self, other: "TextCounts") -> "TextCounts":
        return self._combine(other, 1)

    def __sub__(self, other: "TextCounts") -> "TextCounts":
        return self._combine(other, -1)

    def _combine(self, other: "TextCounts", sign: int) -> "TextCounts":
        names = type(self).model_fields
        return TextCounts(**{n: getattr(self, n) + sign * getattr(other, n) for n in names})


class TextCounter:
    """Counts documents while their fragments pass through `document`."""

    def __init__(self) -> None:
        self._characters = self._words = self._line_ends = 0

    @property
    def counts(self) -> TextCounts:
        return TextCounts(characters=self._characters, words=self._words, line_ends=self._line_ends)

    def add(self, documents: Sequence[str]) -> None:
        """Count whole documents."""
        self._characters += sum(map(len, documents))
        self._line_ends += sum(text.count("\n") for text in documents)
        # No word continues in another document. Texts in ASCII are counted apart, which is faster.
        self._words += _num_words("\n".join(filter(str.isascii, documents)))
        self._words += _num_words("\n".join(text for text in documents if not text.isascii()))

    def document(self, fragments: Iterable[str]) -> Iterator[str]:
        """Yield the fragments of one document, which may be cut anywhere, also in a word."""
        in_word = False
        for fragment in fragments:
            if fragment:
                self._characters += len(fragment)
                self._line_ends += fragment.count("\n")
                continues = in_word and not fragment[0].isspace()
                self._words += _num_words(fragment) - continues
                in_word = not fragment[-1].isspace()
            yield fragment


def count_text(text: str) -> TextCounts:
    """The counts of one document."""
    counter = TextCounter()
    counter.add([text])
    return counter.counts


def _num_words(text: str) -> int:
    """len(text.split()), several times as fast, because no list of words is made."""
    encoded = text.encode()
    if not text.isascii():
        others = encoded.translate(None, _ASCII)  # of most texts little, so the search is fast
        if any(space in others for space in _OTHER_SPACES):
            return len(text.split())
    in_word = np.frombuffer(b"\0" + encoded.translate(_IN_WORD), np.uint8)
    return int(np.count_nonzero(in_word[1:] > in_word[:-1]))
