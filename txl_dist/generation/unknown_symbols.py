"""Prompts and stop strings with symbols that the model's vocabulary does not have.

Tokenizers of words and characters replace them by an unknown token, `<unk>`: the model then reads
another text than the one that was given.
"""

import logging
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from data_pipeline.tokenizers import Tokenizer

log = logging.getLogger(__name__)

_MOST_SHOWN = 10


def describe_unknown(unknown: Counter[str]) -> str:
    """How many there are, and which: the most frequent ones."""
    shown = [
        repr(symbol[:40]) + (f" ({count:,} times)" if count > 1 else "")
        for symbol, count in unknown.most_common(_MOST_SHOWN)
    ]
    if len(unknown) > _MOST_SHOWN:
        shown.append(f"{len(unknown) - _MOST_SHOWN:,} others")
    number = unknown.total()
    return (
        f"{number:,} {'symbol is' if number == 1 else 'symbols are'} not in the vocabulary of the "
        f"model: {', '.join(shown)}"
    )


def unknown_in_prompt(tokenizer: "Tokenizer", prompt: str | Sequence[int]) -> Counter[str]:
    """How often each unknown symbol occurs in a prompt; a prompt of ids has none."""
    return tokenizer.unknown_symbols(prompt) if isinstance(prompt, str) else Counter()


def warn_of_prompt(tokenizer: "Tokenizer", prompt: str | Sequence[int]) -> None:
    """Log the symbols of a prompt that are unknown, if there are any."""
    if unknown := unknown_in_prompt(tokenizer, prompt):
        log.warning(
            "prompt %r: %s. The model reads the unknown token instead",
            prompt[:40],
            describe_unknown(unknown),
        )


def warn_of_stop_string(tokenizer: "Tokenizer", stop: str) -> None:
    """Log the symbols of a stop string that are unknown, if there are any."""
    if unknown := tokenizer.unknown_symbols(stop):
        log.warning(
            "stop string %r: %s. It can end a text only where other symbols contain it",
            stop[:40],
            describe_unknown(unknown),
        )
