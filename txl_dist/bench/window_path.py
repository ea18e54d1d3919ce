"""The sliding window: scores one target by reading a whole window of text, as fast as possible.

A model that cannot reuse states reads, for every token, the L tokens before it from the start. This
path computes exactly that, without the work that a window does not need:

- Queries are computed in blocks, each with the keys up to the end of its block only. So about half
  of all pairs of query and key is skipped, and no tensor has L x L numbers per head.
- The last layer computes the last query only, and the softmax the last position.
- Distances are projected once for all windows, because the weights do not change.
- Several windows can be computed as a batch.

The attention function, the projections and the layers are those of every other reading. Tests
compare the result with one segment of L tokens. Source of the comparison: Al-Rfou et al. 2018,
arXiv:1808.04444, as evaluated in Dai et al. 2019, arXiv:1901.02860, section 4.5.
"""

from collections.abc import Callable
from pkgutil import resolve_name
from typing import Any

import torch
from torch import Tensor

from txl_dist.model.attention import SegmentContext, choose_implementation, heads_first
from txl_dist.model.config import ModelConfig
from txl_dist.model.encodings import DistanceTerms
from txl_dist.model.memory.kv_cache import LayerKVCache
from txl_dist.model.transformer_xl import Layer, TransformerXL
from txl_dist.model.visibility import Visibility

# Shapes: B windows, L window tokens, T tokens of a block, S keys up to its end, D d_model, H heads,
# K d_head


class WindowReader:
    """last_nats(input_BL, target_B) -> nats_B of the target after each window.

    Works without gradients. Buffers for keys and values are kept between calls.
    """

    def __init__(
        self, model: TransformerXL, *, window_len: int, num_windows: int, block_len: int
    ) -> None:
        self._model, self._shape, self._block_len = model, (num_windows, window_len), block_len
        self._layers: list[Any] = list(model.layers)
        with torch.no_grad():
            terms = _distance_terms(model, window_len)
        self._caches = [
            _GrowingCache(model, (num_windows, window_len), terms_of_layer)
            for terms_of_layer in terms
        ]

    @torch.no_grad()
    def last_nats(self, input_BL: Tensor, target_B: Tensor) -> Tensor:
        """Nats [B]. Raises ValueError for windows of another shape."""
        if input_BL.shape != self._shape:
            raise ValueError(f"windows {tuple(input_BL.shape)}, expected {self._shape}")
        for cache in self._caches:
            cache.length = 0
        for block_BTD in self._embedded(input_BL).split(self._block_len, dim=1):
            last_BTD = self._read(block_BTD)
        hidden_B1D = self._last_query(last_BTD)
        model = self._model
        nats_B1: Tensor = model.softmax(hidden_B1D, target_B[:, None], model.table)
        return nats_B1[:, 0]

    def _embedded(self, input_BL: Tensor) -> Tensor:
        x_BLD = self._model.table(input_BL)
        return self._model.encoding.add_to_input(self._model.config, x_BLD)

    def _read(self, x_BTD: Tensor) -> Tensor:
        """Read a block; returns the input of the last layer, which stores keys and values only."""
        context = _causal_context(self._model.config, x_BTD, self._caches[0].length)
        for layer, cache in zip(self._layers[:-1], self._caches[:-1], strict=True):
            x_BTD = layer(x_BTD, cache, context)
        is_last_block = self._caches[-1].length + x_BTD.shape[1] == self._shape[1]
        # The last query stores its own keys and values.
        stored_BTD = x_BTD[:, :-1] if is_last_block else x_BTD
        _store_keys_and_values(self._layers[-1], stored_BTD, self._caches[-1])
        return x_BTD

    def _last_query(self, x_BTD: Tensor) -> Tensor:
        last_B1D = x_BTD[:, -1:]
        context = _causal_context(self._model.config, last_B1D, self._caches[-1].length)
        hidden_B1D: Tensor = self._layers[-1](last_B1D, self._caches[-1], context)
        return hidden_B1D


class _GrowingCache(LayerKVCache):
    """Keys and values of all tokens of the window that were read so far, without a memory."""

    def __init__(self, model: TransformerXL, shape: tuple[int, int], terms: DistanceTerms) -> None:
        config, weight = model.config, model.table.weights[0]
        super().__init__(
            num_heads=config.n_head, num_lanes=shape[0], mem_len=0, d_head=config.d_head
        )
        self.length = 0
        size = (2, config.n_head, *shape, config.d_head)
        self._buffer_2HBLK = weight.new_empty(size)
        self._window_terms = terms

    def append(self, k_HBTK: Tensor, v_HBTK: Tensor) -> tuple[Tensor, Tensor]:
        start, self.length = self.length, self.length + k_HBTK.shape[2]
        for buffer_HBLK, new_HBTK in zip(self._buffer_2HBLK, (k_HBTK, v_HBTK), strict=True):
            buffer_HBLK[:, :, start : self.length] = new_HBTK
        k_HBSK, v_HBSK = self._buffer_2HBLK[:, :, :, : self.length]
        return k_HBSK, v_HBSK

    def terms(self, num_keys: int, make: Callable[[], DistanceTerms]) -> DistanceTerms:
        """The terms of the nearest `num_keys` distances; `make` is not needed."""
        return _nearest(self._window_terms, num_keys)


def _distance_terms(model: TransformerXL, window_len: int) -> list[DistanceTerms]:
    """The terms of every layer for all distances in a window."""
    config, weight = model.config, model.table.weights[0]
    prepared = model.encoding.prepare(config, window_len, weight, lambda encoded: encoded)
    shared = (model.content_bias_HK, model.distance_bias_HK) if config.shares_biases else None
    layers: list[Any] = list(model.layers)
    return [layer.attention.distances(prepared, shared).detached() for layer in layers]


def _nearest(terms: DistanceTerms, num_keys: int) -> DistanceTerms:
    """The terms of distances num_keys - 1, ..., 0."""
    padded_HRK, score_HL, rotary_LK = terms.padded_distance_HRK, terms.score_HS, terms.rotary_SK
    # The row in front is that of another distance; its values have no effect.
    padded_HRK = None if padded_HRK is None else padded_HRK[:, -num_keys - 1 :]
    return DistanceTerms(
        content_bias_HK=terms.content_bias_HK,
        distance_bias_HK=terms.distance_bias_HK,
        distance_HSK=None if padded_HRK is None else padded_HRK[:, 1:],
        padded_distance_HRK=padded_HRK,
        score_HS=None if score_HL is None else score_HL[:, -num_keys:],
        rotary_SK=None if rotary_LK is None else _last_rows(rotary_LK, num_keys),
    )


def _last_rows(rotary_LK: tuple[Tensor, Tensor], num_keys: int) -> tuple[Tensor, Tensor]:
    cos_LK, sin_LK = rotary_LK
    return cos_LK[-num_keys:], sin_LK[-num_keys:]


def _causal_context(config: ModelConfig, x_BTD: Tensor, start: int) -> SegmentContext:
    """The context of queries that see all tokens of the window up to themselves."""
    implementation = choose_implementation(
        config.attention, device=x_BTD.device, with_dropout=False, d_head=config.d_head
    )
    visibility = Visibility.of(
        torch.arange(start, start + x_BTD.shape[1], device=x_BTD.device)[None],
        num_past=start,
        same_length=False,
        mask_dtype=None if implementation.masks_by_reach else x_BTD.dtype,
    )
    return SegmentContext(
        distances=None,
        biases_HK=None,
        attention=resolve_name(implementation.function),
        reads_keep_bits=implementation.reads_keep_bits,
        visibility=visibility,
        dropout_masks=None,
    )


def _store_keys_and_values(layer: Layer, x_BTD: Tensor, cache: _GrowingCache) -> None:
    x_BTD = layer.attention_norm(x_BTD) if layer.pre_lnorm else x_BTD
    attention = layer.attention
    cache.append(*heads_first(attention.key_value(x_BTD), attention.heads))
