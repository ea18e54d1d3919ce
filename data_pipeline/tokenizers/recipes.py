"""The paper's corpora as data: which tokens, what a line becomes, whether documents are opened.

Follows the conventions of the paper's published code, with these differences: every symbol, the
end of a line too, has its place by frequency; vocabularies are counted over train alone; case is
kept in ptb as well; line breaks of enwik8 are bytes like any other.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from data_pipeline.tokenizers.word import Lines

RecipeName = Literal["wt103", "wt2", "ptb", "lm1b", "enwik8", "text8"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """How one corpus becomes tokens."""

    tokenizers: tuple[str, ...]
    """The kinds it is for; the first is the paper's."""
    lines: Lines = "end"
    """For words: the token that ends a line, or opens and ends it."""
    opens_documents: bool = False
    fixed_split: bool = False
    """Whether the corpus is one document whose parts are the splits."""


NO_RECIPE = Recipe(tokenizers=("byte", "char", "word", "bpe", "file"), opens_documents=True)
_LINES = Recipe(tokenizers=("word",))
RECIPES: Mapping[RecipeName, Recipe] = MappingProxyType(
    {
        "wt103": _LINES,
        "wt2": _LINES,
        "ptb": _LINES,
        "lm1b": Recipe(tokenizers=("word",), lines="both"),
        "enwik8": Recipe(tokenizers=("byte", "char"), fixed_split=True),
        "text8": Recipe(tokenizers=("char", "byte"), fixed_split=True),
    }
)


def recipe_of(name: RecipeName | None) -> Recipe:
    return NO_RECIPE if name is None else RECIPES[name]


def fixed_split(length: int) -> dict[str, tuple[int, int]]:
    """Split -> [start, stop) of a corpus of `length` tokens: the last 5% test, 5% before valid.

    For the 100,000,000 bytes of enwik8 and characters of text8 that is the paper's 90M, 5M and 5M.
    Raises ValueError below 20 tokens.
    """
    held_out = length // 20
    if not held_out:
        raise ValueError(f"{length} tokens are too few for three splits, at least 20 are needed")
    test, valid = length - held_out, length - 2 * held_out
    return {"train": (0, valid), "valid": (valid, test), "test": (test, length)}
