"""Making the tokenizer that the settings of a dataset ask for."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from data_pipeline.errors import ConfigError
from data_pipeline.tokenizers.byte import ByteTokenizer
from data_pipeline.tokenizers.char import UNKNOWN as UNKNOWN_CHARACTER
from data_pipeline.tokenizers.char import CharTokenizer
from data_pipeline.tokenizers.interface import Cuts, Tokenizer
from data_pipeline.tokenizers.recipes import recipe_of
from data_pipeline.tokenizers.symbol_counts import SymbolCounter, SymbolCounts
from data_pipeline.tokenizers.vocabulary import rank_symbols
from data_pipeline.tokenizers.word import LINE_END, WordTokenizer
from data_pipeline.tokenizers.word import UNKNOWN as UNKNOWN_WORD

if TYPE_CHECKING:
    from data_pipeline.preparation.settings import PrepareSettings

Texts = Callable[[], Iterator[str]]


def needs_training(settings: "PrepareSettings") -> bool:
    """Whether the corpus decides the tokenizer: char, word and bpe."""
    return settings.tokenizer in ("char", "word", "bpe")


def cuts_of(settings: "PrepareSettings") -> Cuts:
    """Where texts may be cut for a tokenizer that is still to be trained."""
    if settings.tokenizer == "char":
        return "anywhere"
    return "line" if recipe_of(settings.recipe).lines == "both" else "space"


def train_tokenizer(settings: "PrepareSettings", source: Texts | SymbolCounts) -> Tokenizer:
    """The tokenizer of a training text; the same text and settings give the same tokenizer.

    `source` gives the texts in input order; char and word also take their merged `SymbolCounts`.
    Raises DataError if the text gives none, ValueError for a kind that needs no training.
    """
    if settings.tokenizer == "bpe":
        if isinstance(source, SymbolCounts):
            raise ValueError("bpe is trained on texts, not on counts of symbols")
        from data_pipeline.tokenizers.bpe import train_bpe

        return train_bpe(
            source(),
            vocab_size=settings.vocab_size or 0,
            min_freq=settings.min_freq,
            max_bytes=settings.train_bytes,
        )
    counts = source if isinstance(source, SymbolCounts) else SymbolCounter(settings).count(source())
    recipe, opens = recipe_of(settings.recipe), recipe_of(settings.recipe).opens_documents
    words = settings.tokenizer == "word"
    symbols = rank_symbols(
        counts.of,
        unknown=UNKNOWN_WORD if words else UNKNOWN_CHARACTER,
        always=(LINE_END,) if words else (),
        vocab_size=settings.vocab_size,
        min_freq=settings.min_freq,
    )
    if words:
        return WordTokenizer(symbols, lines=recipe.lines, opens_documents=opens)
    return CharTokenizer(symbols, opens_documents=opens)


def ready_tokenizer(settings: "PrepareSettings", file: Path | None = None) -> Tokenizer:
    """The tokenizer of kind byte, or that of `file` for kind file.

    `file` is a `tokenizer.json` of the `tokenizers` library, of a dataset or of a checkpoint.
    Raises ConfigError when kind and file do not go together, DataError for a file that is none.
    """
    if (settings.tokenizer == "file") != (file is not None):
        raise ConfigError(
            f"tokenizer {settings.tokenizer!r} goes with {file or 'no file'}: a file is given "
            "exactly when the tokenizer is one. Use --tokenizer PATH"
        )
    if file is None:
        return ByteTokenizer(opens_documents=recipe_of(settings.recipe).opens_documents)
    from data_pipeline.tokenizers.loading import load_tokenizer, read_description
    from data_pipeline.tokenizers.pretrained import adopt, is_foreign

    content = read_description(file)
    return adopt(content, str(file)) if is_foreign(content) else load_tokenizer(file)
