"""RankRange: the value of `--ranks`, a fixed number of ranks or the range of an elastic run."""

import re
from dataclasses import dataclass
from typing import Self

from txl_dist.errors import ConfigError

_FORM = re.compile(r"([1-9]\d{0,5})(?::([1-9]\d{0,5}))?", re.ASCII)


@dataclass(frozen=True, slots=True)
class RankRange:
    """From `minimum` to `maximum` ranks, both included."""

    minimum: int
    maximum: int

    @classmethod
    def parse(cls, text: str) -> Self:
        """From `N` or `A:B`. Raises ConfigError."""
        match = _FORM.fullmatch(text.strip())
        low, high = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if low > high:
            raise ConfigError(
                f"--ranks {text}: expected a number such as 4, or a range such as 2:8 (at least 2 "
                "ranks, and up to 8 while the cluster has room for them)"
            )
        return cls(low, high)

    @property
    def is_elastic(self) -> bool:
        """Whether the number of ranks may change during a run."""
        return self.minimum < self.maximum

    def __str__(self) -> str:
        return f"{self.minimum}:{self.maximum}" if self.is_elastic else str(self.maximum)
