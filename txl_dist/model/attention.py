"""The attention layer: projections, and the choice of the form that computes attention.

All forms are an `AttentionFunction` with the same result:

    reference_attention.py    the equation, term by term; slow
    cpu_attention.py          one autograd node with its own backward: training on CPUs, and dropout
    sdpa_attention.py         torch's scaled_dot_product_attention: GPUs, and inference on CPUs

Source: Dai et al. 2019, arXiv:1901.02860, section 3.3.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import Any

import torch
from torch import Tensor, nn

from txl_dist.model.autograd_functions import heads_first, pack_heads
from txl_dist.model.config import ModelConfig
from txl_dist.model.dropout import Dropout, DropoutMasks
from txl_dist.model.encodings import Biases, DistanceTerms, apply_rotary, encoding_class
from txl_dist.model.kv_cache import LayerKVCache
from txl_dist.model.reference_attention import reference_weights
from txl_dist.model.variants import ATTENTION_FORMS

# Shapes: B lanes, T segment tokens, M memory tokens, S = M + T keys, D d_model, H heads, K d_head

AttentionFunction = Callable[[Tensor, Tensor, Tensor, DistanceTerms, Tensor, Tensor | None], Tensor]
"""(q_HBTK, k_HBSK, v_HBSK, terms, mask_BTS, keep_BHTS) -> weighted sums of values [B, T, H, K].

`mask_BTS` holds 0 or minus infinity and is added to the scores. `keep_BHTS` multiplies the
attention weights, for dropout.
"""

AttentionWeightsCallback = Callable[[int, Tensor], None]
"""Called with the layer's number and its attention weights [B, H, T, S]."""


def choose_attention(name: str, *, device: torch.device, with_dropout: bool) -> AttentionFunction:
    """The form called `name`; for `auto`, the fastest one (docs/experiments.md, 2026-11-21).

    A form without dropout is replaced by the one that `auto` takes when weights are dropped.
    """
    form = ATTENTION_FORMS.get(name)
    if form is None or (with_dropout and not form.supports_dropout):
        is_cpu_training = device.type == "cpu" and torch.is_grad_enabled()
        form = next(
            candidate
            for candidate in ATTENTION_FORMS.values()
            if (candidate.supports_dropout or not with_dropout)
            and (candidate.has_fast_cpu_gradient or not is_cpu_training)
        )
    return resolve_name(form.implementation)


@dataclass(frozen=True, slots=True)
class SegmentContext:
    """What all layers share while they compute one segment."""

    distances: Any
    """What the encoding's `prepare` returned for S keys (encodings.py)."""
    biases_HK: Biases | None
    """u and v; None if every layer has its own (`untie_r`) or the encoding has none."""
    mask_BTS: Tensor
    """0 where a query may see a key, else minus infinity (visibility.py)."""
    dropout_masks: DropoutMasks | None
    """None in evaluation."""
    on_attention_weights: AttentionWeightsCallback | None = None


class Attention(nn.Module):
    """Multi-head attention of a segment over [stop-gradient memory ; segment].

    forward(x_BTD, memory, context) -> out_BTD, without the residual. `memory` is either the layer's
    inputs [B, M, D], from which keys and values are projected with the current weights, or a
    LayerKVCache, which holds keys and values and works without gradients only.
    """

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        width = config.n_head * config.d_head
        self.heads = (config.n_head, config.d_head)
        self.query = nn.Linear(config.d_model, width, bias=False)
        self.key_value = nn.Linear(config.d_model, 2 * width, bias=False)
        self.distances = encoding_class(config)(config)
        self.out = nn.Linear(width, config.d_model, bias=False)
        self.weight_dropout = Dropout(config.dropatt, layer=layer, place="attention weights")
        self.form = config.attention

    def forward(
        self, x_BTD: Tensor, memory: Tensor | LayerKVCache, context: SegmentContext
    ) -> Tensor:
        q_HBTK = self.query(x_BTD).unflatten(-1, self.heads).permute(2, 0, 1, 3)
        if isinstance(memory, LayerKVCache):
            k_HBSK, v_HBSK = memory.append(*heads_first(self.key_value(x_BTD), self.heads))
            terms = memory.terms(k_HBSK.shape[2], lambda: self._terms(context))
        else:
            # Two projections, because one of both inputs would compute a gradient for the memory:
            # 4 % more operations in a training step of `txl bench model`.
            projected = self.key_value(memory), self.key_value(x_BTD)
            k_HBSK, v_HBSK = pack_heads(*projected, self.heads)
            terms = self._terms(context)
        if terms.rotary_SK is not None:
            q_HBTK = apply_rotary(q_HBTK, terms.rotary_SK)
            k_HBSK = apply_rotary(k_HBSK, terms.rotary_SK)
        if context.on_attention_weights is not None:
            weights = reference_weights(q_HBTK, k_HBSK, terms, context.mask_BTS)
            context.on_attention_weights(self.weight_dropout.layer, weights)
        keep_BHTS = self._dropout_scale(context, k_HBSK.shape[2])
        attention = choose_attention(
            self.form, device=x_BTD.device, with_dropout=keep_BHTS is not None
        )
        mixed_BTHK = attention(q_HBTK, k_HBSK, v_HBSK, terms, context.mask_BTS, keep_BHTS)
        return self.out(mixed_BTHK.flatten(-2))

    def _terms(self, context: SegmentContext) -> DistanceTerms:
        return self.distances(context.distances, context.biases_HK)

    def _dropout_scale(self, context: SegmentContext, num_keys: int) -> Tensor | None:
        """What the attention weights are multiplied by, [B, H, T, S]; None without dropout."""
        num_lanes, num_queries, _ = context.mask_BTS.shape
        shape = (num_lanes, self.heads[0], num_queries, num_keys)
        # An expanded scalar: `scale` needs a shape, dtype and device, but no values.
        like_BHTS = context.mask_BTS.new_zeros(()).expand(shape)
        return self.weight_dropout.scale(like_BHTS, context.dropout_masks)
