"""The state of inference: keys and values of the past instead of the inputs they came from.

While weights stand still, a token's keys and values never change, so they are projected once;
projected distances are kept too. The numbers are those of `Memory`, whose past is projected again
for every segment. No gradient passes through here.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from txl_dist.model.encodings import DistanceTerms

# Shapes: B lanes, T segment tokens, M memory tokens, H heads, K d_head

_ROOM = 256
"""Tokens that fit behind the memory before it moves back to the front of its buffer."""


class LayerKVCache:
    """Keys and values of the last M tokens of one layer, and its terms of distance.

    They lie in a longer buffer that fills from the left, so that reading one token does not copy
    the whole past.
    """

    def __init__(self, *, num_heads: int, num_lanes: int, mem_len: int, d_head: int) -> None:
        self._shape = (num_heads, num_lanes, mem_len, d_head)
        self._start = 0
        self._keys_values: tuple[Tensor, Tensor] | None = None
        self._terms: dict[int, DistanceTerms] = {}

    def append(self, k_HBTK: Tensor, v_HBTK: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [H, B, M + T, K] of the past and these; they are the past from now on.

        Raises RuntimeError where gradients are recorded, ValueError for another number of lanes.
        """
        if torch.is_grad_enabled():
            raise RuntimeError("an KVCache keeps no gradients; read under torch.no_grad()")
        if k_HBTK.shape[1] != self._shape[1]:
            raise ValueError(f"{k_HBTK.shape[1]} lanes for a state of {self._shape[1]}")
        mem_len, tgt_len = self._shape[2], k_HBTK.shape[2]
        keys, values = self._room_for(tgt_len, like=k_HBTK)
        past, new = self._start, self._start + mem_len
        keys[:, :, new : new + tgt_len] = k_HBTK
        values[:, :, new : new + tgt_len] = v_HBTK
        self._start += tgt_len
        return keys[:, :, past : new + tgt_len], values[:, :, past : new + tgt_len]

    def terms(self, num_keys: int, make: Callable[[], DistanceTerms]) -> DistanceTerms:
        """What `make` gives for this number of keys, made once."""
        if num_keys not in self._terms:
            self._terms[num_keys] = make().detached()
        return self._terms[num_keys]

    def _room_for(self, tgt_len: int, *, like: Tensor) -> tuple[Tensor, Tensor]:
        mem_len = self._shape[2]
        if self._keys_values is None:
            self._keys_values = self._buffers(tgt_len, like)
        if self._start + mem_len + tgt_len > self._keys_values[0].shape[2]:
            old, self._keys_values = self._keys_values, self._buffers(tgt_len, like)
            for before, after in zip(old, self._keys_values, strict=True):
                after[:, :, :mem_len] = before[:, :, self._start : self._start + mem_len]
            self._start = 0
        return self._keys_values

    def _buffers(self, tgt_len: int, like: Tensor) -> tuple[Tensor, Tensor]:
        num_heads, num_lanes, mem_len, d_head = self._shape
        shape = (num_heads, num_lanes, mem_len + max(tgt_len, _ROOM), d_head)
        return like.new_zeros(shape), like.new_zeros(shape)


@dataclass(frozen=True, slots=True)
class KVCache:
    """Takes the place of `Memory` where no gradient is needed. It is changed by reading."""

    layers: tuple[LayerKVCache, ...]
    mem_len: int

    @classmethod
    def empty(cls, *, n_layer: int, num_lanes: int, mem_len: int, n_head: int, d_head: int) -> Self:
        """No past, to be used with ages that start at 0."""
        shape = {"num_heads": n_head, "num_lanes": num_lanes, "d_head": d_head}
        return cls(tuple(LayerKVCache(mem_len=mem_len, **shape) for _ in range(n_layer)), mem_len)

    def after(self, inputs_BTD: Sequence[Tensor]) -> "KVCache":
        """Itself: reading has already moved it on."""
        return self
