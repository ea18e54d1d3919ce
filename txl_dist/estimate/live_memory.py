"""Counts the bytes of all tensors that are alive, operation by operation.

The count is of tensors, not of the process: neither the allocator's rounding nor libraries are in
it. It works on real tensors and on torch's fake tensors, which have shapes but no data.
"""

import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


class LiveMemory(TorchDispatchMode):
    """While the context is open, counts the storages of the tensors that operations return.

    A storage that several tensors share counts once. A tensor from before the context is not
    counted, until an operation returns a view of it: create all tensors inside.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live_bytes = 0
        self.peak_bytes = 0
        self.num_results = 0
        """Storages that operations have created: about the number of kernels that ran."""
        self._bytes_of: dict[int, int] = {}
        self.on_change: Callable[[], None] = lambda: None
        """Called after every storage that is created."""

    def reset_peak(self) -> None:
        """Let `peak_bytes` start again from what is alive now."""
        self.peak_bytes = self.live_bytes

    def __torch_dispatch__(
        self,
        operation: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = self.compute(operation, args, dict(kwargs or {}))
        for tensor in tree_iter(result):
            if isinstance(tensor, Tensor) and tensor.device.type != "meta":
                self._count(tensor.untyped_storage())
        return result

    def compute(self, operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one operation; a subclass may replace some."""
        return operation(*args, **kwargs)

    def _count(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._bytes_of:
            return
        self._bytes_of[key] = storage.nbytes()
        self.num_results += 1
        self.live_bytes += self._bytes_of[key]
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        weakref.finalize(storage, self._forget, key)
        self.on_change()

    def _forget(self, key: int) -> None:
        self.live_bytes -= self._bytes_of.pop(key)
