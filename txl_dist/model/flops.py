"""Floating-point operations of a segment, summed over its matrix products.

A multiply-add counts as two operations. Only matrix products count: other operations are small, and
peak FLOP/s figures do not include them. The projection of the memory's keys and values counts; its
share grows with `mem_len`. The tests compare the sums with torch's FlopCounterMode.
"""

from collections.abc import Sequence

from txl_dist.model.config import ModelConfig
from txl_dist.model.memory import memory_kind

# Shapes: B lanes, T segment tokens, M memory tokens, S = M + T keys, D d_model, W = H K


def forward_flops(
    config: ModelConfig, *, num_lanes: int, tgt_len: int, tail_rows: Sequence[int] = ()
) -> int:
    """Operations to score a segment of `num_lanes` x `tgt_len` tokens with a full memory.

    `tail_rows` is the number of targets in each cluster of the adaptive softmax after the first; it
    depends on the text. Without it the count is a lower bound: every token's head, and no tail.
    """
    num_tokens = tgt_len + config.num_added_tokens
    distances = sum(_distances(config, past + num_tokens) for past in _pasts(config))
    without = _without_past(config, num_lanes=num_lanes, tgt_len=tgt_len, tail_rows=tail_rows)
    return _memory(config, num_lanes) + distances + without


def inference_flops(
    config: ModelConfig, *, num_lanes: int, tgt_len: int, tail_rows: Sequence[int] = ()
) -> int:
    """As `forward_flops`, with `TransformerXL.inference_state`: a cache has already projected the
    memory and the distances."""
    count = _without_past if config.memory_facts.keys_are_tokens else forward_flops
    return count(config, num_lanes=num_lanes, tgt_len=tgt_len, tail_rows=tail_rows)


def _without_past(
    config: ModelConfig, *, num_lanes: int, tgt_len: int, tail_rows: Sequence[int]
) -> int:
    """All but the projections of the memory and of distances."""
    num_tokens = tgt_len + config.num_added_tokens
    rows = num_lanes * num_tokens
    layer = _queries_and_feed_forward(config, rows) + _keys_and_values(config, rows)
    scores = sum(_scores_and_mixing(config, rows * (past + num_tokens)) for past in _pasts(config))
    ends = _ends(config, num_lanes * tgt_len) + _tails(config, tail_rows)
    return config.n_layer * layer + scores + ends


def window_flops(config: ModelConfig, *, window_len: int) -> int:
    """To score one target after `window_len` tokens, which are read as one segment without memory.

    Without the tails of an adaptive softmax.
    """
    layer = _queries_and_feed_forward(config, window_len) + _keys_and_values(config, window_len)
    layer += _scores_and_mixing(config, window_len**2) + _distances(config, window_len)
    # `_ends` counts the embedding of one token.
    return config.n_layer * layer + _one_projection(config, window_len - 1) + _ends(config, 1)


def training_flops(
    config: ModelConfig,
    *,
    num_lanes: int,
    tgt_len: int,
    tail_rows: Sequence[int] = (),
    num_segments: int = 1,
) -> int:
    """Forward and backward. The backward of a product is two products, for both of its factors.

    `num_segments`: the tokens are read as so many segments, of which only the first has a memory
    without gradient.

    The inputs of two products need no gradient, the projections of distances and of memory: their
    backward is one product. Before LayerNorm the memory has no gradient, but its gains and biases.
    """
    segment_len = tgt_len // num_segments
    # The rows of tails count once, however they are divided.
    forward, without_tails = (
        forward_flops(config, num_lanes=num_lanes, tgt_len=segment_len, tail_rows=rows)
        for rows in (tail_rows, ())
    )
    forward += (num_segments - 1) * without_tails
    num_tokens = segment_len + config.num_added_tokens
    distances = sum(_distances(config, past + num_tokens) for past in _pasts(config))
    has_gains = config.pre_lnorm and config.norm == "layernorm"
    memory = 0 if has_gains else _memory(config, num_lanes)
    return 3 * forward - memory - num_segments * distances


def _pasts(config: ModelConfig) -> tuple[int, ...]:
    """M of each layer."""
    return memory_kind(config).empty(1, device="meta").num_pasts


def _memory(config: ModelConfig, num_lanes: int) -> int:
    """The projection of the memory's keys and values in all layers."""
    return _keys_and_values(config, num_lanes * sum(_pasts(config)))


def _queries_and_feed_forward(config: ModelConfig, tokens: int) -> int:
    """Per layer: projections of the queries and of the mixed values, the feed-forward."""
    width = config.n_head * config.d_head
    columns = 2 * width + config.d_inner * (3 if config.feed_forward == "swiglu" else 2)
    return 2 * tokens * config.d_model * columns


def _scores_and_mixing(config: ModelConfig, num_pairs: int) -> int:
    """Per layer, for pairs of query and key: queries by keys, weights by values, and queries by
    distances."""
    num_products = 3 if config.encoding.multiplies_distances else 2
    return num_products * 2 * num_pairs * config.n_head * config.d_head


def _keys_and_values(config: ModelConfig, tokens: int) -> int:
    return 2 * tokens * config.d_model * 2 * config.num_kv_heads * config.d_head


def _tails(config: ModelConfig, tail_rows: Sequence[int]) -> int:
    """The softmax within each cluster after the first, for `tail_rows` tokens."""
    total = 0
    for cluster, rows in enumerate(tail_rows, start=1):
        start, stop = config.cluster_bounds[cluster]
        width = config.table_widths[cluster if config.div_val > 1 else 0]
        projection = config.d_model * width if config.has_projection else 0
        total += 2 * rows * (width * (stop - start) + projection)
    return total


def _distances(config: ModelConfig, num_keys: int) -> int:
    """The projection of every distance in a layer, once for all lanes."""
    if not config.encoding.projects_distances:
        return 0
    return 2 * num_keys * config.d_model * config.n_head * config.d_head


def _ends(config: ModelConfig, tokens: int) -> int:
    """The softmax over shortlist and clusters, and the projections of embedding and softmax.

    With `div_val` above 1, every token counts with the width of the first table. The error is
    within half a percent of the total.
    """
    if config.vocab_size is None:
        return 0
    width = config.table_widths[0]
    head = 2 * tokens * width * (config.cluster_bounds[0][1] + len(config.cutoffs))
    return head + 2 * _one_projection(config, tokens)


def _one_projection(config: ModelConfig, tokens: int) -> int:
    """The projection of the embedding or of the softmax; 0 without one."""
    return 2 * tokens * config.d_model * config.table_widths[0] if config.has_projection else 0
