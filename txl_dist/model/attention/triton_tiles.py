"""What the kernels of triton_kernels.py load, mask and store, tile by tile."""

import triton
import triton.language as tl

# Shapes: B lanes, T segment tokens (num_queries), M memory tokens (mem_len), S = M + T keys,
# H heads, K d_head, N = ceil(T / C) rows of W columns of scores by distance (num_columns).
# Tiles have BLOCK_T queries, a multiple of C, BLOCK_S keys and BLOCK_K channels.

NUM_CLASSES = tl.constexpr(8)
"""C: classes of queries, as many as numbers of bf16 in 16 bytes."""


@triton.jit
def load_rows(matrix, row, stride, num_rows, d_head, BLOCK_K: tl.constexpr):
    """Rows of a matrix with `d_head` columns, padded with zeros."""
    column = tl.arange(0, BLOCK_K)
    inside = (row[:, None] < num_rows) & (column[None, :] < d_head)
    return tl.load(matrix + row[:, None] * stride + column[None, :], mask=inside, other=0.0)


@triton.jit
def matrices_at(
    head, lane, k1, v1, k2, v2, stride_k1h, stride_k1b, stride_v1h, stride_v1b, stride_k2h,
    stride_k2b, stride_v2h, stride_v2b,
):  # fmt: skip
    """Keys and values of one head and lane."""
    return (
        k1 + head * stride_k1h + lane * stride_k1b,
        v1 + head * stride_v1h + lane * stride_v1b,
        k2 + head * stride_k2h + lane * stride_k2b,
        v2 + head * stride_v2h + lane * stride_v2b,
    )


@triton.jit
def key_tile(
    first, second, s_first, stride_first, stride_second, mem_len, num_keys, d_head,
    BLOCK_S: tl.constexpr, BLOCK_K: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """Where a tile of keys or values is, and which of these places exist.

    The first `mem_len` keys are in the first of two matrices. SPLIT: 0 all keys are, 1 each tile is
    in one of them, 2 a tile may be in both.
    """
    s, column = s_first + tl.arange(0, BLOCK_S), tl.arange(0, BLOCK_K)
    if SPLIT == 0:
        row = first + s * stride_first
    elif SPLIT == 1:
        in_first = s_first < mem_len
        stride = tl.where(in_first, stride_first, stride_second)
        row = tl.where(in_first, first, second) + (s - tl.where(in_first, 0, mem_len)) * stride
    else:
        in_second = second + (s - mem_len) * stride_second
        row = tl.where(s < mem_len, first + s * stride_first, in_second)
    exists = (s[:, None] < num_keys) & (column[None, :] < d_head)
    return row[:, None] + column[None, :], exists


@triton.jit
def load_keys(
    first, second, s_first, stride_first, stride_second, mem_len, num_keys, d_head,
    BLOCK_S: tl.constexpr, BLOCK_K: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """A tile of keys or values, padded with zeros."""
    place, exists = key_tile(
        first, second, s_first, stride_first, stride_second, mem_len, num_keys, d_head,
        BLOCK_S, BLOCK_K, SPLIT,
    )  # fmt: skip
    return tl.load(place, mask=exists, other=0.0)


@triton.jit
def store_keys(
    first, second, s_first, stride_first, stride_second, mem_len, num_keys, d_head, values,
    BLOCK_S: tl.constexpr, BLOCK_K: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """The opposite of `load_keys`, in the dtype of the matrices."""
    place, exists = key_tile(
        first, second, s_first, stride_first, stride_second, mem_len, num_keys, d_head,
        BLOCK_S, BLOCK_K, SPLIT,
    )  # fmt: skip
    tl.store(place, values.to(first.dtype.element_ty), mask=exists)


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
def distance_tile(t, s, class_stride, row_stride, num_queries, num_columns):
    """Where scores by distance of queries t and keys s are, and which of these places exist."""
    num_rows = tl.cdiv(num_queries, NUM_CLASSES)
    row = t // NUM_CLASSES
    shift = NUM_CLASSES * (num_rows - 1 - row)
    # All of these are multiples of NUM_CLASSES, which the compiler cannot see for strides.
    offset = (t % NUM_CLASSES).to(tl.int64) * class_stride + row * row_stride + shift
    offset = tl.multiple_of(offset, [8, 8])
    return offset + s, (row < num_rows) & (shift + s < num_columns)


@triton.jit
def tile_scores(
    left, right, t, s, reach, is_free, by_distance, class_stride, row_stride, num_queries, mem_len,
    num_columns, HAS_DISTANCE: tl.constexpr, ACC: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A tile of scores, minus infinity where the query does not see the key.

    `left` and `right` are queries and keys, or keys and queries for transposed scores; `t`, `s`
    and `reach` are shaped to broadcast to the tile. `is_free`: every
    query of the segment sees every key.
    """
    score = tl.dot(left, tl.trans(right), input_precision=PRECISION, out_dtype=ACC)
    if HAS_DISTANCE:
        # Also of keys that the query does not see: a mask that changes from key to key would load
        # number by number.
        place, exists = distance_tile(t, s, class_stride, row_stride, num_queries, num_columns)
        score += tl.load(by_distance + place, mask=exists, other=0.0)
    if not is_free:
        distance = mem_len + t - s
        # Also false for keys beyond the last: they are in the future of every query.
        score = tl.where((distance >= 0) & (distance <= reach), score, float("-inf"))
    return score


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
    # The same in every tile, so it is computed once.
    bit = 1 << (tl.arange(0, BLOCK_S) % 16)
    kept = repeated.reshape([BLOCK_T, BLOCK_S]).to(tl.int32) & bit[None, :]
    if IS_WIDE:
        # triton 3.7 lays out the operand of a product for the narrowest load that it depends on:
        # with int16, products of float64 do not compile, and those of fp32 are slower. A sum of
        # one element ends the dependency.
        kept = tl.sum(kept[:, :, None], 2)
    return kept != 0


@triton.jit
def first_key(t, reach, num_queries, mem_len, BLOCK_S: tl.constexpr):
    """The first key of the first tile that any of these queries sees."""
    oldest = tl.where(t < num_queries, mem_len + t - reach, mem_len + num_queries)
    return tl.maximum(tl.min(oldest, 0), 0) // BLOCK_S * BLOCK_S


@triton.jit
def first_free_key(t, reach, num_queries, mem_len):
    """The first key that all of these queries see, if it is not in the future of one."""
    return tl.max(tl.where(t < num_queries, mem_len + t - reach, 0), 0)


@triton.jit
def store_zeros(
    d_by_distance, t, s_first, class_stride, num_queries, num_columns,
    BLOCK_T: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """In the columns of keys s_first, s_first + 1, ...; keys before the first have columns, too."""
    s = s_first + tl.arange(0, BLOCK_S)
    place, exists = distance_tile(
        t[:, None], s[None, :], class_stride, num_columns, num_queries, num_columns
    )
    first_column = NUM_CLASSES * (tl.cdiv(num_queries, NUM_CLASSES) - 1 - t // NUM_CLASSES)
    exists &= first_column[:, None] + s[None, :] >= 0
    zeros = tl.zeros([BLOCK_T, BLOCK_S], d_by_distance.dtype.element_ty)
    tl.store(d_by_distance + place, zeros, mask=exists)


@triton.jit
def store_zeros_beside(
    d_by_distance, t, first, start, stop, class_stride, num_queries, num_columns,
    BLOCK_T: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """In all columns but those of the tiles from key `start` to key `stop`."""
    num_rows = tl.cdiv(num_queries, NUM_CLASSES)
    last_row = tl.minimum((first + BLOCK_T - 1) // NUM_CLASSES, num_rows - 1)
    num_before = start + NUM_CLASSES * (num_rows - 1 - first // NUM_CLASSES)
    for s_first in range(start - tl.cdiv(num_before, BLOCK_S) * BLOCK_S, start, BLOCK_S):
        store_zeros(
            d_by_distance, t, s_first, class_stride, num_queries, num_columns, BLOCK_T, BLOCK_S
        )
    end = start + tl.cdiv(stop - start, BLOCK_S) * BLOCK_S
    s_stop = num_columns - NUM_CLASSES * (num_rows - 1 - last_row)
    for s_first in range(end, s_stop, BLOCK_S):
        store_zeros(
            d_by_distance, t, s_first, class_stride, num_queries, num_columns, BLOCK_T, BLOCK_S
        )
