"""How much of the machine a run uses: operations done over operations possible.

What is possible is measured on all ranks at the same time: the best square product. A figure from a
data sheet would flatter some machines and shame others. It is measured when the run starts, and
again now and then, because something else may have used the machine just then: the largest rate
ever seen counts. Later measurements take at most a thousandth of the time.
"""

import time
from functools import cache

import torch

from txl_dist.runtime.world import World

SIZES = {"cpu": (1024, 2048), "cuda": (4096, 8192)}
"""Of the square matrices; a large GPU is not busy with small ones."""
SECONDS_A_SIZE = 0.15
BURST_SECONDS = 0.05
"""Of a later measurement; one product is made in any case."""
MAX_SHARE_OF_TIME = 1e-3


class Utilisation:
    """A run's rate of operations as a share of the peak. All ranks create it together."""

    def __init__(self, world: World, dtype: torch.dtype, *, flops_per_step: int) -> None:
        self._world, self._dtype, self._flops_per_step = world, dtype, flops_per_step
        self.peak_flops = measure_peak_flops(world, dtype)
        self._began = time.monotonic()
        self._next = self._began + BURST_SECONDS / MAX_SHARE_OF_TIME

    def share(self, *, steps_per_second: float) -> float:
        """Never above 1: a rate that was reached is possible."""
        achieved = self._flops_per_step * steps_per_second
        self.peak_flops = max(self.peak_flops, achieved)
        return achieved / self.peak_flops

    @property
    def is_due(self) -> bool:
        """Whether this rank would measure now; the ranks' clocks differ, so they have to agree."""
        return time.monotonic() >= self._next

    def measure(self) -> None:
        """Measure again; all ranks call it at the same step. The intervals grow with the run."""
        began = time.monotonic()
        size = SIZES[self._world.device.type][0]
        burst = _flops_of_all(self._world, [size], self._dtype, seconds=BURST_SECONDS)
        self.peak_flops = max(self.peak_flops, burst)
        now = time.monotonic()
        self._next = now + max(now - self._began, (now - began) / MAX_SHARE_OF_TIME)


@cache
def measure_peak_flops(world: World, dtype: torch.dtype) -> float:
    """Operations per second of all ranks together, multiplying matrices at the same time.

    In the `dtype` of the run's products. Measured once a process; all ranks call it together.
    """
    sizes = list(SIZES[world.device.type])
    return _flops_of_all(world, sizes, dtype, seconds=SECONDS_A_SIZE)


def _flops_of_all(world: World, sizes: list[int], dtype: torch.dtype, *, seconds: float) -> float:
    world.barrier()
    best = max(_product_flops(size, dtype, world.device, seconds=seconds) for size in sizes)
    return float(world.sum(torch.tensor([best], dtype=torch.float64)))


def _product_flops(size: int, dtype: torch.dtype, device: torch.device, *, seconds: float) -> float:
    """The fastest of the repetitions that fit into the time: others may use the machine too."""
    own = torch.Generator(device).manual_seed(0)  # the run's random numbers stay as they are
    try:
        matrix = torch.randn(size, size, dtype=dtype, device=device, generator=own)
        best, until = 0.0, time.monotonic() + seconds
        while best == 0 or time.monotonic() < until:
            began = time.perf_counter()
            matrix @ matrix
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            best = max(best, 2 * size**3 / (time.perf_counter() - began))
    except torch.OutOfMemoryError:  # the run has the memory; this measurement counts for nothing
        return 0.0
    return best
