"""Fragment: the slice of a parameter and of its optimizer state that one rank owns.

The engine knows which slices a rank owns, the checkpoint stores them; both use this type.
"""

from dataclasses import dataclass

from torch import Tensor

AVERAGE = "average"
"""Name of the average of the weights over steps, kept like a state of the optimizer."""


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
    """The optimizer's states of this parameter, by name."""

    @property
    def stop(self) -> int:
        return self.start + self.master.numel()
