"""Floating-point operations of a segment, counted product by product.

A multiplication with its addition counts as two. Only matrix products count: the rest is small,
and no machine is sold by it. The projection of the memory's keys and values, which a longer memory
makes a larger share, is part of the count. Checked against torch's own counter in the tests.
"""

from txl_dist.model.config import ModelConfig

# Shapes: B lanes, T segment tokens, M memory tokens, S = M + T keys, D d_model, W = H K


def forward_flops(config: ModelConfig, *, num_lanes: int, tgt_len: int) -> int:
    """Operations to score a segment of `num_lanes` x `tgt_len` tokens, memory full.

    With clusters in the vocabulary it is a lower bound: it counts the head for every token and no
    cluster's tail, because how many tokens need one depends on the text.
    """
    tokens = num_lanes * tgt_len
    num_keys = config.mem_len + tgt_len
    width = config.n_head * config.d_head
    query_and_out = 2 * 2 * tokens * config.d_model * width
    key_value = 2 * num_lanes * num_keys * config.d_model * 2 * width
    products_with_keys = 3 if _has_distances(config) else 2
    scores_and_mixing = products_with_keys * 2 * tokens * num_keys * width
    feed_forward = 2 * 2 * tokens * config.d_model * config.d_inner
    layer = query_and_out + key_value + scores_and_mixing + feed_forward
    return config.n_layer * layer + _distances(config, num_keys) + _ends(config, tokens)


def training_flops(config: ModelConfig, *, num_lanes: int, tgt_len: int) -> int:
    """Forward and backward. Backward is two products for one, but for the distances' projection,
    whose input is a constant.
    """
    forward = forward_flops(config, num_lanes=num_lanes, tgt_len=tgt_len)
    return 3 * forward - _distances(config, config.mem_len + tgt_len)


def _has_distances(config: ModelConfig) -> bool:
    """Whether queries are multiplied with distances, beside keys and values."""
    return config.distance_encoding in ("sinusoidal", "shaw")


def _distances(config: ModelConfig, num_keys: int) -> int:
    """Projecting every distance once a layer, for all lanes; only the paper's encoding does."""
    if config.distance_encoding != "sinusoidal":
        return 0
    return config.n_layer * 2 * num_keys * config.d_model * config.n_head * config.d_head


def _ends(config: ModelConfig, tokens: int) -> int:
    """The softmax's head, and the projections where tables have another width than the model."""
    width = config.table_widths[0]
    head = 2 * tokens * width * (config.cluster_bounds[0][1] + len(config.cutoffs))
    projections = 2 * 2 * tokens * config.d_model * width if config.has_projection else 0
    return head + projections
