"""The kernels of `attention: triton` (attention/triton.py): relative attention, tile by tile.

Scores by distance are an argument, [H, B, T, S], column c for distance S - 1 - c. Query t has the
distance M + t - s to key s, so the score is in column T - 1 - t + s, at address

    t * stride + T - 1 - t + s  =  t * (stride - 1) + (T - 1) + s

with `stride` numbers per row. So the relative shift is a row stride of S - 1. Scores that are equal
for all queries have stride 0, and are read with row stride -1.

A query sees the keys at distances 0 to its reach (visibility.py). The softmax is computed online,
with accumulation in fp32 (float64 for float64 inputs). No kernel uses atomics: every output element
is stored exactly once, so results repeat bit for bit.

Sources: Dao et al. 2022, arXiv:2205.14135, algorithms 1 and 4; Dao 2023, arXiv:2307.08691,
section 3.1 (one pass over key blocks for dk and dv, one over query blocks for dq).
"""

import triton
import triton.language as tl

# Shapes: B lanes, T segment tokens (num_queries), M memory tokens (mem_len), S = M + T keys,
# H heads, K d_head. Tiles have BLOCK_T queries, BLOCK_S keys and BLOCK_K channels.

LOWEST_SCORE = tl.constexpr(-1.0e30)
"""The initial maximum of a row. Finite, because of a row without visible keys in its first tiles:
exp(-inf - LOWEST_SCORE) is 0, and exp(-inf + inf) would be NaN."""


@triton.jit
def load_rows(matrix, row, stride, num_rows, d_head, BLOCK_K: tl.constexpr):
    """Rows of a matrix with `d_head` columns, padded with zeros."""
    column = tl.arange(0, BLOCK_K)
    inside = (row[:, None] < num_rows) & (column[None, :] < d_head)
    return tl.load(matrix + row[:, None] * stride + column[None, :], mask=inside, other=0.0)


@triton.jit
def store_rows(matrix, row, stride, num_rows, d_head, values, BLOCK_K: tl.constexpr):
    """The opposite of `load_rows`, in the dtype of the matrix."""
    column = tl.arange(0, BLOCK_K)
    inside = (row[:, None] < num_rows) & (column[None, :] < d_head)
    pointers = matrix + row[:, None] * stride + column[None, :]
    tl.store(pointers, values.to(matrix.dtype.element_ty), mask=inside)


@triton.jit
def load_reach(reach, t, num_queries):
    """The reach of queries. Rows of padding see nothing."""
    return tl.load(reach + t, mask=t < num_queries, other=-1)


@triton.jit
def masked_scores(
    left, right, t, s, reach, by_distance, distance_stride, num_queries, mem_len,
    HAS_DISTANCE: tl.constexpr, ACC: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A tile of scores, minus infinity where the query does not see the key.

    `left` and `right` are queries and keys, or keys and queries for transposed scores; `t`, `s`
    and `reach` are shaped to broadcast to the tile.
    """
    score = tl.dot(left, tl.trans(right), input_precision=PRECISION, out_dtype=ACC)
    distance = mem_len + t - s
    # Also false for keys beyond the last: they are in the future of every query.
    visible = (distance >= 0) & (distance <= reach)
    if HAS_DISTANCE:
        pointers = by_distance + t * (distance_stride - 1) + (num_queries - 1) + s
        score += tl.load(pointers, mask=visible, other=0.0)
    return tl.where(visible, score, float("-inf"))


@triton.jit
def load_keep(
    keep, t, s_first, num_queries, num_keys, BLOCK_T: tl.constexpr, BLOCK_S: tl.constexpr,
    IS_WIDE: tl.constexpr,
):  # fmt: skip
    """Whether dropout keeps the weights of a tile, [BLOCK_T, BLOCK_S].

    Every query has ceil(S / 16) words of 16 bits (dropout.py, `KeepBits`). `s_first` and BLOCK_S
    are multiples of 16. `IS_WIDE`: the weights will be multiplied in more than 16 bits.
    """
    num_words = (num_keys + 15) // 16
    word = s_first // 16 + tl.arange(0, BLOCK_S // 16)
    inside = (t[:, None] < num_queries) & (word[None, :] < num_words)
    words = tl.load(keep + t[:, None] * num_words + word[None, :], mask=inside, other=0)
    repeated = tl.broadcast_to(words[:, :, None], [BLOCK_T, BLOCK_S // 16, 16])
    bit = tl.arange(0, BLOCK_S) % 16
    kept = (repeated.reshape([BLOCK_T, BLOCK_S]).to(tl.int32) >> bit[None, :]) & 1
    if IS_WIDE:
        # triton 3.7 lays out the operand of a product for the narrowest load that it depends on:
        # with int16, products of float64 do not compile, and those of fp32 are slower. A sum of
        # one element ends the dependency.
        kept = tl.sum(kept[:, :, None], 2)
    return kept == 1


@triton.jit
def first_key(t, reach, num_queries, mem_len, BLOCK_S: tl.constexpr):
    """The first key of the first tile that any of these queries sees."""
    oldest = tl.where(t < num_queries, mem_len + t - reach, mem_len + num_queries)
    return tl.maximum(tl.min(oldest, 0), 0) // BLOCK_S * BLOCK_S


@triton.jit
def forward_kernel(
    q, k, v, by_distance, reach, keep, out, logsumexp,
    stride_kh, stride_kb, stride_ks, stride_vh, stride_vb, stride_vs,
    stride_dh, stride_db, stride_dt,
    num_heads, num_lanes, num_queries, mem_len, d_head,
    HAS_DISTANCE: tl.constexpr, HAS_KEEP: tl.constexpr, KEEP_FACTOR: tl.constexpr,
    ACC: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Outputs [B, T, H, K] and logsumexp [H, B, T] of BLOCK_T queries of one head and lane."""
    head = (tl.program_id(1) // num_lanes).to(tl.int64)
    lane = (tl.program_id(1) % num_lanes).to(tl.int64)
    row, num_keys = head * num_lanes + lane, mem_len + num_queries
    q += row * num_queries * d_head
    k += head * stride_kh + lane * stride_kb
    v += head * stride_vh + lane * stride_vb
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
    for s_first in range(start, tl.minimum(mem_len + first + BLOCK_T, num_keys), BLOCK_S):
        s = s_first + tl.arange(0, BLOCK_S)
        k_SK = load_rows(k, s, stride_ks, num_keys, d_head, BLOCK_K)
        v_SK = load_rows(v, s, stride_vs, num_keys, d_head, BLOCK_K)
        score = masked_scores(
            q_TK, k_SK, t[:, None], s[None, :], reach_T[:, None], by_distance, stride_dt,
            num_queries, mem_len, HAS_DISTANCE, ACC, PRECISION,
        )  # fmt: skip
        new_highest = tl.maximum(highest, tl.max(score, 1))
        shrink = tl.exp(highest - new_highest)
        weight = tl.exp(score - new_highest[:, None])
        total = total * shrink + tl.sum(weight, 1)
        if HAS_KEEP:
            kept = load_keep(
                keep, t, s_first, num_queries, num_keys, BLOCK_T, BLOCK_S,
                k_SK.dtype.primitive_bitwidth > 16,
            )  # fmt: skip
            weight = tl.where(kept, weight * KEEP_FACTOR, 0.0)
        mixed *= shrink[:, None]
        mixed += tl.dot(weight.to(v_SK.dtype), v_SK, input_precision=PRECISION, out_dtype=ACC)
        highest = new_highest
    total = tl.where(t < num_queries, total, 1.0)
    store_rows(out, t, num_heads * d_head, num_queries, d_head, mixed / total[:, None], BLOCK_K)
    pointers = logsumexp + row * num_queries + t
    tl.store(pointers, highest + tl.log(total), mask=t < num_queries)


@triton.jit
def query_gradient_kernel(
    q, k, v, by_distance, reach, keep, out, logsumexp, d_out, mean, d_q, d_by_distance,
    stride_kh, stride_kb, stride_ks, stride_vh, stride_vb, stride_vs,
    stride_dh, stride_db, stride_dt,
    num_heads, num_lanes, num_queries, mem_len, d_head,
    HAS_DISTANCE: tl.constexpr, WANTS_DISTANCE_GRADIENT: tl.constexpr,
    HAS_KEEP: tl.constexpr, KEEP_FACTOR: tl.constexpr, ACC: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Of BLOCK_T queries: d_q, the gradient of the scores by distance, and `mean` [H, B, T].

    `mean` is the sum of weight * d_weight over keys. It equals that of out * d_out over channels.
    """
    head = (tl.program_id(1) // num_lanes).to(tl.int64)
    lane = (tl.program_id(1) % num_lanes).to(tl.int64)
    row, num_keys = head * num_lanes + lane, mem_len + num_queries
    q += row * num_queries * d_head
    d_q += row * num_queries * d_head
    k += head * stride_kh + lane * stride_kb
    v += head * stride_vh + lane * stride_vb
    by_distance += head * stride_dh + lane * stride_db
    d_by_distance += row * num_queries * num_keys
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
    logsumexp_T = tl.load(logsumexp + row * num_queries + t, mask=t < num_queries, other=0.0)

    start = first_key(t, reach_T, num_queries, mem_len, BLOCK_S)
    if WANTS_DISTANCE_GRADIENT:
        # Distances that no key has, or only keys before `start`. The loop below stores the others.
        row_stop = num_queries - 1 - t + start
        for c_first in range(0, num_queries - 1 - first + start, BLOCK_S):
            c = c_first + tl.arange(0, BLOCK_S)
            unreached = (t[:, None] < num_queries) & (c[None, :] < row_stop[:, None])
            zeros = tl.zeros([BLOCK_T, BLOCK_S], d_by_distance.dtype.element_ty)
            tl.store(d_by_distance + t[:, None] * num_keys + c[None, :], zeros, mask=unreached)

    d_q_TK = tl.zeros([BLOCK_T, BLOCK_K], ACC)
    for s_first in range(start, tl.minimum(mem_len + first + BLOCK_T, num_keys), BLOCK_S):
        s = s_first + tl.arange(0, BLOCK_S)
        k_SK = load_rows(k, s, stride_ks, num_keys, d_head, BLOCK_K)
        v_SK = load_rows(v, s, stride_vs, num_keys, d_head, BLOCK_K)
        score = masked_scores(
            q_TK, k_SK, t[:, None], s[None, :], reach_T[:, None], by_distance, stride_dt,
            num_queries, mem_len, HAS_DISTANCE, ACC, PRECISION,
        )  # fmt: skip
        weight = tl.exp(score - logsumexp_T[:, None])
        d_weight = tl.dot(d_out_TK, tl.trans(v_SK), input_precision=PRECISION, out_dtype=ACC)
        if HAS_KEEP:
            kept = load_keep(
                keep, t, s_first, num_queries, num_keys, BLOCK_T, BLOCK_S,
                k_SK.dtype.primitive_bitwidth > 16,
            )  # fmt: skip
            d_weight = tl.where(kept, d_weight * KEEP_FACTOR, 0.0)
        d_score = (weight * (d_weight - mean_T[:, None])).to(k_SK.dtype)
        d_q_TK += tl.dot(d_score, k_SK, input_precision=PRECISION, out_dtype=ACC)
        if WANTS_DISTANCE_GRADIENT:
            pointers = d_by_distance + t[:, None] * (num_keys - 1) + (num_queries - 1) + s[None, :]
            not_future = (t[:, None] < num_queries) & (s[None, :] <= mem_len + t[:, None])
            tl.store(pointers, d_score.to(d_by_distance.dtype.element_ty), mask=not_future)
    store_rows(d_q, t, d_head, num_queries, d_head, d_q_TK, BLOCK_K)


@triton.jit
def key_value_gradient_kernel(
    q, k, v, by_distance, reach, keep, logsumexp, d_out, mean, d_k, d_v,
    stride_kh, stride_kb, stride_ks, stride_vh, stride_vb, stride_vs,
    stride_dh, stride_db, stride_dt,
    num_heads, num_lanes, num_queries, mem_len, d_head,
    HAS_DISTANCE: tl.constexpr, HAS_KEEP: tl.constexpr, KEEP_FACTOR: tl.constexpr,
    ACC: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """d_k and d_v [H, B, S, K] of BLOCK_S keys. Tiles are transposed: keys by queries."""
    head = (tl.program_id(1) // num_lanes).to(tl.int64)
    lane = (tl.program_id(1) % num_lanes).to(tl.int64)
    row, num_keys = head * num_lanes + lane, mem_len + num_queries
    q += row * num_queries * d_head
    k += head * stride_kh + lane * stride_kb
    v += head * stride_vh + lane * stride_vb
    d_k += row * num_keys * d_head
    d_v += row * num_keys * d_head
    by_distance += head * stride_dh + lane * stride_db
    keep += (lane * num_heads + head) * num_queries * ((num_keys + 15) // 16)
    d_out += (lane * num_queries * num_heads + head) * d_head

    first = tl.program_id(0) * BLOCK_S
    s = first + tl.arange(0, BLOCK_S)
    k_SK = load_rows(k, s, stride_ks, num_keys, d_head, BLOCK_K)
    v_SK = load_rows(v, s, stride_vs, num_keys, d_head, BLOCK_K)
    d_k_SK = tl.zeros([BLOCK_S, BLOCK_K], ACC)
    d_v_SK = tl.zeros([BLOCK_S, BLOCK_K], ACC)
    # Key s is in the future of queries before s - M.
    start = tl.maximum(first - mem_len, 0) // BLOCK_T * BLOCK_T
    for t_first in range(start, num_queries, BLOCK_T):
        t = t_first + tl.arange(0, BLOCK_T)
        reach_T = load_reach(reach + lane * num_queries, t, num_queries)
        q_TK = load_rows(q, t, d_head, num_queries, d_head, BLOCK_K)
        d_out_TK = load_rows(d_out, t, num_heads * d_head, num_queries, d_head, BLOCK_K)
        pointers = row * num_queries + t
        logsumexp_T = tl.load(logsumexp + pointers, mask=t < num_queries, other=0.0)
        mean_T = tl.load(mean + pointers, mask=t < num_queries, other=0.0)
        score = masked_scores(
            k_SK, q_TK, t[None, :], s[:, None], reach_T[None, :], by_distance, stride_dt,
            num_queries, mem_len, HAS_DISTANCE, ACC, PRECISION,
        )  # fmt: skip
        weight = tl.exp(score - logsumexp_T[None, :])
        d_weight = tl.dot(v_SK, tl.trans(d_out_TK), input_precision=PRECISION, out_dtype=ACC)
        used = weight
        if HAS_KEEP:
            kept_TS = load_keep(
                keep, t, first, num_queries, num_keys, BLOCK_T, BLOCK_S,
                k_SK.dtype.primitive_bitwidth > 16,
            )  # fmt: skip
            kept = tl.trans(kept_TS)
            used = tl.where(kept, weight * KEEP_FACTOR, 0.0)
            d_weight = tl.where(kept, d_weight * KEEP_FACTOR, 0.0)
        d_v_SK += tl.dot(used.to(v_SK.dtype), d_out_TK, input_precision=PRECISION, out_dtype=ACC)
        d_score = (weight * (d_weight - mean_T[None, :])).to(q_TK.dtype)
        d_k_SK += tl.dot(d_score, q_TK, input_precision=PRECISION, out_dtype=ACC)
    store_rows(d_k, s, d_head, num_keys, d_head, d_k_SK, BLOCK_K)
    store_rows(d_v, s, d_head, num_keys, d_head, d_v_SK, BLOCK_K)
