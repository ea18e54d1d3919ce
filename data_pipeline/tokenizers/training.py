"""Train or load the tokenizer that the settings of a dataset select.

Symbols of the texts are counted in parts that can be merged, so that workers share the counting.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from data_pipeline.errors import ConfigError, DataError
from data_pipeline.system.strict_json import canonical_json
from data_pipeline.tokenizers.byte_char_word import (
    LINE_END,
    UNKNOWN_CHARACTER,
    UNKNOWN_WORD,
    ByteTokenizer,
    CharTokenizer,
    WordTokenizer,
    rank_symbols,
    symbols_of,
)
from data_pipeline.tokenizers.ids import IdTokenizer, read_names
from data_pipeline.tokenizers.interface import Cuts, Tokenizer
from data_pipeline.tokenizers.recipes import TokenizerSettings, recipe_of

Texts = Callable[[], Iterator[str]]


def needs_training(settings: TokenizerSettings) -> bool:
    """Whether the tokenizer is trained on the input: char, word and bpe."""
    return settings.tokenizer in ("char", "word", "bpe")


def cuts_of(settings: TokenizerSettings) -> Cuts:
    """The `cuts` of a tokenizer, known before it is trained."""
    if settings.tokenizer == "bpe":
        return "space"
    if settings.tokenizer == "char":
        return "anywhere"
    return "line" if recipe_of(settings.recipe).lines == "both" else "space"


def train_tokenizer(settings: TokenizerSettings, texts: Texts) -> Tokenizer:
    """Train char, word or bpe. The same texts and settings give the same tokenizer.

    Raises DataError if bpe cannot be trained on the texts, ValueError for a kind that is not
    trained.
    """
    return tokenizer_of_counts(settings, count_symbols(settings, texts()))


def tokenizer_of_counts(settings: TokenizerSettings, counts: Counter[str]) -> Tokenizer:
    """The char, word or bpe tokenizer of a text with these symbol counts, which bpe empties."""
    if settings.tokenizer == "bpe":
        from data_pipeline.tokenizers.bpe import bpe_of_counts

        return bpe_of_counts(
            counts, vocab_size=settings.vocab_size or 0, min_freq=settings.min_freq
        )
    recipe, is_word = recipe_of(settings.recipe), settings.tokenizer == "word"
    symbols = rank_symbols(
        counts,
        unknown=UNKNOWN_WORD if is_word else UNKNOWN_CHARACTER,
        always=(LINE_END,) if is_word else (),
        vocab_size=settings.vocab_size,
        min_freq=settings.min_freq,
    )
    if is_word:
        return WordTokenizer(symbols, lines=recipe.lines, opens_documents=recipe.opens_documents)
    return CharTokenizer(symbols, opens_documents=recipe.opens_documents)


def ready_tokenizer(settings: TokenizerSettings, file: Path | None = None) -> Tokenizer:
    """The tokenizer of the kinds that are not trained: byte, ids, or for "file" that of `file`.

    `file` is a `tokenizer.json` of the `tokenizers` library, of a dataset or of a checkpoint. For
    ids it may be given, the names of the ids. Raises ConfigError if a file is missing or not
    allowed, DataError if it is not a tokenizer.
    """
    if settings.tokenizer == "ids":
        names = read_names(file) if file else {}
        try:
            return IdTokenizer(settings.vocab_size or 0, settings.end_of_document or 0, names)
        except ValueError as error:
            raise DataError(f"{file}: {error}.") from error
    if (settings.tokenizer == "file") != (file is not None):
        raise ConfigError(
            f"tokenizer {settings.tokenizer!r} with tokenizer file {file}: tokenizer 'file' needs "
            "a file, and other tokenizers take none. Use --tokenizer PATH"
        )
    if file is None:
        return ByteTokenizer(opens_documents=recipe_of(settings.recipe).opens_documents)
    from data_pipeline.tokenizers.loading import read_description, tokenizer_of
    from data_pipeline.tokenizers.pretrained import from_library_json, is_library_json

    content = read_description(file)
    if is_library_json(content):
        return from_library_json(content, str(file))
    return tokenizer_of(content, source=str(file))


# --- counts of symbols ----------------------------------------------------------------------------


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
