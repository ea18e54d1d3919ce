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
    return sum(_parts(config, num_lanes, tgt_len)) + _tails(config, tail_rows)


def inference_flops(
    config: ModelConfig, *, num_lanes: int, tgt_len: int, tail_rows: Sequence[int] = ()
) -> int:
    """As `forward_flops`, with `TransformerXL.inference_state`: a cache has already projected the
    memory and the distances."""
    parts = _parts(config, num_lanes, tgt_len)
    counted = parts[2:] if config.memory_facts.keys_are_tokens else parts
    return sum(counted) + _tails(config, tail_rows)


def window_flops(config: ModelConfig, *, window_len: int) -> int:
    """To score one target after `window_len` tokens, which are read as one segment without memory.

    Without the tails of an adaptive softmax.
    """
    layer = _layer(config, 1, window_len, 0) + _distances(config, window_len)
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
    memory, distances, rest = _parts(config, num_lanes, tgt_len // num_segments)
    forward = num_segments * (memory + distances + rest) + _tails(config, tail_rows)
    has_gains = config.pre_lnorm and config.norm == "layernorm"
    return 3 * forward - (0 if has_gains else memory) - num_segments * distances


def _parts(config: ModelConfig, num_lanes: int, tgt_len: int) -> tuple[int, int, int]:
    """The projections of the memory's keys and values, of distances, and all else but tails."""
    num_tokens = tgt_len + config.num_added_tokens
    pasts = memory_kind(config).empty(1, device="meta").num_pasts
    key_value = 2 * config.num_kv_heads * config.d_head
    return (
        2 * num_lanes * sum(pasts) * config.d_model * key_value,
        sum(_distances(config, past + num_tokens) for past in pasts),
        sum(_layer(config, num_lanes, num_tokens, past) for past in pasts)
        + _ends(config, num_lanes * tgt_len),
    )


def _layer(config: ModelConfig, num_lanes: int, num_tokens: int, num_past: int) -> int:
    """Per token: projections of queries, keys, values and mixed values, the feed-forward.

    Per query and key: queries by keys, weights by values, and queries by distances.
    """
    width, num_inner = config.n_head * config.d_head, 3 if config.feed_forward == "swiglu" else 2
    columns = 2 * (width + config.num_kv_heads * config.d_head) + num_inner * config.d_inner
    num_products = 3 if config.encoding.multiplies_distances else 2
    per_token = config.d_model * columns + num_products * width * (num_past + num_tokens)
    return 2 * num_lanes * num_tokens * per_token


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
