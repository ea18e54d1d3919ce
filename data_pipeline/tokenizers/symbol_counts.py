"""Count the symbols of texts for trained vocabularies, in parts that can be merged."""

import json
from collections import Counter
from collections.abc import Iterable

from data_pipeline.system.strict_json import canonical_json
from data_pipeline.tokenizers.recipes import TokenizerSettings, recipe_of
from data_pipeline.tokenizers.word import symbols_of


def count_symbols(settings: TokenizerSettings, texts: Iterable[str]) -> Counter[str]:
    """Occurrences of each symbol: characters, words and line ends, or for bpe the words of BPE.

    bpe counts the first `settings.train_bytes` bytes only. `texts` may be parts of texts, cut where
    the tokenizer's `cuts` allows. Raises UnicodeEncodeError for lone surrogates, ValueError for a
    tokenizer without such a vocabulary.
    """
    if settings.tokenizer == "bpe":
        from data_pipeline.tokenizers.bpe import count_words

        return count_words(texts, max_bytes=settings.train_bytes)
    if settings.tokenizer not in ("char", "word"):
        raise ValueError(f"tokenizer {settings.tokenizer!r} has no vocabulary of symbols")
    counts: Counter[str] = Counter()
    lines = recipe_of(settings.recipe).lines
    for text in texts:
        text.encode("utf-8")
        if settings.tokenizer == "word":
            for symbols in symbols_of(text, lines):
                counts.update(symbols)
        else:
            counts.update(text)
    return counts


def merge_counts(parts: Iterable[Counter[str]]) -> Counter[str]:
    """The sum of all counts. The order of `parts` does not matter."""
    total: Counter[str] = Counter()
    for part in parts:
        total.update(part)
    return total


def counts_to_bytes(counts: Counter[str]) -> bytes:
    """Canonical JSON: equal counts have equal bytes."""
    return canonical_json(counts).encode()


def counts_from_bytes(data: bytes) -> Counter[str]:
    """Parse what `counts_to_bytes` wrote."""
    return Counter(json.loads(data))
