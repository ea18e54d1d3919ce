"""Parameters and activations of a model, from its own code run on tensors without data.

`dry_run` builds the real TransformerXL on torch's fake tensors, which have shapes, dtypes and
lifetimes but no data, and runs one forward and backward of a micro-batch. So the result includes
every option that changes what autograd stores: encoding, implementation of attention, dropout,
autocast, activation checkpointing. A model of any size takes seconds and no RAM.

Dropout masks count like those of a real step. The rows of the softmax's clusters after the first
depend on the text; they are assumed to follow Zipf's law (`tail_rows`).
"""

import math
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Literal
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from txl_dist.config.run_config import RunConfig
from txl_dist.estimate.rank_bytes import ActivationPeaks, ModelNeeds, Parameter, ZeroSettings
from txl_dist.model import attention, devices
from txl_dist.model.attention import choose_implementation
from txl_dist.model.config import ModelConfig
from txl_dist.model.dropout import Dropout, KeepBits
from txl_dist.model.encodings import encode_distances
from txl_dist.model.transformer_xl import TransformerXL
from txl_dist.runtime.device import TORCH_DTYPE
from txl_dist.training.engine.optimizers import (
    OPTIMIZERS,
    freeze,
    parameter_groups,
    states_by_name,
)

# Shapes: B lanes, T segment tokens, H heads, S keys

Device = Literal["cuda", "cpu"]


class LiveBytes(TorchDispatchMode):
    """While the context is open, counts the storages of the tensors that operations return.

    The count is of tensors, not of the process: neither the allocator's rounding nor libraries are
    in it. It works on real tensors and on torch's fake tensors, which have shapes but no data.

    A storage that several tensors share counts once. A tensor from before the context is not
    counted, until an operation returns a view of it: create all tensors inside.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live_bytes = 0
        self._bytes_of: dict[int, int] = {}
        self.on_change: Callable[[], None] = lambda: None
        """Called after every storage that is created."""

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
        self.live_bytes += self._bytes_of[key]
        weakref.finalize(storage, self._forget, key)
        self.on_change()

    def _forget(self, key: int) -> None:
        self.live_bytes -= self._bytes_of.pop(key)


def tail_rows(config: ModelConfig, *, num_tokens: int) -> list[int]:
    """Targets in each cluster of the adaptive softmax after the first, of `num_tokens`.

    By Zipf's law: the n-th most frequent token has a frequency proportional to 1 / n.
    """
    frequency = 1 / np.arange(1, config.num_ids + 1)
    shares = [frequency[start:stop].sum() for start, stop in config.cluster_bounds]
    return [round(num_tokens * share / sum(shares)) for share in shares[1:]]


def dry_run(config: RunConfig, *, micro_batch_rows: int, device: Device) -> ModelNeeds:
    """Run a micro-batch of `config`, whose `model.vocab_size` must be set."""
    # Its cache must not return real tensors here, nor fake tensors later.
    encode_distances.cache_clear()
    try:
        with FakeTensorMode(), _paths_of(device):
            return _run(config, device, micro_batch_rows)
    finally:
        encode_distances.cache_clear()


def _run(config: RunConfig, device: Device, rows: int) -> ModelNeeds:
    # With the implementation of attention that training takes on the device.
    with_dropout = config.model.dropatt > 0
    chosen = choose_implementation(config.model, torch.device(device), with_dropout=with_dropout)
    model_config = replace(config.model, attention=chosen.name)
    shape_BT, dtype = (rows, config.data.tgt_len), TORCH_DTYPE[config.precision]
    segments = config.training.backprop_segments
    with _MicroBatchBytes(model_config, rows * config.segment_len, segments) as live:
        model = TransformerXL(
            model_config, recompute_layers=config.training.activation_checkpointing
        )
        freeze(model, config.optimizer)
        memory = model.empty_memory(rows, dtype=TORCH_DTYPE[config.training.memory_dtype])
        token_BT = torch.zeros(shape_BT, dtype=torch.int64)
        age_BT = torch.zeros(shape_BT, dtype=torch.int32)
        # Stages 1 to 3 are also estimated for a run at stage 0.
        zero = ZeroSettings.of(
            config.deepspeed,
            num_ranks=1,
            on_gpu=device == "cuda",
            stage=max(1, config.deepspeed.zero_stage),
        )
        live.follow(model, bucket_size=zero.reduce_bucket_size)
        with torch.autocast("cpu", dtype, enabled=dtype is not torch.float32):
            nats_BT, next_memory = model(token_BT, token_BT, age_BT, memory, _Masks(), segments)
        # Outside: the weights that autocast has cast are released before backward.
        live.peaks.after_forward = live.live_bytes - live.start_bytes
        nats_BT.sum().backward()
        del next_memory
    groups = parameter_groups(model, config.optimizer)
    states = states_by_name(model, groups)
    return ModelNeeds(
        parameters=tuple(
            Parameter(
                name=name,
                num_elements=parameter.numel(),
                num_states=len(states[name]),
                is_trained=parameter.requires_grad,
            )
            for name, parameter in model.named_parameters()
        ),
        groups=tuple(tuple(parameter.numel() for parameter in each["params"]) for each in groups),
        needs_whole_matrices=OPTIMIZERS[config.optimizer.name].needs_whole_matrices,
        has_foreach_updates=OPTIMIZERS[config.optimizer.name].updates_together,
        activations=live.peaks,
    )


class _MicroBatchBytes(LiveBytes):
    """Follows the bytes of a model through forward and backward.

    `nonzero`, whose result has no shape without data, returns the expected number of rows.
    """

    def __init__(self, config: ModelConfig, num_tokens: int, num_segments: int) -> None:
        super().__init__()
        tails = tail_rows(config, num_tokens=num_tokens)
        # The order of the calls: the tables of the embedding, then the tails of the softmax. For
        # GPUs, tables do not select rows.
        selects = config.div_val > 1 and not devices.host_waits_for(torch.device("cpu"))
        tables = [num_tokens - sum(tails), *tails] if selects else []
        self._rows = iter([*tables, *tails] * num_segments)
        self.peaks = ActivationPeaks()
        self.start_bytes, self._gradient_bytes, self._num_complete = 0, 0, 0

    def follow(self, model: TransformerXL, *, bucket_size: int) -> None:
        self.start_bytes, self._bucket_size = self.live_bytes, bucket_size
        self.on_change = self._update
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._gradient_is_complete)

    def compute(self, operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if operation is torch.ops.aten.nonzero.default:
            return torch.empty(next(self._rows), 1, dtype=torch.int64)
        return super().compute(operation, args, kwargs)

    def _update(self) -> None:
        live_bytes, peaks = self.live_bytes - self.start_bytes, self.peaks
        if self._gradient_bytes == 0:
            peaks.before_gradients = max(peaks.before_gradients, live_bytes)
            return
        peaks.with_gradients = max(peaks.with_gradients, live_bytes)
        without = live_bytes - self._gradient_bytes
        peaks.without_gradients = max(peaks.without_gradients, without)
        if self._num_complete > self._bucket_size:
            peaks.after_first_bucket = max(peaks.after_first_bucket, without)

    def _gradient_is_complete(self, parameter: Tensor) -> None:
        assert parameter.grad is not None
        self._num_complete += parameter.numel()
        # Some gradients are parts of larger tensors, which stay alive with them.
        self._gradient_bytes += parameter.grad.untyped_storage().nbytes()


class _Masks:
    """Dropout masks without values (`DropoutMasks`)."""

    def of_segment(self, number: int, num_segments: int) -> "_Masks":
        return self

    def scale(self, x: Tensor, dropout: Dropout) -> Tensor:
        return torch.empty_like(x)

    def keep_bits(self, x: Tensor, dropout: Dropout) -> KeepBits:
        num_words = math.ceil(x.shape[-1] / 16)
        return KeepBits(torch.empty(*x.shape[:-1], num_words, dtype=torch.int16), factor=1.0)


# --- differences between devices ----------------------------------------------------------------


@contextmanager
def _paths_of(device: Device) -> Iterator[None]:
    """For GPUs, make the fake tensors on this CPU take the code paths of GPUs."""
    if device == "cpu":
        yield
        return
    # Not a TorchFunctionMode: it is not active when backward computes layers again.
    with (
        patch.object(attention, "has_triton", lambda device: True),
        patch.object(devices, "host_waits_for", lambda device: True),
    ):
        yield
