"""The attention layer: projections, and the choice of the implementation that computes attention.

Each is an `AttentionFunction` of its name, with the same result:

    torch_attention.py   `reference`: the equation, term by term; slow
                         `cpu`: one autograd node with its own backward: training on CPUs
                         `sdpa`: torch's scaled_dot_product_attention: inference on CPUs
    triton.py            kernels for GPUs, which store no weights and build no mask

Source: Dai et al. 2019, arXiv:1901.02860, section 3.3.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from txl_dist.model.attention.torch_attention import reference_weights
from txl_dist.model.choices import ATTENTION_IMPLEMENTATIONS, AttentionImplementation
from txl_dist.model.config import ModelConfig
from txl_dist.model.devices import has_triton
from txl_dist.model.dropout import Dropout, DropoutMasks, KeepBits
from txl_dist.model.encodings import (
    Biases,
    DistanceTerms,
    Heads,
    apply_rotary,
    encoding_class,
    heads_first,
)
from txl_dist.model.layer_parts import StackedLinear, normalise
from txl_dist.model.memory.recurrent import LayerKVCache
from txl_dist.model.visibility import Visibility

# Shapes: B lanes, T segment tokens, M memory tokens, S = M + T keys, D d_model, H heads, K d_head

AttentionFunction = Callable[
    [Tensor, Tensor, Tensor, DistanceTerms, Visibility, Tensor | KeepBits | None], Tensor
]
"""(q_HBTK, k_HBSK, v_HBSK, terms, visibility, keep_BHTS) -> weighted sums of values [B, T, H, K].

`keep_BHTS` multiplies the attention weights, for dropout. It is a tensor, or `KeepBits` if the
implementation `needs_triton`.
"""

AttentionWeightsCallback = Callable[[int, Tensor], None]
"""Called with the layer's number and its attention weights [B, H, T, S]."""


def choose_implementation(
    config: ModelConfig, device: torch.device, *, with_dropout: bool
) -> AttentionImplementation:
    """That of `config.attention`; for `auto`, the fastest one (docs/experiments.md, 2026-11-21).

    An implementation that does not support the call, or cannot run on the device, is replaced by
    the one that `auto` takes. That a GPU has triton is checked at the start (runtime/device.py).
    """
    on_gpu, is_trained = device.type == "cuda", torch.is_grad_enabled()

    def supports_call(implementation: AttentionImplementation) -> bool:
        return (
            not (implementation.is_for_inference and with_dropout)
            and config.d_head <= implementation.max_d_head
            and not (implementation.is_for_cpus and on_gpu)
            and (not implementation.needs_triton or on_gpu or has_triton(device))
        )

    implementation = ATTENTION_IMPLEMENTATIONS.get(config.attention)
    if implementation is not None and supports_call(implementation):
        return implementation
    return next(
        candidate
        for candidate in ATTENTION_IMPLEMENTATIONS.values()
        if supports_call(candidate)
        and not (candidate.is_for_inference and is_trained)
        and (on_gpu or not candidate.needs_triton)
    )


@dataclass(frozen=True, slots=True)
class SegmentContext:
    """What all layers share while they compute one segment."""

    distances: Any
    """What the encoding's `prepare` returned for S keys (encodings.py)."""
    biases_HK: Biases | None
    """u and v; None if every layer has its own (`untie_r`) or the encoding has none."""
    attention: AttentionFunction
    """The implementation that `choose_implementation` has chosen."""
    is_triton: bool
    """It takes dropout as bits, fewer heads of keys than of queries, and in place of keys and
    values also the projections of memory and segment, [B, N, 2 H K]."""
    visibility: Visibility
    """Which keys each query may see. It has a mask if `attention` or the callback needs one."""
    dropout_masks: DropoutMasks | None
    """None in evaluation."""
    on_attention_weights: AttentionWeightsCallback | None = None


class Attention(nn.Module):
    """Multi-head attention of a segment over [stop-gradient memory ; segment].

    forward(x_BTD, memory, context) -> out_BTD, without the residual. `memory` is either the layer's
    inputs [B, M, D], from which keys and values are projected with the current weights, or a
    LayerKVCache, which holds keys and values and works without gradients only. Inputs are still to
    be multiplied by `gain_D`, if that is not None.

    If H heads of queries share fewer heads of keys and values, those of a group are rows of one
    query matrix (`fold_groups`), so keys are not copied. Source: Ainslie et al. 2023,
    arXiv:2305.13245.
    """

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        width, biases = config.n_head * config.d_head, config.qkv_biases
        self.heads = (config.n_head, config.d_head)
        self.kv_heads = (config.num_kv_heads, config.d_head)
        self.query = nn.Linear(config.d_model, width, bias=biases)
        self.key_value = StackedLinear(
            config.d_model, math.prod(self.kv_heads), num_stacked=2, bias=biases
        )
        self.distances = encoding_class(config)(config)
        self.out = nn.Linear(width, config.d_model, bias=False)
        self.qk_norm, self.norm_epsilon = config.qk_norm, config.norm_epsilon
        if config.qk_norm:
            self.query_gain_K = nn.Parameter(torch.empty(config.d_head))
            self.key_gain_K = nn.Parameter(torch.empty(config.d_head))
        self.weight_dropout = Dropout(config.dropatt, layer=layer, place="attention weights")

    def forward(
        self,
        x_BTD: Tensor,
        memory: Tensor | LayerKVCache,
        context: SegmentContext,
        gain_D: Tensor | None = None,
    ) -> Tensor:
        q_HBTK = self.query(x_BTD).unflatten(-1, self.heads).permute(2, 0, 1, 3)
        make_terms = partial(self.distances, context.distances, context.biases_HK)
        if isinstance(memory, LayerKVCache):
            k_HBSK, v_HBSK = memory.append(*self.keys_and_values(x_BTD))
            terms = memory.terms(k_HBSK.shape[2], make_terms)
            if terms.rotary_SK is not None:
                k_HBSK = apply_rotary(k_HBSK, terms.rotary_SK)
        else:
            # Two projections, because one of both inputs would compute a gradient for the memory:
            # 4 % more operations in a training step of benchmarks/model_speed.py.
            projected = self.key_value(memory, gain_D), self.key_value(x_BTD)
            terms = make_terms()
            if self._can_read_projections(context, terms):
                keep = self._dropout_scale(x_BTD, context, memory.shape[1] + x_BTD.shape[1])
                mixed_BTHK = context.attention(q_HBTK, *projected, terms, context.visibility, keep)
                return self.out(mixed_BTHK.flatten(-2))
            k_HBSK, v_HBSK = pack_heads(*projected, self.kv_heads)
            if self.qk_norm:
                k_HBSK = normalise(k_HBSK, self.key_gain_K, self.norm_epsilon, terms.rotary_SK)
            elif terms.rotary_SK is not None:
                k_HBSK = apply_rotary(k_HBSK, terms.rotary_SK)
        q_HBTK = self.normed_queries(q_HBTK, terms)
        if context.on_attention_weights is not None:
            folded_HBTK = fold_groups(q_HBTK, len(k_HBSK))
            weights = reference_weights(folded_HBTK, k_HBSK, terms, context.visibility.mask)
            weights = weights.unflatten(2, (-1, x_BTD.shape[1])).flatten(1, 2)
            context.on_attention_weights(self.weight_dropout.layer, weights)
        keep = self._dropout_scale(x_BTD, context, k_HBSK.shape[2])
        attend = context.attention
        if len(q_HBTK) > len(k_HBSK) and not context.is_triton:
            attend = partial(attend_by_groups, attend)
        mixed_BTHK = attend(q_HBTK, k_HBSK, v_HBSK, terms, context.visibility, keep)
        return self.out(mixed_BTHK.flatten(-2))

    def _can_read_projections(self, context: SegmentContext, terms: DistanceTerms) -> bool:
        """Whether nothing changes keys and values between their projection and attention."""
        is_changed = self.qk_norm or terms.rotary_SK is not None or self.heads[1] % 16
        return context.is_triton and not is_changed and context.on_attention_weights is None

    def keys_and_values(self, x_BTD: Tensor) -> tuple[Tensor, Tensor]:
        """Those of the segment as a cache stores them, [H, B, T, K]: normed, not rotated."""
        k_HBTK, v_HBTK = heads_first(self.key_value(x_BTD), self.kv_heads)
        if self.qk_norm:
            k_HBTK = normalise(k_HBTK, self.key_gain_K, self.norm_epsilon)
        return k_HBTK, v_HBTK

    def normed_queries(self, q_HBTK: Tensor, terms: DistanceTerms) -> Tensor:
        """Queries normed and rotated, as far as set."""
        if self.qk_norm:
            return normalise(q_HBTK, self.query_gain_K, self.norm_epsilon, terms.rotary_SK)
        return q_HBTK if terms.rotary_SK is None else apply_rotary(q_HBTK, terms.rotary_SK)

    def _dropout_scale(
        self, x_BTD: Tensor, context: SegmentContext, num_keys: int
    ) -> Tensor | KeepBits | None:
        """What the attention weights are multiplied by, [B, H, T, S]; None without dropout."""
        num_lanes, num_queries, _ = x_BTD.shape
        shape = (num_lanes, self.heads[0], num_queries, num_keys)
        # An expanded scalar: a mask needs a shape, dtype and device, but no values.
        like_BHTS = x_BTD.new_zeros(()).expand(shape)
        if context.is_triton:
            return self.weight_dropout.keep_bits(like_BHTS, context.dropout_masks)
        return self.weight_dropout.scale(like_BHTS, context.dropout_masks)


def fold_groups(q_HBTK: Tensor, num_kv_heads: int) -> Tensor:
    """The queries of a group of G heads as rows for their head of keys: [H / G, B, G T, K].

    Head h of the queries reads head h // G of the keys.
    """
    return q_HBTK.unflatten(0, (num_kv_heads, -1)).transpose(1, 2).flatten(2, 3)


def attend_by_groups(
    attention: AttentionFunction,
    q_HBTK: Tensor,
    k_HBSK: Tensor,
    v_HBSK: Tensor,
    terms: DistanceTerms,
    visibility: Visibility,
    keep_BHTS: Any,
) -> Tensor:
    """An `AttentionFunction` for equally many heads of queries and keys, for fewer heads of keys.

    The mask has the rows of all groups. [B, T, H, K]
    """
    num_queries, num_kv_heads = q_HBTK.shape[2], len(k_HBSK)
    if keep_BHTS is not None:
        keep_BHTS = keep_BHTS.unflatten(1, (num_kv_heads, -1)).flatten(2, 3)
    folded_HBTK = fold_groups(q_HBTK, num_kv_heads)
    mixed_BTHK = attention(folded_HBTK, k_HBSK, v_HBSK, terms, visibility, keep_BHTS)
    return mixed_BTHK.unflatten(1, (-1, num_queries)).permute(0, 2, 3, 1, 4).flatten(2, 3)


def pack_heads(memory_BMX: Tensor, segment_BTX: Tensor, heads: Heads) -> tuple[Tensor, Tensor]:
    """Keys and values [H, B, S, K] of memory and segment, contiguous.

    One copy in each direction; views and `torch.cat` would take three. Contiguous heads let one
    product per head serve all lanes.
    """
    keys, values = _PackHeads.apply(memory_BMX, segment_BTX, heads)
    return keys, values


class _PackHeads(Function):
    @staticmethod
    def forward(
        ctx: Any, memory_BMX: Tensor, segment_BTX: Tensor, heads: Heads
    ) -> tuple[Tensor, ...]:
        ctx.heads, ctx.num_past = heads, memory_BMX.shape[1]
        num_lanes, tgt_len, _ = segment_BTX.shape
        shape = (heads[0], num_lanes, ctx.num_past + tgt_len, heads[1])
        packed = segment_BTX.new_empty(shape), segment_BTX.new_empty(shape)
        for whole_HBNK, part_HBNK in _parts(packed, memory_BMX, segment_BTX, heads):
            whole_HBNK.copy_(part_HBNK)
        return packed

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        num_heads, num_lanes, num_keys, d_head = gradients[0].shape
        width = 2 * num_heads * d_head
        memory_BMX = gradients[0].new_empty(num_lanes, ctx.num_past, width)
        segment_BTX = gradients[0].new_empty(num_lanes, num_keys - ctx.num_past, width)
        for whole_HBNK, part_HBNK in _parts(gradients, memory_BMX, segment_BTX, ctx.heads):
            part_HBNK.copy_(whole_HBNK)
        return memory_BMX, segment_BTX, None


def _parts(
    packed: tuple[Tensor, ...], memory_BMX: Tensor, segment_BTX: Tensor, heads: Heads
) -> Iterator[tuple[Tensor, Tensor]]:
    """(view of a packed tensor, view of the projection that it holds), both [H, B, N, K]."""
    num_past = memory_BMX.shape[1]
    for part_BNX, keys in ((memory_BMX, slice(num_past)), (segment_BTX, slice(num_past, None))):
        for whole_HBSK, part_HBNK in zip(packed, heads_first(part_BNX, heads), strict=True):
            yield whole_HBSK[:, :, keys], part_HBNK
