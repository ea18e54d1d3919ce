"""Count symbols, and merge the counts of several processes, for char and word vocabularies."""

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from data_pipeline.errors import DataError
from data_pipeline.storage import strict_json
from data_pipeline.tokenizers.recipes import recipe_of
from data_pipeline.tokenizers.word import symbols_of

if TYPE_CHECKING:
    from data_pipeline.preparation.settings import PrepareSettings


@dataclass(frozen=True, slots=True)
class SymbolCounts:
    """The number of occurrences of each symbol: a character, a word or a line end."""

    of: Counter[str]

    @classmethod
    def merge(cls, parts: Iterable["SymbolCounts"]) -> "SymbolCounts":
        """The sum of all counts. The order of `parts` does not matter."""
        total: Counter[str] = Counter()
        for part in parts:
            total.update(part.of)
        return cls(total)

    def to_bytes(self) -> bytes:
        """Canonical JSON: equal counts have equal bytes."""
        return strict_json.canonical(self.of).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> "SymbolCounts":
        """Raises DataError for anything that `to_bytes` does not write."""
        try:
            content = strict_json.parse(data)
        except (ValueError, RecursionError) as error:
            raise DataError(f"a count of symbols is not valid JSON: {error}") from error
        if not isinstance(content, dict):
            raise DataError(f"a count of symbols is {type(content).__name__}, not an object")
        for symbol, count in content.items():
            if type(count) is not int or count < 1:
                raise DataError(f"the count of {symbol!r} is {json.dumps(count)[:40]}, not above 0")
        return cls(Counter(content))


class SymbolCounter:
    """Counts the symbols of texts, or of parts of texts cut where the tokenizer's `cuts` allow."""

    def __init__(self, settings: "PrepareSettings") -> None:
        if settings.tokenizer not in ("char", "word"):
            raise ValueError(f"tokenizer {settings.tokenizer!r} has no vocabulary of symbols")
        self._is_word = settings.tokenizer == "word"
        self._lines = recipe_of(settings.recipe).lines

    def count(self, texts: Iterable[str]) -> SymbolCounts:
        """Raises UnicodeEncodeError for lone surrogates."""
        counts: Counter[str] = Counter()
        for text in texts:
            text.encode("utf-8")
            if self._is_word:
                for symbols in symbols_of(text, self._lines):
                    counts.update(symbols)
            else:
                counts.update(text)
        return SymbolCounts(counts)
