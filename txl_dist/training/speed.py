"""Speed: the MFU of a run, and which rank is slower than the others.

MFU is the FLOP/s of a run divided by the peak FLOP/s of the machine: the fastest product of two
square matrices, measured on all ranks at the same time at the start. Data-sheet figures assume
clock rates and core counts that a rank may not have. If other processes use the machine then, a
higher rate of the run becomes the peak.

All ranks need the same time per step, because they wait for each other in collectives. So the ranks
are compared only by the time that each spends before the first collective of a step: the data wait
and the forward. At ZeRO stage 3 the forward gathers parameters, so only the data wait is compared.
On GPUs the forward is the time to start its kernels: a slow data pipeline or host is found there, a
slow GPU is not.
"""

import logging
import socket
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch

from txl_dist.runtime.activity import Span
from txl_dist.runtime.device import synchronize
from txl_dist.runtime.world import World
from txl_dist.training.observer import Observer
from txl_dist.training.state import TrainState

SIZES = {"cpu": (256, 1024, 2048), "cuda": (4096, 8192)}
"""Rows of the square matrices, ascending. Smaller ones do not fill a large GPU."""
SECONDS_PER_SIZE = 0.15
MAX_PRODUCT_SECONDS = 1.0
"""A product that would take longer is left out: in bf16, a CPU without instructions for it needs
a minute for 2,048 rows."""
MIN_RATIO = 1.2
"""The slowest rank is reported if its own time is this multiple of the median of all ranks ..."""
MIN_SHARE = 0.05
"""... and the difference is at least this share of the time of all steps."""

log = logging.getLogger(__name__)


class Utilisation:
    """Share of the peak FLOP/s that a run reaches. Creating it is collective."""

    def __init__(self, world: World, dtype: torch.dtype, *, flops_per_token: float) -> None:
        self._flops_per_token = flops_per_token
        self.peak_flops = measure_peak_flops(world, dtype)

    def share(self, *, tokens_per_second: float) -> float:
        """The MFU, at most 1: a rate above the measured peak becomes the peak."""
        achieved = self._flops_per_token * tokens_per_second
        self.peak_flops = max(self.peak_flops, achieved)
        return achieved / self.peak_flops


@cache
def measure_peak_flops(world: World, dtype: torch.dtype) -> float:
    """FLOP/s of all ranks together, in the `dtype` of the run's matrix products.

    Collective. Measured once per process.
    """
    world.barrier()
    own = torch.tensor([device_peak_flops(world.device, dtype)], dtype=torch.float64)
    return float(world.all_reduce_sum(own))


def device_peak_flops(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s of this process, measured."""
    best = 0.0
    for size in SIZES[device.type]:
        if best == 0 or 2 * size**3 <= best * MAX_PRODUCT_SECONDS:
            best = max(best, product_flops(size, dtype, device, seconds=SECONDS_PER_SIZE))
    return best


def product_flops(size: int, dtype: torch.dtype, device: torch.device, *, seconds: float) -> float:
    """FLOP/s of the fastest repetition, because other processes may slow down some of them."""
    generator = torch.Generator(device).manual_seed(0)  # the run's random state does not change
    try:
        matrix = torch.randn(size, size, dtype=dtype, device=device, generator=generator)
        best, deadline = 0.0, time.monotonic() + seconds
        while best == 0 or time.monotonic() < deadline:
            start = time.perf_counter()
            matrix @ matrix
            synchronize(device)
            best = max(best, 2 * size**3 / (time.perf_counter() - start))
    except torch.OutOfMemoryError:  # the run uses the GPU memory; skip this measurement
        return 0.0
    return best


@dataclass(frozen=True, slots=True)
class RankTime:
    """The time of one rank since the last comparison."""

    host: str
    seconds: dict[str, float]
    """The rank's own time, by span."""
    total_seconds: float


class StragglerCheck(Observer):
    """Compares the ranks at every checkpoint, and logs the slowest on rank 0."""

    def __init__(self, world: World, *, zero_stage: int) -> None:
        self._world = world
        self._spans = (Span.DATA_WAIT,) if zero_stage == 3 else (Span.DATA_WAIT, Span.FORWARD)
        self._before = world.activity.seconds()

    def save(self, state: TrainState) -> None:
        before, self._before = self._before, self._world.activity.seconds()
        spent = {span: seconds - before[span] for span, seconds in self._before.items()}
        own = {span.value: spent[span] for span in self._spans}
        times = self._world.all_gather(RankTime(socket.gethostname(), own, sum(spent.values())))
        if (line := describe_slowest(times)) and self._world.is_rank_zero:
            log.info("stragglers | %s", line)


def describe_slowest(times: Sequence[RankTime]) -> str | None:
    """`slowest rank 3 (a): 1.42 x the median, in data wait`; None if the ranks are about equal.

    The span is the one in which the rank differs most from the median of all ranks.
    """
    own = [sum(rank.seconds.values()) for rank in times]
    # The lower of the two middle values: with two ranks that is the faster one.
    median = statistics.median_low(own)
    slowest = max(range(len(own)), key=own.__getitem__)
    excess = own[slowest] - median
    rank = times[slowest]
    if own[slowest] < MIN_RATIO * median or excess < MIN_SHARE * rank.total_seconds:
        return None
    excess_by_span = {
        span: seconds - statistics.median_low([other.seconds[span] for other in times])
        for span, seconds in rank.seconds.items()
    }
    span = max(excess_by_span, key=excess_by_span.__getitem__)
    ratio = own[slowest] / max(median, 1e-9)
    times_median = f"{ratio:.2f} x the median" if ratio < 100 else "over 100 x the median"
    return (
        f"slowest rank {slowest} ({rank.host}): {times_median}, in {span}; the others wait "
        f"{excess / rank.total_seconds:.0%} of the time for it"
    )
