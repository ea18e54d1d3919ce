"""Floating-point operations of a segment, summed over its matrix products.

A multiply-add counts as two operations. Only matrix products count: other operations are small, and
peak FLOP/s figures do not include them. The projection of the memory's keys and values counts; its
share grows with `mem_len`. The tests compare the sums with torch's FlopCounterMode.
"""

from collections.abc import Sequence

from txl_dist.model.config import ModelConfig

# Shapes: B lanes, T segment tokens, M memory tokens, S = M + T keys, D d_model, W = H K


def forward_flops(
    config: ModelConfig, *, num_lanes: int, tgt_len: int, tail_rows: Sequence[int] = ()
) -> int:
    """Operations to score a segment of `num_lanes` x `tgt_len` tokens with a full memory.

    `tail_rows` is the number of targets in each cluster of the adaptive softmax after the first; it
    depends on the text. Without it the count is a lower bound: every token's head, and no tail.
    """
    num_keys = config.mem_len + tgt_len
    memory = config.n_layer * _keys_and_values(config, num_lanes * config.mem_len)
    cached = memory + _distances(config, num_keys)
    return cached + inference_flops(
        config, num_lanes=num_lanes, tgt_len=tgt_len, tail_rows=tail_rows
    )


def inference_flops(
    config: ModelConfig, *, num_lanes: int, tgt_len: int, tail_rows: Sequence[int] = ()
) -> int:
    """As `forward_flops`, with a KVCache: the memory and the distances are already projected."""
    tokens = num_lanes * tgt_len
    num_keys = config.mem_len + tgt_len
    width = config.n_head * config.d_head
    query_and_out = 2 * 2 * tokens * config.d_model * width
    # Queries by keys, weights by values, and queries by distances.
    num_products = 3 if config.encoding.multiplies_distances else 2
    scores_and_mixing = num_products * 2 * tokens * num_keys * width
    feed_forward = 2 * 2 * tokens * config.d_model * config.d_inner
    layer = query_and_out + _keys_and_values(config, tokens) + scores_and_mixing + feed_forward
    return config.n_layer * layer + _ends(config, tokens) + _tails(config, tail_rows)


def training_flops(
    config: ModelConfig, *, num_lanes: int, tgt_len: int, tail_rows: Sequence[int] = ()
) -> int:
    """Forward and backward. The backward of a product is two products, for both of its factors.

    The inputs of two products need no gradient, the projections of distances and of memory: their
    backward is one product. Under `pre_lnorm` the memory passes a norm that does need a gradient.
    """
    forward = forward_flops(config, num_lanes=num_lanes, tgt_len=tgt_len, tail_rows=tail_rows)
    memory = config.n_layer * _keys_and_values(config, num_lanes * config.mem_len)
    memory = 0 if config.pre_lnorm else memory
    return 3 * forward - memory - _distances(config, config.mem_len + tgt_len)


def _keys_and_values(config: ModelConfig, tokens: int) -> int:
    return 2 * tokens * config.d_model * 2 * config.n_head * config.d_head


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
    """The projection of every distance, once per layer for all lanes."""
    if not config.encoding.projects_distances:
        return 0
    return config.n_layer * 2 * num_keys * config.d_model * config.n_head * config.d_head


def _ends(config: ModelConfig, tokens: int) -> int:
    """The softmax over shortlist and clusters, and the projections of embedding and softmax.

    With `div_val` above 1, every token counts with the width of the first table. The error is
    within half a percent of the total.
    """
    width = config.table_widths[0]
    head = 2 * tokens * width * (config.cluster_bounds[0][1] + len(config.cutoffs))
    projections = 2 * 2 * tokens * config.d_model * width if config.has_projection else 0
    return head + projections
