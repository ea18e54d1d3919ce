"""Peak memory of training above the built model, measured in a process of its own."""

import resource
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

_STEPS = 3


def peak_mib(build: Callable[..., Callable[[], object]], *arguments: object) -> float | None:
    """MiB that running what `build(*arguments)` returned took at most, above what stood before.

    Gradients and the optimizer's state are part of it. None where the system does not tell.
    """
    if not sys.platform.startswith("linux"):
        return None
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(_measure, build, *arguments).result()


def _measure(build: Callable[..., Callable[[], object]], *arguments: object) -> float:
    run = build(*arguments)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    before = pages * resource.getpagesize()
    for _ in range(_STEPS):
        run()
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before) / 2**20
