"""The cost of planning an epoch: which tokens each lane of each rank reads, for 10**12 tokens.

The plan depends on the number of tokens per block only, so random block sizes replace the shards.
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
    """(seconds, megabytes) to order an epoch and to locate the first token of every lane.

    CPU seconds of one run; peak megabytes (10**6 bytes) of a second run, including the block
    sizes (8 bytes each), which a reader holds in memory.
    """
    sizes = synthetic_blocks(num_tokens)
    began = time.process_time()
    plan_all(sizes, num_lanes=num_lanes, num_ranks=num_ranks)
    # tracemalloc slows the plan, so time and memory are measured in separate runs.
    seconds = time.process_time() - began
    tracemalloc.start()
    try:
        plan_all(sizes, num_lanes=num_lanes, num_ranks=num_ranks)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    return seconds, (peak_bytes + sizes.nbytes) / 1e6


def synthetic_blocks(num_tokens: int) -> np.ndarray:
    """int64 [num_blocks]: block sizes as `txl prepare` makes them, slightly below BLOCK_TOKENS."""
    random = np.random.default_rng(0)
    num_blocks = max(1, num_tokens // BLOCK_TOKENS)
    sizes = BLOCK_TOKENS - random.integers(0, BLOCK_TOKENS // 64, num_blocks)
    return np.asarray(sizes, np.int64)


def plan_all(sizes: np.ndarray, *, num_lanes: int, num_ranks: int) -> list[BlockPlace]:
    """The first block of each lane in epoch 0, by rank. In a run, every rank computes it."""
    plan = LanePlan(num_tokens=int(sizes.sum()), num_lanes=num_lanes, tgt_len=512)
    order = EpochOrder.of(sizes, seed=0, epoch=0, shuffle="blocks")
    return [
        order.locate(lane * plan.lane_tokens)
        for rank in range(num_ranks)
        for lane in plan.lanes_of_rank(rank, num_ranks)
    ]
