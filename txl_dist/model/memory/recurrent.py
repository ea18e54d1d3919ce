"""The paper's memory: the inputs of each layer for the previous `mem_len` tokens, without gradient.

    m_l = the last M rows of [m_l ; h_l]        h_l [T, D]: the input of layer l in a segment

Its shape is constant. At the start of a stream it holds zeros, which no query sees, because `age`
limits how far back a token may look (visibility.py). It may be stored in another dtype than the
model's (bf16 takes half the bytes). Each layer reads it in the model's dtype.

In inference weights are constant, so the keys and values of a token do not change, and are
projected once: a `KVCache` holds them, and projected distances, in place of the layers' inputs. The
numbers equal those of a `RecurrentMemory`. Gradients are not supported.

Source: segment-level recurrence, Dai et al. 2019, arXiv:1901.02860, section 3.2.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from txl_dist.model.config import ModelConfig
from txl_dist.model.encodings import DistanceTerms
from txl_dist.model.memory import MemoryKind, SequenceState

# Shapes: B lanes, T segment tokens, M memory tokens, D d_model, H heads, K d_head


class Recurrent(MemoryKind):
    """`model.memory: recurrent`. In inference its keys and values are cached."""

    def receptive_tokens(self, tgt_len: int) -> int:
        """Each layer sees its memory before its segment, so whole segments per layer.

        The dependency length O(N * L) of the paper, section 3.2.
        """
        return tgt_len * sum(-(-mem_len // tgt_len) for mem_len in self.config.mem_lens)

    def empty(
        self,
        num_lanes: int,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> "RecurrentMemory":
        shapes = ((num_lanes, mem_len, self.config.d_model) for mem_len in self.config.mem_lens)
        return RecurrentMemory(tuple(torch.zeros(s, dtype=dtype, device=device) for s in shapes))

    def for_inference(
        self, num_lanes: int, *, max_tokens: int | None, dtype: torch.dtype, device: torch.device
    ) -> "KVCache":
        return KVCache.empty(self.config, num_lanes, max_tokens=max_tokens)

    def fits(self, saved: ModelConfig) -> bool:
        """The same kind, and at least as many tokens in every layer."""
        lens = zip(saved.mem_lens, self.config.mem_lens, strict=True)
        return super().fits(saved) and all(old >= new for old, new in lens)


@dataclass(frozen=True)
class RecurrentMemory(SequenceState):
    """One tensor [B, M, D] per layer: `layers[l]` holds inputs of layer l."""

    layers: tuple[Tensor, ...]

    @property
    def num_pasts(self) -> tuple[int, ...]:
        """Tokens per lane and layer, including the zeros before the start of a stream."""
        return tuple(layer.shape[1] for layer in self.layers)

    @property
    def residual_dtype(self) -> torch.dtype:
        return self.layers[0].dtype

    def past(self, number: int, x_BTD: Tensor) -> Tensor:
        """The memory of a layer with the dtype of its input; itself if it has that."""
        return self.layers[number].to(x_BTD.dtype)

    def after(self, hidden_BTD: Sequence[Tensor], age_BT: Tensor) -> "RecurrentMemory":
        """The last M tokens of [memory ; the layer's inputs], in this memory's dtype."""
        pairs = zip(self.layers, hidden_BTD[:-1], strict=True)
        return RecurrentMemory(tuple(_newest(*pair) for pair in pairs))

    def cleared(self, lanes_B: Tensor) -> "RecurrentMemory":
        """With zeros in the lanes that the mask names."""
        mask_B11 = lanes_B[:, None, None]
        cleared = (layer.masked_fill(mask_B11.to(layer.device), 0) for layer in self.layers)
        return RecurrentMemory(tuple(cleared))

    def tensors(self) -> dict[str, Tensor]:
        return {f"layer-{number}": layer for number, layer in enumerate(self.layers)}

    def load_row(self, lane: int, saved: Mapping[str, Tensor]) -> None:
        """If `saved` has more tokens, the newest ones."""
        lens = {name: len(row) for name, row in self.row(lane).items()}
        newest = {name: row[len(row) - lens.get(name, 0) :] for name, row in saved.items()}
        super().load_row(lane, newest)

    def visible_share(self, ages: Sequence[int]) -> tuple[int, int]:
        """In tokens: a first token of age a may attend to a earlier ones, if they are kept."""
        return sum(min(age, self.num_past) for age in ages), self.num_past * len(ages)

    def check(self, config: ModelConfig, num_lanes: int) -> None:
        """Memories of other lengths than in training are allowed, as in evaluation."""
        require_recurrent(config, len(self.layers))
        shapes = [[*layer.shape] for layer in self.layers]
        if shapes != [[num_lanes, num_past, config.d_model] for num_past in self.num_pasts]:
            raise ValueError(
                f"the memory has layers of the shapes {shapes}: expected [{num_lanes}, mem_len, "
                f"{config.d_model}], for the lanes of input_BT; streams start with "
                f"model.empty_memory({num_lanes})"
            )
        if config.same_length and 0 in self.num_pasts:
            raise ValueError("same_length=true needs a memory of at least one token in each layer")


def _newest(old_BMD: Tensor, new_BTD: Tensor) -> Tensor:
    """The last M tokens of both, in new storage with the dtype of `old_BMD`."""
    mem_len, tgt_len = old_BMD.shape[1], new_BTD.shape[1]
    num_new = min(mem_len, tgt_len)
    # Copied even if all of it is new: a view would keep the activations of the whole segment.
    next_BMD = torch.empty_like(old_BMD)
    next_BMD[:, : mem_len - num_new].copy_(old_BMD[:, num_new:])
    next_BMD[:, mem_len - num_new :].copy_(new_BTD[:, tgt_len - num_new :])
    return next_BMD


_SPARE_TOKENS = 256
"""Least buffer length beyond the memory: tokens that can be read before the memory is moved."""
_SPARE_SHARE = 4
"""The spare part is mem_len / 4 for a long memory: a token costs at most 4 moved tokens."""


class LayerKVCache:
    """Keys and values of the last M tokens of one layer, and the layer's distance terms.

    New tokens are written to the right of the memory in a longer buffer; if that is full, the
    memory is moved to the start of another one.
    """

    def __init__(self, num_heads: int, num_lanes: int, mem_len: int, d_head: int) -> None:
        self._shape = (num_heads, num_lanes, mem_len, d_head)
        self._start = 0
        self._keys_values: tuple[Tensor, Tensor] | None = None
        # By number of keys: M + T takes few values, such as those of prompt and single tokens.
        self._terms: dict[int, DistanceTerms] = {}

    @property
    def mem_len(self) -> int:
        """M, including the zeros before the start of a stream."""
        return self._shape[2]

    def memory(self) -> tuple[Tensor, ...]:
        """Views of the keys and the values of the memory [H, B, M, K]; () before any segment."""
        return tuple(x.narrow(2, self._start, self.mem_len) for x in self._keys_values or ())

    def clear(self, lanes_B: Tensor) -> None:
        """Set the memory of the lanes that the mask names to zeros. In place."""
        for memory_HBMK in self.memory():
            memory_HBMK.masked_fill_(lanes_B[:, None, None].to(memory_HBMK.device), 0)

    def append(self, k_HBTK: Tensor, v_HBTK: Tensor) -> tuple[Tensor, Tensor]:
        """Store keys and values of T tokens; return those of memory and segment, [H, B, M + T, K].

        Raises RuntimeError with gradients enabled, ValueError for another number of lanes.
        """
        # Without these checks gradients would be missing, and a single lane would be broadcast.
        if torch.is_grad_enabled():
            raise RuntimeError("a KVCache has no gradients; run the model under torch.no_grad()")
        if k_HBTK.shape[1] != self._shape[1]:
            raise ValueError(f"{k_HBTK.shape[1]} lanes for a KVCache of {self._shape[1]}")
        mem_len, tgt_len = self._shape[2], k_HBTK.shape[2]
        old = buffers = self._keys_values
        if buffers is None or self._start + mem_len + tgt_len > buffers[0].shape[2]:
            buffers = self._keys_values = self._new_buffers(tgt_len, k_HBTK)
            for before, after in zip(old or (), buffers, strict=False):
                after[:, :, :mem_len] = before[:, :, self._start : self._start + mem_len]
            self._start = 0
        keys, values = buffers
        start, new, num_keys = self._start, self._start + mem_len, mem_len + tgt_len
        # `narrow` takes half the time of a slice, which matters for a single token.
        keys.narrow(2, new, tgt_len).copy_(k_HBTK)
        values.narrow(2, new, tgt_len).copy_(v_HBTK)
        self._start += tgt_len
        return keys.narrow(2, start, num_keys), values.narrow(2, start, num_keys)

    def select(self, lanes: Sequence[int], num_removed: Sequence[int]) -> None:
        """See `SequenceState.select`. In place."""
        num_heads, _, mem_len, d_head = self._shape
        if max(num_removed, default=0) > self._start and self._keys_values is not None:
            raise ValueError("a KVCache has only the tokens of the last segment to remove")
        self._shape = (num_heads, len(lanes), mem_len, d_head)
        if self._keys_values is None:
            return
        old = self._keys_values
        self._keys_values = self._new_buffers(0, old[0])
        for before, after in zip(old, self._keys_values, strict=True):
            for lane, (source, removed) in enumerate(zip(lanes, num_removed, strict=True)):
                # The tokens before the memory are still in the buffer: at least as many as the last
                # segment had.
                start = self._start - removed
                after[:, lane, :mem_len] = before[:, source, start : start + mem_len]
        self._start = 0

    def terms(self, num_keys: int, make: Callable[[], DistanceTerms]) -> DistanceTerms:
        """The terms for this number of keys; `make` computes them the first time."""
        if num_keys not in self._terms:
            terms = make()
            if terms.distance_HSK is not None:  # contiguous, because every token reads it
                terms = replace(terms, distance_HSK=terms.distance_HSK.contiguous())
            self._terms[num_keys] = terms
        return self._terms[num_keys]

    def _new_buffers(self, tgt_len: int, like: Tensor) -> tuple[Tensor, Tensor]:
        num_heads, num_lanes, mem_len, d_head = self._shape
        spare = max(tgt_len, _SPARE_TOKENS, mem_len // _SPARE_SHARE)
        shape = (num_heads, num_lanes, mem_len + spare, d_head)
        return like.new_zeros(shape), like.new_zeros(shape)


@dataclass(frozen=True)
class KVCache(SequenceState):
    """Replaces a `RecurrentMemory` where no gradient is needed. Segments change it in place."""

    layers: tuple[LayerKVCache, ...]
    is_trainable = False

    @classmethod
    def empty(cls, config: ModelConfig, num_lanes: int, *, max_tokens: int | None = None) -> Self:
        """The cache at the start of `num_lanes` streams; ages must start at 0.

        `max_tokens`: no segment has more tokens before it than this, so no more are kept.
        """
        mem_lens = config.mem_lens
        # Under same_length, mem_len also limits the attention span.
        if max_tokens is not None and not config.same_length:
            mem_lens = tuple(min(mem_len, max(0, max_tokens)) for mem_len in mem_lens)
        return cls.of_lengths(config, num_lanes, mem_lens)

    @classmethod
    def of_lengths(cls, config: ModelConfig, num_lanes: int, mem_lens: Sequence[int]) -> Self:
        """An empty cache whose layers keep these numbers of tokens."""
        heads, width = config.num_kv_heads, config.d_head
        return cls(tuple(LayerKVCache(heads, num_lanes, mem_len, width) for mem_len in mem_lens))

    @property
    def num_pasts(self) -> tuple[int, ...]:
        return tuple(layer.mem_len for layer in self.layers)

    def past(self, number: int, x_BTD: Tensor) -> LayerKVCache:
        return self.layers[number]

    def after(self, hidden_BTD: Sequence[Tensor], age_BT: Tensor) -> "KVCache":
        """Itself: `LayerKVCache.append` has already stored the segment."""
        return self

    def tensors(self) -> dict[str, Tensor]:
        """Keys and values [B, H, M, K] of each layer; nothing before the first segment."""
        return {
            f"layer-{number}-{name}": tensor_HBMK.transpose(0, 1)
            for number, layer in enumerate(self.layers)
            for name, tensor_HBMK in zip(("keys", "values"), layer.memory(), strict=False)
        }

    def select(self, lanes: Sequence[int], num_removed: Sequence[int]) -> "KVCache":
        for layer in self.layers:
            layer.select(lanes, num_removed)
        return self

    def check(self, config: ModelConfig, num_lanes: int) -> None:
        """`LayerKVCache.append` compares the lanes."""
        require_recurrent(config, len(self.layers))


def require_recurrent(config: ModelConfig, num_layers: int) -> None:
    """Raise ValueError for a model of another kind of memory, or of other layers."""
    if config.memory != "recurrent" or config.n_layer != num_layers:
        raise ValueError(
            f"the memory has {num_layers} layers of model.memory=recurrent: expected "
            f"{config.n_layer} of {config.memory}; streams start with model.empty_memory(lanes)"
        )
