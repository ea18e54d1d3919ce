"""MFU: the FLOP/s of a run divided by the peak FLOP/s of the machine.

The peak is measured as the fastest product of two square matrices, on all ranks at the same time.
Data-sheet figures are not used: they assume clock rates and core counts that a rank may not have.
The peak is measured at the start and again during the run, because other processes may use the
machine; the maximum counts. Measurements during the run take at most 0.1 % of the time.
"""

import time
from collections.abc import Sequence
from functools import cache

import torch

from txl_dist.runtime.world import World

SIZES = {"cpu": (256, 1024, 2048), "cuda": (4096, 8192)}
"""Rows of the square matrices, ascending. Smaller ones do not fill a large GPU."""
SECONDS_PER_SIZE = 0.15
MAX_PRODUCT_SECONDS = 1.0
"""A product that would take longer is left out: in bf16, a CPU without instructions for it needs
a minute for 2,048 rows."""
BURST_SECONDS = 0.05
"""Duration of a measurement during the run; at least one product is computed."""
MAX_SHARE_OF_TIME = 1e-3


class Utilisation:
    """Share of the peak FLOP/s that a run reaches. Creating it is collective."""

    def __init__(self, world: World, dtype: torch.dtype, *, flops_per_step: int) -> None:
        self._world, self._dtype, self._flops_per_step = world, dtype, flops_per_step
        self.peak_flops = measure_peak_flops(world, dtype)
        self._start = time.monotonic()
        self._next = self._start + BURST_SECONDS / MAX_SHARE_OF_TIME

    def share(self, *, steps_per_second: float) -> float:
        """The MFU, at most 1: a rate above the measured peak becomes the peak."""
        achieved = self._flops_per_step * steps_per_second
        self.peak_flops = max(self.peak_flops, achieved)
        return achieved / self.peak_flops

    @property
    def is_due(self) -> bool:
        """Whether this rank would measure now. Clocks differ, so the ranks have to agree first."""
        return time.monotonic() >= self._next

    def measure(self) -> None:
        """Measure the peak again. Collective. The intervals grow with the length of the run."""
        start = time.monotonic()
        smallest = SIZES[self._world.device.type][:1]
        burst = _flops_of_all(self._world, smallest, self._dtype, seconds=BURST_SECONDS)
        self.peak_flops = max(self.peak_flops, burst)
        end = time.monotonic()
        self._next = end + max(end - self._start, (end - start) / MAX_SHARE_OF_TIME)


@cache
def measure_peak_flops(world: World, dtype: torch.dtype) -> float:
    """FLOP/s of all ranks together, in the `dtype` of the run's matrix products.

    Collective. Measured once per process.
    """
    return _flops_of_all(world, SIZES[world.device.type], dtype, seconds=SECONDS_PER_SIZE)


def _flops_of_all(
    world: World, sizes: Sequence[int], dtype: torch.dtype, *, seconds: float
) -> float:
    world.barrier()
    best = 0.0
    for size in sizes:
        if best == 0 or 2 * size**3 <= best * MAX_PRODUCT_SECONDS:
            best = max(best, product_flops(size, dtype, world.device, seconds=seconds))
    return float(world.all_reduce_sum(torch.tensor([best], dtype=torch.float64)))


def product_flops(size: int, dtype: torch.dtype, device: torch.device, *, seconds: float) -> float:
    """FLOP/s of the fastest repetition, because other processes may slow down some of them."""
    generator = torch.Generator(device).manual_seed(0)  # the run's random state does not change
    try:
        matrix = torch.randn(size, size, dtype=dtype, device=device, generator=generator)
        best, deadline = 0.0, time.monotonic() + seconds
        while best == 0 or time.monotonic() < deadline:
            start = time.perf_counter()
            matrix @ matrix
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            best = max(best, 2 * size**3 / (time.perf_counter() - start))
    except torch.OutOfMemoryError:  # the run uses the memory; skip this measurement
        return 0.0
    return best
