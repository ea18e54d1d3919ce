"""What it costs to plan who reads what, at a size that no disk here holds.

The plan needs the tokens of every block and nothing else of the shards, so a split of 10**12 tokens
is as good as real once its block sizes are made up.
"""

import time
import tracemalloc

import numpy as np

from data_pipeline.streams.lanes import LanePlan
from data_pipeline.streams.order import BlockPlace, EpochOrder

BLOCK_TOKENS = 2**18


def measure_plan(
    *, num_tokens: int = 10**12, num_lanes: int = 4096, num_ranks: int = 512
) -> tuple[float, float]:
    """(seconds, megabytes) to order an epoch and find where every lane of every rank begins.

    CPU seconds of one run; megabytes (10**6 bytes) at the peak of a second one, with the sizes of
    the blocks (8 bytes each), which a reader keeps.
    """
    sizes = synthetic_blocks(num_tokens)
    began = time.process_time()
    plan_all(sizes, num_lanes=num_lanes, num_ranks=num_ranks)
    seconds = time.process_time() - began
    tracemalloc.start()
    try:
        plan_all(sizes, num_lanes=num_lanes, num_ranks=num_ranks)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    return seconds, (peak_bytes + sizes.nbytes) / 1e6


def synthetic_blocks(num_tokens: int) -> np.ndarray:
    """int64 [num_blocks]: blocks as `txl prepare` cuts them, a few documents short of full."""
    random = np.random.default_rng(0)
    num_blocks = max(1, num_tokens // BLOCK_TOKENS)
    sizes = BLOCK_TOKENS - random.integers(0, BLOCK_TOKENS // 64, num_blocks)
    return np.asarray(sizes, np.int64)


def plan_all(sizes: np.ndarray, *, num_lanes: int, num_ranks: int) -> list[BlockPlace]:
    """Where every lane begins in the first epoch, rank by rank; each rank makes this plan alone."""
    plan = LanePlan(num_tokens=int(sizes.sum()), num_lanes=num_lanes, tgt_len=512)
    order = EpochOrder.of(sizes, seed=0, epoch=0, shuffle="blocks")
    return [
        order.locate(plan.slice_start(lane))
        for rank in range(num_ranks)
        for lane in plan.lanes_of_rank(rank, num_ranks)
    ]
