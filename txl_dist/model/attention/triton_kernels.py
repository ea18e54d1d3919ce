"""The kernels of `attention: triton` (attention/triton.py): relative attention, tile by tile.

Scores by distance are an argument, [H, C, B, N, W] with C = 8: query t = C n + j is in class j and
row n. Key s of that query is in column s + C (N - 1 - n), so the relative shift is an offset of the
row, and a multiple of C: rows of a tile begin at multiples of 16 bytes, in bf16, and are loaded and
stored 16 bytes at a time. Scores that are equal for all queries have row stride 0.

Keys, and values, are one matrix or two, one of the memory and one of the segment, with any strides.
So projections [B, N, 2, H, K] are read where they are, and their gradients are written like them.

A query sees the keys at distances 0 to its reach (visibility.py). The softmax is computed online,
with accumulation in fp32 (float64 for float64 inputs). No kernel uses atomics: every output element
is stored exactly once, so results repeat bit for bit.

Sources: Dao et al. 2022, arXiv:2205.14135, algorithms 1 and 4; Dao 2023, arXiv:2307.08691,
section 3.1 (one pass over key blocks for dk and dv, one over query blocks for dq).
"""

import math

import triton
import triton.language as tl

from txl_dist.model.attention.triton_tiles import (
    NUM_CLASSES,
    distance_tile,
    first_free_key,
    first_key,
    load_keep,
    load_keys,
    load_reach,
    load_rows,
    matrices_at,
    store_keys,
    store_rows,
    store_zeros_beside,
    tile_scores,
)

# Shapes: B lanes, T segment tokens (num_queries), M memory tokens (mem_len), S = M + T keys,
# H heads, K d_head, N = ceil(T / C) rows of W columns of scores by distance (num_columns).
# Tiles have BLOCK_T queries, a multiple of C, BLOCK_S keys and BLOCK_K channels.

LOWEST_SCORE = tl.constexpr(-1.0e30)
"""The initial maximum of a row. Finite, because of a row without visible keys in its first tiles:
exp(-inf - LOWEST_SCORE) is 0, and exp(-inf + inf) would be NaN."""


LOG2_E = tl.constexpr(math.log2(math.e))
"""exp(x) is exp2(LOG2_E x): one multiplication and addition, and one instruction of the GPU."""


@triton.jit
def forward_kernel(
    q, k1, v1, k2, v2, by_distance, reach, keep, out, logsumexp,
    stride_k1h, stride_k1b, stride_k1s, stride_v1h, stride_v1b, stride_v1s,
    stride_k2h, stride_k2b, stride_k2s, stride_v2h, stride_v2b, stride_v2s,
    stride_dh, stride_dj, stride_db, stride_dn,
    num_heads, num_lanes, num_queries, mem_len, d_head, num_columns,
    GROUP: tl.constexpr, SPLIT: tl.constexpr, HAS_DISTANCE: tl.constexpr,
    HAS_KEEP: tl.constexpr, KEEP_FACTOR: tl.constexpr, ACC: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Outputs [B, T, H, K] and logsumexp [H, B, T] of BLOCK_T queries of one head and lane.

    The logarithm is binary: log2(sum of exp(score)) over keys.
    """
    lane, head = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    row, num_keys = head * num_lanes + lane, mem_len + num_queries
    q += row * num_queries * d_head
    k1, v1, k2, v2 = matrices_at(
        head // GROUP, lane, k1, v1, k2, v2, stride_k1h, stride_k1b, stride_v1h, stride_v1b,
        stride_k2h, stride_k2b, stride_v2h, stride_v2b,
    )  # fmt: skip
    by_distance += head * stride_dh + lane * stride_db
    keep += (lane * num_heads + head) * num_queries * ((num_keys + 15) // 16)
    out += (lane * num_queries * num_heads + head) * d_head

    first = tl.program_id(0) * BLOCK_T
    t = first + tl.arange(0, BLOCK_T)
    reach_T = load_reach(reach + lane * num_queries, t, num_queries)
    q_TK = load_rows(q, t, d_head, num_queries, d_head, BLOCK_K)
    highest = tl.full([BLOCK_T], LOWEST_SCORE, ACC)
    total = tl.zeros([BLOCK_T], ACC)
    mixed = tl.zeros([BLOCK_T, BLOCK_K], ACC)
    start = first_key(t, reach_T, num_queries, mem_len, BLOCK_S)
    free_start = first_free_key(t, reach_T, num_queries, mem_len)
    for s_first in range(start, tl.minimum(mem_len + first + BLOCK_T, num_keys), BLOCK_S):
        s = s_first + tl.arange(0, BLOCK_S)
        k_SK = load_keys(
            k1, k2, s_first, stride_k1s, stride_k2s, mem_len, num_keys, d_head,
            BLOCK_S, BLOCK_K, SPLIT,
        )  # fmt: skip
        v_SK = load_keys(
            v1, v2, s_first, stride_v1s, stride_v2s, mem_len, num_keys, d_head,
            BLOCK_S, BLOCK_K, SPLIT,
        )  # fmt: skip
        is_free = (s_first >= free_start) & (s_first + BLOCK_S - 1 <= mem_len + first)
        score = tile_scores(
            q_TK, k_SK, t[:, None], s[None, :], reach_T[:, None], is_free, by_distance, stride_dj,
            stride_dn, num_queries, mem_len, num_columns, HAS_DISTANCE, ACC, PRECISION,
        )  # fmt: skip
        new_highest = tl.maximum(highest, tl.max(score, 1) * LOG2_E)
        shrink = tl.exp2(highest - new_highest)
        weight = tl.exp2(score * LOG2_E - new_highest[:, None])
        total = total * shrink + tl.sum(weight, 1)
        if HAS_KEEP:
            kept = load_keep(
                keep, t, s_first, num_queries, num_keys, BLOCK_T, BLOCK_S,
                k_SK.dtype.primitive_bitwidth > 16,
            )  # fmt: skip
            weight = tl.where(kept, weight, 0.0)
        mixed *= shrink[:, None]
        mixed += tl.dot(weight.to(v_SK.dtype), v_SK, input_precision=PRECISION, out_dtype=ACC)
        highest = new_highest
    total = tl.where(t < num_queries, total, 1.0)
    factor = (KEEP_FACTOR if HAS_KEEP else 1.0) / total
    store_rows(out, t, num_heads * d_head, num_queries, d_head, mixed * factor[:, None], BLOCK_K)
    pointers = logsumexp + row * num_queries + t
    tl.store(pointers, highest + tl.log2(total), mask=t < num_queries)


@triton.jit
def query_gradient_kernel(
    q, k1, v1, k2, v2, by_distance, reach, keep, out, logsumexp,
    d_out, mean, d_q, d_by_distance,
    stride_k1h, stride_k1b, stride_k1s, stride_v1h, stride_v1b, stride_v1s,
    stride_k2h, stride_k2b, stride_k2s, stride_v2h, stride_v2b, stride_v2s,
    stride_dh, stride_dj, stride_db, stride_dn,
    num_heads, num_lanes, num_queries, mem_len, d_head, num_columns,
    GROUP: tl.constexpr, SPLIT: tl.constexpr, HAS_DISTANCE: tl.constexpr,
    WANTS_DISTANCE_GRADIENT: tl.constexpr,
    HAS_KEEP: tl.constexpr, KEEP_FACTOR: tl.constexpr, ACC: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Of BLOCK_T queries: d_q, the gradient of the scores by distance, and `mean` [H, B, T].

    `mean` is the sum of weight * d_weight over keys. It equals that of out * d_out over channels.
    """
    lane, head = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    row, num_keys = head * num_lanes + lane, mem_len + num_queries
    q += row * num_queries * d_head
    d_q += row * num_queries * d_head
    k1, v1, k2, v2 = matrices_at(
        head // GROUP, lane, k1, v1, k2, v2, stride_k1h, stride_k1b, stride_v1h, stride_v1b,
        stride_k2h, stride_k2b, stride_v2h, stride_v2b,
    )  # fmt: skip
    by_distance += head * stride_dh + lane * stride_db
    num_rows = tl.cdiv(num_queries, NUM_CLASSES)
    class_columns = (num_rows * num_columns).to(tl.int64) * num_lanes
    d_by_distance += head * NUM_CLASSES * class_columns + lane * num_rows * num_columns
    keep += (lane * num_heads + head) * num_queries * ((num_keys + 15) // 16)
    out += (lane * num_queries * num_heads + head) * d_head
    d_out += (lane * num_queries * num_heads + head) * d_head

    first = tl.program_id(0) * BLOCK_T
    t = first + tl.arange(0, BLOCK_T)
    reach_T = load_reach(reach + lane * num_queries, t, num_queries)
    q_TK = load_rows(q, t, d_head, num_queries, d_head, BLOCK_K)
    out_TK = load_rows(out, t, num_heads * d_head, num_queries, d_head, BLOCK_K)
    d_out_TK = load_rows(d_out, t, num_heads * d_head, num_queries, d_head, BLOCK_K)
    mean_T = tl.sum(out_TK.to(ACC) * d_out_TK.to(ACC), 1)
    tl.store(mean + row * num_queries + t, mean_T, mask=t < num_queries)
    # Infinite for rows of padding, so that their weights are 0 also where nothing is masked.
    logsumexp_T = tl.load(
        logsumexp + row * num_queries + t, mask=t < num_queries, other=float("inf")
    )

    start = first_key(t, reach_T, num_queries, mem_len, BLOCK_S)
    free_start = first_free_key(t, reach_T, num_queries, mem_len)
    stop = tl.minimum(mem_len + first + BLOCK_T, num_keys)
    if WANTS_DISTANCE_GRADIENT:
        store_zeros_beside(
            d_by_distance, t, first, start, stop, class_columns, num_queries, num_columns,
            BLOCK_T, BLOCK_S,
        )  # fmt: skip

    d_q_TK = tl.zeros([BLOCK_T, BLOCK_K], ACC)
    for s_first in range(start, stop, BLOCK_S):
        s = s_first + tl.arange(0, BLOCK_S)
        k_SK = load_keys(
            k1, k2, s_first, stride_k1s, stride_k2s, mem_len, num_keys, d_head,
            BLOCK_S, BLOCK_K, SPLIT,
        )  # fmt: skip
        v_SK = load_keys(
            v1, v2, s_first, stride_v1s, stride_v2s, mem_len, num_keys, d_head,
            BLOCK_S, BLOCK_K, SPLIT,
        )  # fmt: skip
        is_free = (s_first >= free_start) & (s_first + BLOCK_S - 1 <= mem_len + first)
        score = tile_scores(
            q_TK, k_SK, t[:, None], s[None, :], reach_T[:, None], is_free, by_distance, stride_dj,
            stride_dn, num_queries, mem_len, num_columns, HAS_DISTANCE, ACC, PRECISION,
        )  # fmt: skip
        weight = tl.exp2(score * LOG2_E - logsumexp_T[:, None])
        d_weight = tl.dot(d_out_TK, tl.trans(v_SK), input_precision=PRECISION, out_dtype=ACC)
        if HAS_KEEP:
            kept = load_keep(
                keep, t, s_first, num_queries, num_keys, BLOCK_T, BLOCK_S,
                k_SK.dtype.primitive_bitwidth > 16,
            )  # fmt: skip
            d_weight = tl.where(kept, d_weight * KEEP_FACTOR - mean_T[:, None], -mean_T[:, None])
        else:
            d_weight -= mean_T[:, None]
        d_score = (weight * d_weight).to(k_SK.dtype)
        d_q_TK += tl.dot(d_score, k_SK, input_precision=PRECISION, out_dtype=ACC)
        if WANTS_DISTANCE_GRADIENT:
            place, exists = distance_tile(
                t[:, None], s[None, :], class_columns, num_columns, num_queries, num_columns
            )
            d_score = d_score.to(d_by_distance.dtype.element_ty)
            tl.store(d_by_distance + place, d_score, mask=exists)
    store_rows(d_q, t, d_head, num_queries, d_head, d_q_TK, BLOCK_K)


@triton.jit
def key_value_gradient_kernel(
    q, k1, v1, k2, v2, by_distance, reach, keep, logsumexp, d_out, mean,
    d_k1, d_v1, d_k2, d_v2,
    stride_k1h, stride_k1b, stride_k1s, stride_v1h, stride_v1b, stride_v1s,
    stride_k2h, stride_k2b, stride_k2s, stride_v2h, stride_v2b, stride_v2s,
    stride_dh, stride_dj, stride_db, stride_dn,
    num_heads, num_lanes, num_queries, mem_len, d_head, num_columns,
    GROUP: tl.constexpr, SPLIT: tl.constexpr, HAS_DISTANCE: tl.constexpr,
    HAS_KEEP: tl.constexpr, KEEP_FACTOR: tl.constexpr, ACC: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """d_k and d_v of BLOCK_S keys, with strides of k and v. Tiles are transposed."""
    lane, head = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    num_keys = mem_len + num_queries
    k1, v1, k2, v2 = matrices_at(
        head, lane, k1, v1, k2, v2, stride_k1h, stride_k1b, stride_v1h, stride_v1b,
        stride_k2h, stride_k2b, stride_v2h, stride_v2b,
    )  # fmt: skip
    d_k1, d_v1, d_k2, d_v2 = matrices_at(
        head, lane, d_k1, d_v1, d_k2, d_v2, stride_k1h, stride_k1b, stride_v1h, stride_v1b,
        stride_k2h, stride_k2b, stride_v2h, stride_v2b,
    )  # fmt: skip

    first = tl.program_id(0) * BLOCK_S
    s = first + tl.arange(0, BLOCK_S)
    k_SK = load_keys(
        k1, k2, first, stride_k1s, stride_k2s, mem_len, num_keys, d_head,
        BLOCK_S, BLOCK_K, SPLIT,
    )  # fmt: skip
    v_SK = load_keys(
        v1, v2, first, stride_v1s, stride_v2s, mem_len, num_keys, d_head,
        BLOCK_S, BLOCK_K, SPLIT,
    )  # fmt: skip
    d_k_SK = tl.zeros([BLOCK_S, BLOCK_K], ACC)
    d_v_SK = tl.zeros([BLOCK_S, BLOCK_K], ACC)
    # Key s is in the future of queries before s - M.
    start = tl.maximum(first - mem_len, 0) // BLOCK_T * BLOCK_T
    for member in range(GROUP):  # the heads of queries of this head of keys
        query_head = head * GROUP + member
        row = query_head * num_lanes + lane
        out_start = (lane * num_queries * num_heads + query_head) * d_head
        distance_start = query_head * stride_dh + lane * stride_db
        keep_start = (lane * num_heads + query_head) * num_queries * ((num_keys + 15) // 16)
        for t_first in range(start, num_queries, BLOCK_T):
            t = t_first + tl.arange(0, BLOCK_T)
            reach_T = load_reach(reach + lane * num_queries, t, num_queries)
            q_TK = load_rows(
                q + row * num_queries * d_head, t, d_head, num_queries, d_head, BLOCK_K
            )
            d_out_TK = load_rows(
                d_out + out_start, t, num_heads * d_head, num_queries, d_head, BLOCK_K
            )
            pointers = row * num_queries + t
            logsumexp_T = tl.load(logsumexp + pointers, mask=t < num_queries, other=float("inf"))
            mean_T = tl.load(mean + pointers, mask=t < num_queries, other=0.0)
            free_start = first_free_key(t, reach_T, num_queries, mem_len)
            is_free = (first >= free_start) & (first + BLOCK_S - 1 <= mem_len + t_first)
            score = tile_scores(
                k_SK, q_TK, t[None, :], s[:, None], reach_T[None, :], is_free,
                by_distance + distance_start, stride_dj, stride_dn, num_queries, mem_len,
                num_columns, HAS_DISTANCE, ACC, PRECISION,
            )  # fmt: skip
            weight = tl.exp2(score * LOG2_E - logsumexp_T[None, :])
            d_weight = tl.dot(v_SK, tl.trans(d_out_TK), input_precision=PRECISION, out_dtype=ACC)
            used = weight
            if HAS_KEEP:
                kept_TS = load_keep(
                    keep + keep_start, t, first, num_queries, num_keys, BLOCK_T, BLOCK_S,
                    k_SK.dtype.primitive_bitwidth > 16,
                )  # fmt: skip
                kept = tl.trans(kept_TS)
                used = tl.where(kept, weight, 0.0)
                d_weight = tl.where(kept, d_weight * KEEP_FACTOR, 0.0)
            d_weight -= mean_T[None, :]
            used = used.to(v_SK.dtype)
            d_v_SK += tl.dot(used, d_out_TK, input_precision=PRECISION, out_dtype=ACC)
            d_score = (weight * d_weight).to(q_TK.dtype)
            d_k_SK += tl.dot(d_score, q_TK, input_precision=PRECISION, out_dtype=ACC)
    store_keys(
        d_k1, d_k2, first, stride_k1s, stride_k2s, mem_len, num_keys, d_head, d_k_SK,
        BLOCK_S, BLOCK_K, SPLIT,
    )  # fmt: skip
    if HAS_KEEP:
        d_v_SK *= KEEP_FACTOR
    store_keys(
        d_v1, d_v2, first, stride_v1s, stride_v2s, mem_len, num_keys, d_head, d_v_SK,
        BLOCK_S, BLOCK_K, SPLIT,
    )  # fmt: skip
