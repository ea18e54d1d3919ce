"""Figures with their limits, which the scripts print, and peak RAM in a new process."""

import argparse
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

PEAK_STEPS = 3


@dataclass(frozen=True, slots=True)
class Figure:
    """One result of a benchmark, with its limit."""

    name: str
    value: float
    unit: str
    limit: float | None = None
    at_most: bool = False
    """Whether the limit is an upper bound."""
    note: str = ""

    @property
    def holds(self) -> bool | None:
        """Whether the value is within the limit; None without one."""
        if self.limit is None:
            return None
        return self.value <= self.limit if self.at_most else self.value >= self.limit


def run_script(
    description: str | None, measure: Callable[..., Iterator[Figure]], *, rounds: int
) -> None:
    """Read `--rounds` of a benchmark script, measure, and print the figures."""
    parser = argparse.ArgumentParser(description=(description or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=rounds, help="the medians of them count")
    print_figures(measure(rounds=parser.parse_args().rounds))


def print_figures(figures: Iterator[Figure]) -> None:
    """Print each figure when it is measured."""
    print(f"{'figure':<62} {'measured':>9} {'limit':>11}")
    for figure in figures:
        sign = "<=" if figure.at_most else ">="
        limit = "" if figure.limit is None else f"{sign} {figure.limit:g}"
        verdict = {True: "holds", False: "MISSED", None: ""}[figure.holds]
        print(
            f"{figure.name:<62} {figure.value:>9.3g} {limit:>11}  {figure.unit}  {verdict}"
            f"{'  (' + figure.note + ')' if figure.note else ''}",
            flush=True,
        )


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
    for _ in range(PEAK_STEPS):
        run()
    return (kib("VmHWM") - before) / 1024


def kib(name: str) -> int:
    """A field of /proc/self/status. (`ru_maxrss` is inherited from a larger parent process.)"""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith(f"{name}:")))
