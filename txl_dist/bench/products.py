"""The matrix products of a piece of work, alone: what is left when all else costs nothing.

They are noted while the work runs once, with sizes and strides, and repeated on tensors of their
own, as far apart in memory as in the work. The time of that is the floor under the work's time.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_PRODUCTS = {
    torch.ops.aten.mm.default: 0,
    torch.ops.aten.bmm.default: 0,
    torch.ops.aten.addmm.default: 1,
    torch.ops.aten.baddbmm_.default: 1,
}
"""Overloads, and which of their arguments is the left factor."""


@dataclass
class _Noting(TorchDispatchMode):
    pairs: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default:
            query, key, value = (factor.flatten(0, 1) for factor in args[:3])
            weight = query.new_empty(*query.shape[:2], key.shape[1])
            self.pairs += [
                (_like(query), _like(key).transpose(1, 2)),
                (_like(weight), _like(value)),
            ]
        elif func in _PRODUCTS:
            first = _PRODUCTS[func]
            left, right = (_like(factor) for factor in args[first : first + 2])
            self.pairs.append((left, right))
        return func(*args, **(kwargs or {}))


def products_alone(run: Callable[[], object]) -> Callable[[], object]:
    """Something that computes the products of `run`, and nothing else."""
    run()  # what is done once and kept is not part of the work
    with _Noting() as noting:
        run()
    work = [
        (left, right, left.new_empty(*left.shape[:-1], right.shape[-1]))
        for left, right in noting.pairs
    ]

    def multiply() -> None:
        for left, right, out in work:
            torch.matmul(left, right, out=out)

    return multiply


def _like(factor: Tensor) -> Tensor:
    """Random numbers with the same strides."""
    twin = torch.empty_strided(factor.shape, factor.stride(), dtype=factor.dtype)
    return twin.normal_()
