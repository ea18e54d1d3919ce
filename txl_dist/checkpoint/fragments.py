"""Fragment: the slice of a parameter and its optimizer state that one rank owns.

The currency between the engine, which knows where slices are, and the checkpoint, which stores
them.
"""

from dataclasses import dataclass

from torch import Tensor

OPTIMIZER_STATES = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True, slots=True)
class Fragment:
    """Elements [start, stop) of a flattened parameter, as 1-D views to copy from or into."""

    name: str
    shape: tuple[int, ...]
    """Of the whole parameter."""
    start: int
    master: Tensor
    """fp32 weights."""
    states: dict[str, Tensor]
    """Optimizer state by name (OPTIMIZER_STATES)."""

    @property
    def stop(self) -> int:
        return self.start + self.master.numel()
