"""What a user chooses about generated texts, and the defaults of Python and of `txl generate`.

Imports no torch, so that the command line refuses wrong options before it is imported.
"""

from dataclasses import dataclass
from numbers import Integral, Real

from txl_dist.generation.text import StopStrings

DEFAULT_BATCH_SIZE = 8
"""Prompts at a time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """Sampling options. Temperature 0 is greedy: always the most likely token.

    The defaults sample from the distribution of the model as it is.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.temperature, Real) or not self.temperature >= 0:
            raise ValueError(f"temperature={self.temperature!r} must be a number of at least 0")
        if self.top_k is not None and (not isinstance(self.top_k, Integral) or self.top_k < 1):
            raise ValueError(f"top_k={self.top_k!r} must be a whole number of at least 1")
        if self.top_p is not None and (not isinstance(self.top_p, Real) or not 0 < self.top_p <= 1):
            raise ValueError(f"top_p={self.top_p!r} must be a number in (0, 1]")


@dataclass(frozen=True, kw_only=True, slots=True)
class TextLimits:
    """Where a generated text ends, if not at the end of its document."""

    max_tokens: int = 256
    stop: tuple[str, ...] = ()
    """Stop strings: the text ends before the first of them."""
    stop_tokens: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        if not isinstance(self.max_tokens, Integral) or self.max_tokens < 1:
            raise ValueError(f"max_tokens={self.max_tokens!r} must be a whole number of at least 1")
        if isinstance(self.stop, str):
            raise ValueError(f"stop={self.stop!r} is one text; give a tuple of texts")
        StopStrings(self.stop)
