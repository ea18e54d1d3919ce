"""Fragment: the slice of a parameter and of its optimizer state that one rank owns.

The engine knows which slices a rank owns, the checkpoint stores them; both use this type.
"""

from dataclasses import dataclass

from torch import Tensor

OPTIMIZER_STATES = ("exp_avg", "exp_avg_sq")
"""AdamW's running averages of the gradient and of its square."""


@dataclass(frozen=True, slots=True)
class Fragment:
    """Elements [start, stop) of a flattened parameter, as 1-D views that may be written to."""

    name: str
    shape: tuple[int, ...]
    """Shape of the whole parameter."""
    start: int
    master: Tensor
    """fp32 weights."""
    states: dict[str, Tensor]
    """Optimizer state by name (OPTIMIZER_STATES)."""

    @property
    def stop(self) -> int:
        return self.start + self.master.numel()
