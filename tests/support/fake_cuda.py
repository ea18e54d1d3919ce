"""Tensors of a GPU without a GPU and without data, on any build of torch.

Under torch's FakeTensorMode every operation computes shapes, dtypes and devices only. It raises if
tensors are on different devices, and if a result depends on values that the host would have to
read: `nonzero`, a boolean index, `.item()`, `.tolist()`.
"""

import ctypes
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily

from txl_dist.model import vocabulary
from txl_dist.model.encodings import encode_distances

CUDA = torch.device("cuda", 0)


@contextmanager
def fake_cuda() -> Iterator[None]:
    """Inside the context, a tensor that is created on or copied to CUDA is a fake one.

    What the host does with the arrays of a segment it does with real tensors.
    """
    _register_cuda_guard()
    encode_distances.cache_clear()  # fake tensors must not be used outside, nor real ones inside
    try:
        with pytest.MonkeyPatch.context() as patch, FakeTensorMode(allow_non_fake_inputs=True):
            # Else autocast disables itself.
            patch.setattr(torch.cuda.amp.common, "amp_definitely_not_available", lambda: False)
            patch.setattr(torch.cuda, "is_bf16_supported", lambda: True)
            patch.setattr(torch, "from_numpy", _on_real_tensors(torch.from_numpy))
            find_on_host = _on_real_tensors(vocabulary.find_on_host)
            patch.setattr(vocabulary, "find_on_host", find_on_host)
            yield
    finally:
        encode_distances.cache_clear()


def _on_real_tensors(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*arguments: Any) -> Any:
        with unset_fake_temporarily():
            return function(*arguments)

    return call


def to_fake_cuda(model: nn.Module) -> None:
    """Replace the parameters of a model by fake ones; call it inside `fake_cuda`."""
    # Not `model.to`: it cannot exchange a parameter for a tensor of another class.
    fakes = {
        name: nn.Parameter(torch.empty(p.shape, dtype=p.dtype, device=CUDA))
        for name, p in model.named_parameters()
    }
    model.load_state_dict(fakes, assign=True)


@torch.no_grad()
def backward(loss: Tensor) -> dict[Tensor, Tensor]:
    """The gradients of all leaves: autograd's algorithm, on the nodes of autograd's graph.

    torch's own engine asks the GPU for its streams, so it needs one.
    """
    assert loss.grad_fn is not None
    gradients: dict[Any, dict[int, Tensor]] = {loss.grad_fn: {0: torch.ones_like(loss)}}
    leaves: dict[Tensor, Tensor] = {}
    missing = _num_uses(loss.grad_fn)
    ready = [loss.grad_fn]
    while ready:
        node = ready.pop()
        outputs = gradients.pop(node, {})
        if hasattr(node, "variable"):  # a leaf
            leaves[node.variable] = outputs[0]
            continue
        edges = [edge for edge in node.next_functions if edge[0] is not None]
        results = _apply(node, outputs) if outputs else [None] * len(edges)
        for (child, index), gradient in zip(edges, results, strict=True):
            if gradient is not None:
                _add(gradients.setdefault(child, {}), index, gradient, child)
            missing[child] -= 1
            if not missing[child]:
                ready.append(child)
    return leaves


def _apply(node: Any, outputs: dict[int, Tensor]) -> list[Tensor | None]:
    """The gradients of the inputs that have edges from those of a node's outputs."""
    arguments = [outputs.get(index) for index in range(len(node._input_metadata))]
    if hasattr(node, "apply"):  # an autograd.Function, which gets zeros instead of None
        arguments = [
            torch.zeros(tuple(of.shape), dtype=of.dtype, device=of.device) if x is None else x
            for x, of in zip(arguments, node._input_metadata, strict=True)
        ]
        results = node.apply(*arguments)
        has_edge = node.needs_input_grad  # arguments that are no tensors have no place among edges
    else:
        results = node(*arguments)
        has_edge = [child is not None for child, _ in node.next_functions]
    results = results if isinstance(results, tuple) else (results,)
    return [result for result, is_wanted in zip(results, has_edge, strict=True) if is_wanted]


def _add(sums: dict[int, Tensor], index: int, gradient: Tensor, node: Any) -> None:
    """Add a gradient to that of an output of `node`, in its shape and dtype."""
    of = node._input_metadata[index]
    assert gradient.device == of.device, (node.name(), gradient.device, of.device)
    gradient = gradient.sum_to_size(tuple(of.shape)).to(of.dtype)
    sums[index] = sums[index] + gradient if index in sums else gradient


def _num_uses(root: Any) -> Counter[Any]:
    uses: Counter[Any] = Counter()
    pending, known = [root], {root}
    while pending:
        for child, _ in pending.pop().next_functions:
            if child is None:
                continue
            uses[child] += 1
            if child not in known:
                known.add(child)
                pending.append(child)
    return uses


def _register_cuda_guard() -> None:
    """Let a torch that is built without CUDA record tensors of CUDA for autograd.

    For every tensor, autograd asks the guard of its device type for the current stream, and a build
    without CUDA has none for it. That of the type "meta" does nothing and is in every build. (A
    build with CUDA but without a GPU needs no help: FakeTensorMode replaces its guard.)
    """
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    kind = torch._C._autograd.DeviceType
    symbol = "_ZN3c104impl26device_guard_impl_registryE"
    registry = (ctypes.c_void_p * (int(kind.Meta) + 1)).in_dll(library, symbol)
    if registry[int(kind.CUDA)] is None:
        registry[int(kind.CUDA)] = registry[int(kind.Meta)]
