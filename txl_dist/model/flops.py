"""Floating-point operations of a segment, counted product by product.

A multiplication with its addition counts as two. Only matrix products count: the rest is small,
and no machine is sold by it. The projection of the memory's keys and values, which a longer memory
makes a larger share, is part of the count. Checked against torch's own counter in the tests.
"""

from collections.abc import Sequence

from txl_dist.model.config import ModelConfig

# Shapes: B lanes, T segment tokens, M memory tokens, S = M + T keys, D d_model, W = H K


def forward_flops(
    config: ModelConfig, *, num_lanes: int, tgt_len: int, tail_rows: Sequence[int] = ()
) -> int:
    """Operations to score a segment of `num_lanes` x `tgt_len` tokens, memory full.

    With clusters in the vocabulary, `tail_rows` says how many tokens need each cluster's tail; that
    depends on the text. Without it the count is a lower bound: the head for every token, no tail.
    """
    num_keys = config.mem_len + tgt_len
    memory = config.n_layer * _keys_and_values(config, num_lanes * config.mem_len)
    kept = memory + _distances(config, num_keys)
    return kept + inference_flops(config, num_lanes=num_lanes, tgt_len=tgt_len, tail_rows=tail_rows)


def inference_flops(
    config: ModelConfig, *, num_lanes: int, tgt_len: int, tail_rows: Sequence[int] = ()
) -> int:
    """As `forward_flops`, where keys and values of the memory and distances are kept."""
    tokens = num_lanes * tgt_len
    num_keys = config.mem_len + tgt_len
    width = config.n_head * config.d_head
    query_and_out = 2 * 2 * tokens * config.d_model * width
    products_with_keys = 3 if _has_distances(config) else 2
    scores_and_mixing = products_with_keys * 2 * tokens * num_keys * width
    feed_forward = 2 * 2 * tokens * config.d_model * config.d_inner
    layer = query_and_out + _keys_and_values(config, tokens) + scores_and_mixing + feed_forward
    return config.n_layer * layer + _ends(config, tokens) + _tails(config, tail_rows)


def training_flops(
    config: ModelConfig, *, num_lanes: int, tgt_len: int, tail_rows: Sequence[int] = ()
) -> int:
    """Forward and backward. Backward is two products for one, but for the projections of distances
    and of the memory: their inputs need no gradient, unless a norm stands between (`pre_lnorm`).
    """
    forward = forward_flops(config, num_lanes=num_lanes, tgt_len=tgt_len, tail_rows=tail_rows)
    memory = config.n_layer * _keys_and_values(config, num_lanes * config.mem_len)
    memory = 0 if config.pre_lnorm else memory
    return 3 * forward - memory - _distances(config, config.mem_len + tgt_len)


def _keys_and_values(config: ModelConfig, tokens: int) -> int:
    return 2 * tokens * config.d_model * 2 * config.n_head * config.d_head


def _tails(config: ModelConfig, tail_rows: Sequence[int]) -> int:
    """The softmax's clusters beside the shortlist, each for the tokens that need it."""
    total = 0
    for cluster, rows in enumerate(tail_rows, start=1):
        start, stop = config.cluster_bounds[cluster]
        width = config.table_widths[cluster if config.div_val > 1 else 0]
        projection = config.d_model * width if config.has_projection else 0
        total += 2 * rows * (width * (stop - start) + projection)
    return total


def _has_distances(config: ModelConfig) -> bool:
    """Whether queries are multiplied with distances, beside keys and values."""
    return config.distance_encoding in ("sinusoidal", "shaw")


def _distances(config: ModelConfig, num_keys: int) -> int:
    """Projecting every distance once a layer, for all lanes; only the paper's encoding does."""
    if config.distance_encoding != "sinusoidal":
        return 0
    return config.n_layer * 2 * num_keys * config.d_model * config.n_head * config.d_head


def _ends(config: ModelConfig, tokens: int) -> int:
    """The softmax's head, and the projections where tables have another width than the model.

    With `div_val` above 1 every token counts at its first table's width, which is within half a
    percent of the whole.
    """
    width = config.table_widths[0]
    head = 2 * tokens * width * (config.cluster_bounds[0][1] + len(config.cutoffs))
    projections = 2 * 2 * tokens * config.d_model * width if config.has_projection else 0
    return head + projections
