"""Train or load the tokenizer that the settings of a dataset select."""

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

from data_pipeline.errors import ConfigError, DataError
from data_pipeline.tokenizers.byte import ByteTokenizer
from data_pipeline.tokenizers.char import UNKNOWN as UNKNOWN_CHARACTER
from data_pipeline.tokenizers.char import CharTokenizer
from data_pipeline.tokenizers.id_names import read_names
from data_pipeline.tokenizers.ids import IdTokenizer
from data_pipeline.tokenizers.interface import Cuts, Tokenizer
from data_pipeline.tokenizers.recipes import TokenizerSettings, recipe_of
from data_pipeline.tokenizers.symbol_counts import count_symbols
from data_pipeline.tokenizers.vocabulary import rank_symbols
from data_pipeline.tokenizers.word import LINE_END, WordTokenizer
from data_pipeline.tokenizers.word import UNKNOWN as UNKNOWN_WORD

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
