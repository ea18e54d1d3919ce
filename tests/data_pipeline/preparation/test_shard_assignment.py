"""Which documents share a shard."""

import numpy as np

from data_pipeline.preparation.shard_assignment import _cut_into_shards


def test_shards_are_cut_at_the_byte_where_no_float_is_exact_any_more() -> None:
    sizes = np.array([2**53, 1, 1, 1, 1], np.uint64)
    shards = _cut_into_shards(np.arange(5), sizes, shard_bytes=3)
    assert [numbers.tolist() for numbers in shards] == [[0], [1, 2, 3], [4]]
