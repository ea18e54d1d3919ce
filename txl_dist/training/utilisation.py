"""How much of the machine a run uses: operations done over operations possible.

What is possible is measured when the run starts, on all ranks at once: the best square product. A
figure from a data sheet would flatter some machines and shame others.
"""

import time
from functools import cache

import torch

from txl_dist.world import World

SIZES = {"cpu": (1024, 2048), "cuda": (4096, 8192)}
"""Of the square matrices; a large GPU is not busy with small ones."""
SECONDS_A_SIZE = 0.15


@cache
def measure_peak_flops(world: World, dtype: torch.dtype) -> float:
    """Operations per second of all ranks together, multiplying matrices at the same time.

    In the `dtype` of the run's products. Measured once a process; all ranks call it together.
    """
    world.together(lambda: None)
    best = max(_product_flops(size, dtype, world.device) for size in SIZES[world.device.type])
    return float(world.sum(torch.tensor([best], dtype=torch.float64)))


def _product_flops(size: int, dtype: torch.dtype, device: torch.device) -> float:
    """The fastest of the repetitions that fit into the time: others may use the machine too."""
    matrix = torch.randn(size, size, dtype=dtype, device=device)
    best, until = 0.0, time.monotonic() + SECONDS_A_SIZE
    while best == 0 or time.monotonic() < until:
        began = time.perf_counter()
        matrix @ matrix
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = max(best, 2 * size**3 / (time.perf_counter() - began))
    return best
