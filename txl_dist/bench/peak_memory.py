"""Peak memory of training, measured in a new process."""

import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

_STEPS = 3


def peak_mib(build: Callable[..., Callable[[], object]], *arguments: object) -> float | None:
    """Peak MiB of running the function that `build(*arguments)` returns, above those after `build`.

    Includes gradients and optimizer state, not the model. None on systems other than Linux.
    """
    if not sys.platform.startswith("linux"):
        return None
    # VmHWM is a maximum over the life of a process, so every measurement needs a new one.
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(_measure, build, *arguments).result()


def _measure(build: Callable[..., Callable[[], object]], *arguments: object) -> float:
    run = build(*arguments)
    before = kib("VmRSS")
    for _ in range(_STEPS):
        run()
    return (kib("VmHWM") - before) / 1024


def kib(name: str) -> int:
    """A field of /proc/self/status. (`ru_maxrss` is inherited from a larger parent process.)"""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith(f"{name}:")))
