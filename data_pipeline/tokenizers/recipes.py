"""Recipes of the paper's datasets: tokenizers, line tokens, and whether documents are marked.

They follow the published code of the paper (arXiv:1901.02860) with these differences: all symbols,
including the end of a line, are ordered by frequency; vocabularies are counted on train alone; ptb
keeps upper and lower case; line breaks of enwik8 are ordinary bytes; the vocabulary of lm1b is
counted by the benchmark's rule (words that occur at least 3 times) instead of read from a list.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, Protocol

from data_pipeline.tokenizers.byte_char_word import Lines

RecipeName = Literal["wt103", "wt2", "ptb", "lm1b", "enwik8", "text8"]


class TokenizerSettings(Protocol):
    """The settings that choose and train a tokenizer (`PrepareSettings`, which documents them).

    A protocol, because this package must not import the settings of a whole dataset.
    """

    @property
    def tokenizer(self) -> str: ...
    @property
    def recipe(self) -> RecipeName | None: ...
    @property
    def vocab_size(self) -> int | None: ...
    @property
    def end_of_document(self) -> int | None: ...
    @property
    def min_freq(self) -> int | None: ...
    @property
    def train_bytes(self) -> int: ...


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


def recipe_of(name: RecipeName | None) -> Recipe:
    return NO_RECIPE if name is None else RECIPES[name]


def fixed_split(length: int) -> dict[str, tuple[int, int]]:
    """Split -> [start, stop) in a document of `length` tokens: 90 % train, 5 % valid, 5 % test.

    enwik8 (bytes) and text8 (characters) have 100,000,000: the paper's 90M, 5M and 5M. Raises
    ValueError below 20 tokens.
    """
    held_out = length // 20
    if not held_out:
        raise ValueError(f"{length} tokens are too few for three splits, at least 20 are needed")
    test, valid = length - held_out, length - 2 * held_out
    return {"train": (0, valid), "valid": (valid, test), "test": (test, length)}
