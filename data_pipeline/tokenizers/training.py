"""Train or load the tokenizer that the settings of a dataset select, also those of the paper.

Symbols of the texts are counted in parts that can be merged, so that workers share the counting.

The recipes of the paper's datasets follow its published code (arXiv:1901.02860) with these
differences: all symbols, including the end of a line, are ordered by frequency; vocabularies are
counted on train alone; ptb keeps upper and lower case; line breaks of enwik8 are ordinary bytes;
the vocabulary of lm1b is counted by the benchmark's rule (words that occur at least 3 times)
instead of read from a list.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Literal

from pydantic import Field

from data_pipeline.errors import ConfigError, DataError
from data_pipeline.system.strict import StrictModel
from data_pipeline.tokenizers.byte_char_word import (
    LINE_END,
    UNKNOWN_CHARACTER,
    UNKNOWN_WORD,
    ByteTokenizer,
    CharTokenizer,
    Lines,
    WordTokenizer,
    rank_symbols,
    symbols_of,
)
from data_pipeline.tokenizers.ids import IdTokenizer, read_names
from data_pipeline.tokenizers.interface import Cuts, Tokenizer

RecipeName = Literal["wt103", "wt2", "ptb", "lm1b", "enwik8", "text8"]
DEFAULT_TRAIN_BYTES = 256 * 2**20
# Options that are left out if they are not given, so that other manifests do not change.
NOT_IF_UNSET = Field(exclude_if=lambda value: value is None or value is False)
OptionalId = Annotated[Annotated[int, Field(ge=0)] | None, NOT_IF_UNSET]


class TokenizerSettings(StrictModel):
    """The settings that choose and train a tokenizer."""

    tokenizer: Literal["byte", "char", "word", "bpe", "file", "ids"] = "byte"
    """`file`: an existing tokenizer file. The digest in the manifest identifies it. `ids`: the
    input has token ids; required by the format ids, and its default."""
    recipe: RecipeName | None = None
    """Conventions of one of the paper's datasets, with its tokenizer and min_freq as defaults; null
    adds none."""
    vocab_size: Annotated[int, Field(ge=2, le=2**20)] | None = None
    """Maximum number of ids, including end-of-document; null keeps all symbols of train."""
    end_of_document: OptionalId = None
    """Format ids: the id that begins documents, and separates them in arrays."""
    min_freq: Annotated[int, Field(ge=1)] | None = None
    """Minimum count of a symbol, or of a pair to merge, to get an id."""
    train_bytes: int = Field(default=DEFAULT_TRAIN_BYTES, ge=1)
    """bpe is trained on about this many bytes, spread over train; on all of it if it has fewer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """How one dataset is tokenized."""

    tokenizers: tuple[str, ...]
    """Allowed tokenizers. The first is the paper's, and the default."""
    min_freq: int | None = None
    """Default for a tokenizer that is trained: the smallest number of occurrences of a symbol."""
    lines: Lines = "end"
    """word only: a token at the end of each line, or at both ends."""
    opens_documents: bool = False
    """Whether documents begin with the end-of-document token."""
    fixed_split: bool = False
    """Whether the dataset is one document whose parts are the splits."""
    published_bytes: int | None = None
    """Size of that document, of which published scores are."""


NO_RECIPE = Recipe(tokenizers=("byte", "char", "word", "bpe", "file", "ids"), opens_documents=True)
_LINES = Recipe(tokenizers=("word",))
RECIPES: Mapping[RecipeName, Recipe] = MappingProxyType(
    {
        "wt103": _LINES,
        "wt2": _LINES,
        "ptb": _LINES,
        "lm1b": Recipe(tokenizers=("word",), lines="both", min_freq=3),
        "enwik8": Recipe(
            tokenizers=("byte", "char"), fixed_split=True, published_bytes=100_000_000
        ),
        "text8": Recipe(tokenizers=("char", "byte"), fixed_split=True, published_bytes=100_000_000),
    }
)


FIXED_SPLIT = {"valid": 0.05, "test": 0.05}
"""The last parts of enwik8 (bytes) and text8 (characters): the paper's 90M, 5M and 5M."""


def recipe_of(name: RecipeName | None) -> Recipe:
    return NO_RECIPE if name is None else RECIPES[name]


# --- choosing and training ----------------------------------------------------------------------


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


def train_tokenizer(settings: TokenizerSettings, texts: Callable[[], Iterator[str]]) -> Tokenizer:
    """Train char, word or bpe. The same texts and settings give the same tokenizer.

    Raises DataError if bpe cannot be trained on the texts, ValueError for a kind that is not
    trained.
    """
    return tokenizer_of_counts(settings, count_symbols(settings, texts()))


def tokenizer_of_counts(settings: TokenizerSettings, counts: Counter[str]) -> Tokenizer:
    """The char, word or bpe tokenizer of a text with these symbol counts."""
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
    from data_pipeline.tokenizers.loading import load_tokenizer, read_description, tokenizer_of
    from data_pipeline.tokenizers.pretrained import from_library_json, is_library_json

    if file.is_dir():
        return load_tokenizer(file)
    content = read_description(file)
    if is_library_json(content):
        return from_library_json(content, str(file))
    return tokenizer_of(content, source=str(file))


# --- counts of symbols ----------------------------------------------------------------------------


def count_symbols(settings: TokenizerSettings, texts: Iterable[str]) -> Counter[str]:
    """Occurrences of each symbol: characters, words and line ends, or for bpe the words of BPE.

    bpe counts the first `settings.train_bytes` bytes only. `texts` may be parts of texts, cut where
    the tokenizer's `cuts` allows. Raises UnicodeEncodeError for lone surrogates.
    """
    if settings.tokenizer == "bpe":
        from data_pipeline.tokenizers.bpe import count_words

        return count_words(texts, max_bytes=settings.train_bytes)
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


def sum_of_counts(files: Iterable[Path]) -> Counter[str]:
    """The sum of the counts in JSON files. The order of `files` does not matter."""
    total: Counter[str] = Counter()
    for path in files:
        total.update(json.loads(path.read_bytes()))
    return total
