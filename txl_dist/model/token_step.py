"""One token per lane: the model's forward without what does not depend on the token.

In generation almost every segment is one token, whose products are small, so that other operations
take much of the time. `TokenStep` computes such a segment with fewer of them
(docs/decisions/0042-one-token-at-a-time.md). Between tokens it keeps

- the keys and values of the memory (`KVCache`),
- per layer: weights, and the distance terms arranged for a single query,
- the mask of lanes whose memory is full, which is the same for every later token.

Results equal those of `TransformerXL.hidden` with the attention `sdpa`, bit for bit. Gradients,
dropout and models without memory are not supported.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import layer_norm, linear, scaled_dot_product_attention

from txl_dist.model.attention import fold_groups
from txl_dist.model.encodings import DistanceTerms, apply_rotary, scaled_query
from txl_dist.model.layer_parts import RmsNorm, normalise
from txl_dist.model.memory import SequenceState
from txl_dist.model.memory.recurrent import KVCache, LayerKVCache
from txl_dist.model.transformer_xl import Layer, TransformerXL
from txl_dist.model.visibility import mask_scores, visible_keys

# Shapes: B lanes, M memory tokens, S = M + 1 keys, D d_model, H heads, K d_head, X = H K


class TokenStep:
    """step(token_B, ages) -> the last layer's output [B, D]; stores the token in `cache`.

    Create it in the autocast context in which it is called, after the model's last change of
    weights, dtype or device. `ages` are the ages of the tokens (visibility.py).
    """

    def __init__(self, model: TransformerXL, cache: SequenceState) -> None:
        if not self.supports(model, cache):
            raise ValueError("TokenStep needs a KVCache with a memory, and attention=auto or sdpa")
        assert isinstance(cache, KVCache)
        self._model, self._num_past = model, cache.num_past
        config, like = model.config, model.weight
        self._same_length = config.same_length
        device_type, dtype = like.device.type, like.dtype
        if torch.is_autocast_enabled(device_type):
            dtype = torch.get_autocast_dtype(device_type)
        prepared = {
            num_past: model.encoding.prepare(config, num_past + 1, like, lambda x: x)
            for num_past in set(cache.num_pasts)
        }
        self._layers = []
        for layer, layer_cache in zip(model.layers, cache.layers, strict=True):
            assert isinstance(layer, Layer)
            num_past = layer_cache.mem_len
            make = partial(layer.attention.distances, prepared[num_past], model.shared_biases)
            terms = layer_cache.terms(num_past + 1, make)
            self._layers.append(_LayerStep(layer, layer_cache, terms, dtype))
        # A full memory hides a key only with `same_length`. Without other scores to add, a mask of
        # zeros makes scaled_dot_product_attention take the same kernel as in segments.
        is_needed = config.same_length or not config.encoding.multiplies_distances
        self._full_masks: dict[int, Tensor | None] = {
            num_past: self._compute_mask([num_past], num_past, like) if is_needed else None
            for num_past in prepared
        }
        """By memory length: the mask [B, 1, S] with a full memory; None if it hides nothing."""
        # Without gradients torch would prefer cuDNN on GPUs, which has open bugs for masks
        # (pytorch#196678, pytorch#191612).
        kernels = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
        self._kernels = partial(sdpa_kernel, kernels) if device_type == "cuda" else nullcontext

    @staticmethod
    def supports(model: TransformerXL, cache: SequenceState) -> bool:
        """Whether the model can be computed one token at a time, in the implementation `sdpa`."""
        is_fast = model.config.attention in ("auto", "sdpa")
        return isinstance(cache, KVCache) and cache.num_past > 0 and is_fast

    def __call__(self, token_B: Tensor, ages: Sequence[int]) -> Tensor:
        x_BD: Tensor = self._model.embed(token_B)
        masks = self._full_masks
        if min(ages) < self._num_past:
            masks = {num_past: self._compute_mask(ages, num_past, x_BD) for num_past in masks}
        with self._kernels():
            for layer in self._layers:
                x_BD = layer(x_BD, masks[layer.num_past])
        return self._model.output(x_BD)

    def _compute_mask(self, ages: Sequence[int], num_past: int, like: Tensor) -> Tensor:
        age_B1 = torch.tensor(ages, device=like.device)[:, None]
        visible_B1S = visible_keys(age_B1, num_past=num_past, same_length=self._same_length)
        return mask_scores(visible_B1S, like.dtype)


class _LayerStep:
    """`Layer` for one token per lane: (x_BD, mask_B1S or None) -> the next layer's input [B, D].

    Holds the weights themselves: an attribute of a module takes as long as a small operation.
    """

    def __init__(
        self, layer: Layer, cache: LayerKVCache, terms: DistanceTerms, dtype: torch.dtype
    ) -> None:
        """`dtype`: that of the queries."""
        attention, feed_forward = layer.attention, layer.feed_forward
        self.num_past = cache.mem_len
        self._pre_lnorm, self._heads = layer.pre_lnorm, attention.heads
        self._cache, self._terms, self._num_kv_heads = cache, terms, attention.kv_heads[0]
        u_HK, self._v_HK, r_HSK, b_HS = (
            None if x is None else x.to(dtype)
            for x in (
                terms.content_bias_HK, terms.distance_bias_HK, terms.distance_HSK, terms.score_HS,
            )
        )  # fmt: skip
        self._u_H1K = None if u_HK is None else u_HK[:, None]
        self._r_HKS = None if r_HSK is None else r_HSK.transpose(1, 2)
        self._b_H1S = None if b_HS is None else b_HS[:, None]
        self._query = attention.query.weight, attention.query.bias
        self._key_value = attention.key_value.weight, attention.key_value.bias
        self._out, self._attention = attention.out.weight, attention
        self._up = feed_forward.up.weight, feed_forward.up.bias
        self._down = feed_forward.down.weight, feed_forward.down.bias
        self._activate = feed_forward.activate
        self._attention_norm, self._feed_forward_norm = (
            _functional(norm) for norm in (layer.attention_norm, layer.feed_forward_norm)
        )

    def __call__(self, x_BD: Tensor, mask_B1S: Tensor | None) -> Tensor:
        if self._pre_lnorm:
            x_BD = x_BD + self._attend(self._attention_norm(x_BD), mask_B1S)
            return x_BD + self._feed_forward(self._feed_forward_norm(x_BD))
        x_BD = self._attention_norm(x_BD + self._attend(x_BD, mask_B1S))
        return self._feed_forward_norm(x_BD + self._feed_forward(x_BD))

    def _feed_forward(self, x_BD: Tensor) -> Tensor:
        return linear(self._activate(linear(x_BD, *self._up)), *self._down)

    def _attend(self, x_BD: Tensor, mask_B1S: Tensor | None) -> Tensor:
        num_lanes, (num_heads, d_head) = len(x_BD), self._heads
        q_HBK = linear(x_BD, *self._query).view(num_lanes, num_heads, d_head).transpose(0, 1)
        key_value = linear(x_BD, *self._key_value)
        key_value_B2H1K = key_value.view(num_lanes, 2, self._num_kv_heads, 1, d_head)
        k_HB1K, v_HB1K = key_value_B2H1K.permute(1, 2, 0, 3, 4).unbind()
        has_norms = self._attention.qk_norm
        if has_norms:
            k_HB1K = normalise(k_HB1K, self._attention.key_gain_K, self._attention.norm_epsilon)
        k_HBSK, v_HBSK = self._cache.append(k_HB1K, v_HB1K)
        if self._terms.rotary_SK is not None:
            k_HBSK = apply_rotary(k_HBSK, self._terms.rotary_SK)
        if self._terms.rotary_SK is not None or has_norms:
            q_HBK = self._attention.normed_queries(q_HBK.unsqueeze(2), self._terms).squeeze(2)
        bias_HB1S = self._score_bias(q_HBK, mask_B1S)
        query_HB1K = (q_HBK if self._u_H1K is None else q_HBK + self._u_H1K).unsqueeze(2)
        if num_heads > self._num_kv_heads:
            query_HB1K = fold_groups(query_HB1K, self._num_kv_heads)
            assert bias_HB1S is not None  # a mask: rotary distances have no scores
            bias_HB1S = bias_HB1S.expand(-1, query_HB1K.shape[2], -1)
        mixed_HB1K = scaled_dot_product_attention(query_HB1K, k_HBSK, v_HBSK, attn_mask=bias_HB1S)
        return linear(mixed_HB1K.transpose(0, 1).reshape(num_lanes, -1), self._out)

    def _score_bias(self, q_HBK: Tensor, mask_B1S: Tensor | None) -> Tensor | None:
        """What is added to the content scores, [H, B or 1, 1, S]; None if that is nothing."""
        score_HBS = self._b_H1S
        if self._r_HKS is not None:
            q_v_HBK = scaled_query(q_HBK.unsqueeze(2), self._v_HK).squeeze(2)
            product_HBS = torch.bmm(q_v_HBK, self._r_HKS)
            score_HBS = product_HBS if score_HBS is None else product_HBS + score_HBS
        if mask_B1S is None:
            return None if score_HBS is None else score_HBS.unsqueeze(2)
        mask_B1S = mask_B1S.to(q_HBK.dtype)
        return mask_B1S if score_HBS is None else score_HBS.unsqueeze(2) + mask_B1S


def _functional(norm: nn.Module) -> Callable[[Tensor], Tensor]:
    """The norm without the time of a module's call and attributes."""
    if isinstance(norm, nn.LayerNorm):
        settings = norm.normalized_shape, norm.weight, norm.bias, norm.eps
        return lambda x_BD: layer_norm(x_BD, *settings)
    assert isinstance(norm, RmsNorm)
    return partial(normalise, gain=norm.weight, epsilon=norm.eps)
