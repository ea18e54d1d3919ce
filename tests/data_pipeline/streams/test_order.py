"""Epoch orders: a fixed hash, and positions outside the epoch.

That orders are those of the hash is tests/properties/test_contiguity.py.
"""

import numpy as np
import pytest

from data_pipeline.streams.order import ORDERINGS, EpochOrder, hash_ids

BLOCK_TOKENS = np.array([5, 1, 300, 7, 7, 40], np.int64)


ORDER = EpochOrder.of(BLOCK_TOKENS, seed=7, epoch=3, ordering=ORDERINGS["blocks"])


def test_an_order_never_changes_between_versions() -> None:
    # If this changes, every resumed run reads other text.
    assert hash_ids(7, 3, num_ids=2).tolist() == [11248596980798508817, 1173472824657711729]
    assert ORDER.blocks.tolist() == [2, 1, 3, 4, 0, 5]
    assert ORDER.document_order(2, 6).tolist() == [2, 5, 3, 4, 0, 1]


@pytest.mark.parametrize("position", [-1, 360])
def test_locate_refuses_a_position_outside_the_epoch(position: int) -> None:
    with pytest.raises(ValueError, match=f"position={position} is outside the epoch's 360 tokens"):
        ORDER.locate(position)
