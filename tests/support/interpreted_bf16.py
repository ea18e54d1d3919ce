"""Kernels of attention in bf16 in triton's interpreter, which multiplies bf16 as integers."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves, tree_map


@pytest.fixture
def interpreted_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the interpreter, kernels get fp32 copies of bf16, and their results are rounded to it."""
    triton = pytest.importorskip("triton")
    from txl_dist.model.attention import triton_launch

    if triton.knobs.runtime.interpret:
        for name in ("forward", "backward"):
            monkeypatch.setattr(triton_launch, name, _in_fp32(getattr(triton_launch, name)))


def _in_fp32(launch: Callable[..., None]) -> Callable[..., None]:
    def wide(x: Any) -> Any:
        is_narrow = isinstance(x, torch.Tensor) and x.dtype == torch.bfloat16
        return x.float() if is_narrow else x

    def launched(*arguments: Any) -> None:
        copies = tree_map(wide, arguments)
        launch(*copies)
        *_, results = arguments  # what it writes
        *_, computed = copies
        for own, copy in zip(tree_leaves(results), tree_leaves(computed), strict=True):
            if own is not copy:
                own.copy_(copy)

    return launched
