"""The matrix products of a function without its other operations: a lower bound of its time.

One run of the function is recorded with sizes and strides of every product. They are repeated on
separate tensors of the same strides, so that each product reads its data from memory again.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

_PRODUCTS = {
    torch.ops.aten.mm.default: 0,
    torch.ops.aten.bmm.default: 0,
    torch.ops.aten.addmm.default: 1,
    torch.ops.aten.baddbmm_.default: 1,
}
"""Operator overload -> position of its left factor among the arguments."""


@dataclass
class _ProductRecorder(TorchDispatchMode):
    pairs: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # In inference mode, operators such as `linear` arrive here before they call their products.
        with self:
            result = func.decompose(*args, **(kwargs or {}))
        if result is not NotImplemented:
            return result
        # This kernel computes two products without calling `bmm`.
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
    """A function that computes the matrix products of `run` and nothing else."""
    run()  # fills caches, which are not part of a normal run
    with _ProductRecorder() as recorder:
        run()
    products = [
        (left, right, left.new_empty(*left.shape[:-1], right.shape[-1]))
        for left, right in recorder.pairs
    ]

    def multiply() -> None:
        for left, right, out in products:
            torch.matmul(left, right, out=out)

    return multiply


def num_operators(run: Callable[[], object]) -> int:
    """Operators that one run calls, those that others call included, as torch's profiler counts."""
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        run()
    return sum(row.count for row in profiler.key_averages() if row.key.startswith("aten::"))


def _like(factor: Tensor) -> Tensor:
    """A random tensor with the shape, strides and dtype of `factor`."""
    copy = torch.empty_strided(factor.shape, factor.stride(), dtype=factor.dtype)
    return copy.normal_()
