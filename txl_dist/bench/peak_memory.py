"""Peak memory of training above the built model, measured in a process of its own."""

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
    before = _kib("VmRSS")
    for _ in range(_STEPS):
        run()
    return (_kib("VmHWM") - before) / 1024


def _kib(name: str) -> int:
    """A line of the process's status. (`ru_maxrss` would be the parent's, if that was larger.)"""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith(f"{name}:")))
