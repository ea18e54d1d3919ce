"""Statistics of weights, gradients and updates per layer, at `training.statistics_interval_steps`.

    weights/GROUP/norm            L2 norm of the weights after the update
    weights/GROUP/gradient_norm   L2 norm of the gradient, summed over ranks, before clipping
    weights/GROUP/update_ratio    L2 norm of the update / L2 norm of the weights before it

GROUP is `layer_N` for the weights of layer N, otherwise the name of the module: `table`, `softmax`
or a shared bias. Each rank sums squares over the slices that it owns (`Engine.fragments`), at any
ZeRO stage, and one all-reduce adds the sums of all ranks. In other steps there is no cost; in these
the slices are copied once, to compare them with the updated ones.
"""

import math

import torch
from torch import Tensor

from txl_dist.runtime.world import World
from txl_dist.training.engine import Engine


class WeightStatistics:
    """Call `before_update` after the backward of a step, and `after_update` after its update."""

    def __init__(self, engine: Engine, world: World, *, interval_steps: int) -> None:
        self._engine, self._world, self._interval_steps = engine, world, interval_steps
        self._groups = sorted({group_of(name) for name in engine.shapes})
        self._before: list[Tensor] = []
        self._gradient_squares: list[tuple[str, Tensor]] = []

    def is_due(self, step: int) -> bool:
        """Whether step number `step` has statistics; the same on all ranks."""
        return step % self._interval_steps == 0

    def before_update(self) -> None:
        """Copy this rank's slices of the weights, and sum the squares of its gradients."""
        self._before = [fragment.master.clone() for fragment in self._engine.fragments()]
        self._gradient_squares = [
            (name, _square(gradient)) for name, gradient in self._engine.gradients()
        ]

    def after_update(self) -> dict[str, float]:
        """The statistics of this step, equal on all ranks. Collective."""
        squares: dict[str, list[tuple[str, Tensor]]] = {
            "gradient": self._gradient_squares,
            "before": [],
            "update": [],
            "weight": [],
        }
        for fragment, before in zip(self._engine.fragments(), self._before, strict=True):
            squares["before"].append((fragment.name, _square(before)))
            squares["update"].append((fragment.name, _square(fragment.master - before)))
            squares["weight"].append((fragment.name, _square(fragment.master)))
        self._before, self._gradient_squares = [], []
        sums = torch.stack([self._sum_by_group(values) for values in squares.values()])
        norms = self._world.all_reduce_sum(sums).sqrt().tolist()
        return {
            f"weights/{group}/{name}": value
            for group, gradient, before, update, weight in zip(self._groups, *norms, strict=True)
            for name, value in (
                ("norm", weight),
                ("gradient_norm", gradient),
                # Weights that start at 0, such as biases of a group of their own, have no ratio.
                ("update_ratio", update / before if before else math.nan),
            )
            if math.isfinite(value)
        }

    def _sum_by_group(self, squares: list[tuple[str, Tensor]]) -> Tensor:
        """Sums of squares [number of groups], float64 on the processor."""
        sums = torch.zeros(len(self._groups), dtype=torch.float64)
        if squares:  # a rank may own no slice
            index = torch.tensor([self._groups.index(group_of(name)) for name, _ in squares])
            sums.index_add_(0, index, torch.stack([square for _, square in squares]).cpu())
        return sums


def group_of(parameter: str) -> str:
    """`layers.3.attention.query.weight` -> `layer_3`; `softmax.bias.0` -> `softmax`."""
    first, *others = parameter.split(".")
    return f"layer_{others[0]}" if first == "layers" else first


def _square(x: Tensor) -> Tensor:
    """Sum of squares in float64, so that it hardly depends on how the ranks cut the weights."""
    return torch.linalg.vector_norm(x, dtype=torch.float64) ** 2
