"""What a user chooses about generated texts.

Imports no torch, so that the command line refuses wrong options before it is imported.
"""

from dataclasses import dataclass

from txl_dist.generation.text import StopStrings


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """Sampling options. Temperature 0 is greedy: always the most likely token."""

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None

    def __post_init__(self) -> None:
        if not self.temperature >= 0:
            raise ValueError(f"temperature={self.temperature} must not be negative")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k={self.top_k} must be at least 1")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p} must be in (0, 1]")


@dataclass(frozen=True, kw_only=True, slots=True)
class TextLimits:
    """Where a generated text ends, if not at the end of its document."""

    max_tokens: int
    stop: tuple[str, ...] = ()
    """Stop strings: the text ends before the first of them."""
    stop_tokens: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens={self.max_tokens} must be at least 1")
        StopStrings(self.stop)
