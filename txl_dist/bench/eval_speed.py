"""`txl bench eval-speed`: what reusing states saves over a sliding window, with one set of weights.

For an attention length L, both paths score tokens of which each attends to about L tokens:

    reuse     segments of tgt_len tokens with a KV cache of L tokens, as txl eval reads:
              every token attends to L tokens of memory and the earlier ones of its segment
    window    for every single token, the L tokens before it are read (`WindowReader`)

The window path skips what a window does not need, so that the ratio is not against a slow
baseline:

- Queries are computed in blocks, each with the keys up to the end of its block only. So about half
  of all pairs of query and key is skipped, and no tensor has L x L numbers per head.
- The last layer computes the last query only, and the softmax the last position.
- Distances are projected once for all windows, because the weights do not change.

Both paths run with fixed settings: on a CPU the fastest of several (blocks of 64 to 256 queries, 1
and 4 lanes); on GPUs they have not been compared.

The figure to compare is the share of the FLOP ratio that the time ratio reaches:

    share = (window time / reuse time) / (window FLOPs / reuse FLOPs)
          = (FLOP/s of the reuse path) / (FLOP/s of the window path)

It is below 1 if the reuse path uses the machine less well than the window path, and it does not
depend on how many operations a window needs. FLOPs are those of the matrix products that each path
executes (model/flops.py), for the window path with the blocks that were timed.

Windows are sampled: one batch of windows per round, alternating with segments of the reuse path in
one process. On a CPU both run on one thread, and times are CPU times, which do not count while
other processes run. Times are medians over the rounds. The paper's ratios (table 9) are of another
model on one GPU, without the skipping.

Source: Dai et al. 2019, arXiv:1901.02860, section 4.5; the window path of Al-Rfou et al. 2018,
arXiv:1808.04444.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pkgutil import resolve_name
from typing import Any, NamedTuple

import torch
from torch import Tensor

from txl_dist.bench import one_thread, time_rounds
from txl_dist.errors import ConfigError
from txl_dist.model.attention import SegmentContext, choose_implementation
from txl_dist.model.config import ModelConfig
from txl_dist.model.encodings import DistanceTerms
from txl_dist.model.flops import inference_flops, window_flops
from txl_dist.model.layer import Layer
from txl_dist.model.memory.kv_cache import KVCache, LayerKVCache
from txl_dist.model.transformer_xl import TransformerXL
from txl_dist.model.visibility import Visibility
from txl_dist.runtime.process import keep_freed_memory

# Shapes: B lanes or windows, L window tokens, T tokens of a segment or block, S keys up to its end,
# D d_model, H heads, K d_head, N tokens of a text

LIMIT = 0.8
MAX_SHARE = 1.25
"""Above it the window path reaches so few FLOP/s that the time ratio does not count."""
PAPER_RATIOS = {800: 363, 1800: 773, 2800: 1409, 3800: 1874}
"""Attention length -> times slower per token than with state reuse; table 9 of the paper."""
BLOCK_LEN = {"cpu": 256, "cuda": 1024}
"""Queries per block of the window path, by type of device; at most the window."""
WINDOWS = {"cpu": 1, "cuda": 4}
"""Windows per batch. One window is enough to keep a CPU thread busy."""
LANES = {"cpu": 4, "cuda": 16}
"""Lanes of the reuse path."""
REUSE_TOKENS = 256
"""Tokens per lane in one round of the reuse path. Rounds continue one text. The memory is moved
every L / 4 tokens (kv_cache.py), which takes less than 1 % of the time of these tokens."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SpeedRow:
    """The two paths at one attention length; times in milliseconds per scored token."""

    attention_length: int
    tgt_len: int
    ms_per_token_window: float
    ms_per_token_reuse: float
    ratio: float
    paper_ratio: float | None
    flops_ratio: float
    share_of_flops_ratio: float
    limit: float
    holds: bool
    rounds: int


class _Path(NamedTuple):
    """One way to score tokens."""

    run: Callable[[], object]
    num_tokens: int
    """Tokens that one run scores."""
    flops: float
    """Operations per token."""


def bench_eval_speed(
    model: TransformerXL,
    *,
    attention_lengths: Sequence[int],
    tgt_len: int,
    rounds: int,
    seed: int = 0,
) -> Iterator[SpeedRow]:
    """Yield one row per attention length. `mem_len` of the model is not used.

    Raises ValueError if the model encodes positions in a segment, so that states cannot be reused,
    or has `same_length`.
    """
    if model.config.same_length:
        raise ValueError("same_length limits attention to mem_len keys; set it to false")
    if not model.config.encoding.allows_memory:
        raise ValueError(
            f"distance_encoding={model.config.distance_encoding} allows no memory, so there are no "
            "states to reuse"
        )
    keep_freed_memory()
    generator = torch.Generator().manual_seed(seed)
    with one_thread():
        for length in attention_lengths:
            yield _row(model, length, tgt_len, rounds, generator)


def _row(
    model: TransformerXL, length: int, tgt_len: int, rounds: int, generator: torch.Generator
) -> SpeedRow:
    device = model.weight.device
    clock = time.process_time if device.type == "cpu" else time.perf_counter
    window = _window_path(model, length, generator)
    reuse = _reuse_path(model, length, tgt_len, generator)
    candidates = {"window": window.run, "reuse": reuse.run}
    times = time_rounds(candidates, rounds=rounds, warm_up_rounds=1, clock=clock)
    window_ms = 1e3 * times["window"].median / window.num_tokens
    reuse_ms = 1e3 * times["reuse"].median / reuse.num_tokens
    ratio, flops_ratio = window_ms / reuse_ms, window.flops / reuse.flops
    return SpeedRow(
        attention_length=length,
        tgt_len=tgt_len,
        ms_per_token_window=window_ms,
        ms_per_token_reuse=reuse_ms,
        ratio=ratio,
        paper_ratio=PAPER_RATIOS.get(length),
        flops_ratio=flops_ratio,
        share_of_flops_ratio=ratio / flops_ratio,
        limit=LIMIT,
        holds=LIMIT <= ratio / flops_ratio <= MAX_SHARE,
        rounds=rounds,
    )


def _window_path(model: TransformerXL, length: int, generator: torch.Generator) -> _Path:
    device = model.weight.device.type
    block_len, num_windows = min(BLOCK_LEN[device], length), WINDOWS[device]
    reader = WindowReader(model, window_len=length, num_windows=num_windows, block_len=block_len)
    text_N = _random_text(model, 2 * length + 1, generator)

    def run() -> None:
        """Score the targets of windows at random places of the text."""
        starts = torch.randint(length, (num_windows,), generator=generator).tolist()
        window_BN = torch.stack([text_N[start : start + length + 1] for start in starts])
        _synchronise(reader.last_nats(window_BN[:, :-1], window_BN[:, -1]))

    flops = window_flops(model.config, window_len=length, block_len=block_len)
    return _Path(run, num_windows, flops)


def _reuse_path(
    model: TransformerXL, length: int, tgt_len: int, generator: torch.Generator
) -> _Path:
    if model.config.memory != "recurrent":
        raise ConfigError(
            "eval-speed compares a memory of a given number of tokens with windows of as many; "
            f"model.memory={model.config.memory} has no such number. Use a checkpoint of a "
            "recurrent memory"
        )
    lanes = LANES[model.weight.device.type]
    config = replace(model.config, mem_len=length, mem_shares=())
    cache = KVCache.empty(config, lanes)
    num_segments = max(1, REUSE_TOKENS // tgt_len)
    text_N = _random_text(model, lanes * (num_segments * tgt_len + 1), generator)
    text_BN = text_N.view(lanes, -1)
    # Old enough that the whole memory is visible: its zeros cost as much as any other keys.
    age_BT = torch.full((lanes, tgt_len), length + tgt_len, device=text_N.device)

    @torch.no_grad()
    def run() -> None:
        for start in range(0, num_segments * tgt_len, tgt_len):
            stop = start + tgt_len
            nats_BT, _ = model(
                text_BN[:, start:stop], text_BN[:, start + 1 : stop + 1], age_BT, cache
            )
        _synchronise(nats_BT)

    num_tokens = lanes * tgt_len
    flops = inference_flops(config, num_lanes=lanes, tgt_len=tgt_len) / num_tokens
    return _Path(run, num_segments * num_tokens, flops)


def _random_text(model: TransformerXL, num_tokens: int, generator: torch.Generator) -> Tensor:
    """Uniformly random ids. The work depends on them only through an adaptive softmax."""
    text_N = torch.randint(model.config.num_ids, (num_tokens,), generator=generator)
    return text_N.to(model.weight.device)


def _synchronise(result: Tensor) -> None:
    """Wait for a GPU; on a CPU results are there already."""
    if result.is_cuda:
        torch.cuda.synchronize(result.device)


# --- the sliding window ---------------------------------------------------------------------------


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
        model = self._model
        for first_BTD in model.embed(input_BL).split(self._block_len, dim=1):
            last_BTD = self._read(first_BTD)
        hidden_B1D = model.output(self._last_query(last_BTD))
        nats_B1: Tensor = model.softmax(hidden_B1D, target_B[:, None], model.table)
        return nats_B1[:, 0]

    def _read(self, first_BTD: Tensor) -> Tensor:
        """Read a block; returns the input of the last layer, which stores keys and values only."""
        x_BTD, model = first_BTD, self._model
        context = _causal_context(self._model.config, x_BTD, self._caches[0].length)
        last = len(self._layers) - 1
        for number, (layer, cache) in enumerate(zip(self._layers[:-1], self._caches, strict=False)):
            x_BTD = layer(model.layer_input(number, x_BTD, first_BTD), cache, context)
        x_BTD = model.layer_input(last, x_BTD, first_BTD)
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
        config, weight = model.config, model.weight
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
    config, weight = model.config, model.weight
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
    cache.append(*layer.attention.keys_and_values(x_BTD))
