"""`txl bench`: what a user measures on a machine or of a model, in alternating rounds.

Clock frequency and other load change over minutes, so single times are not comparable. Ratios of
candidates that alternate are, and medians ignore a few disturbed rounds.
"""

import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

WARM_UP_ROUNDS = 5
"""Rounds that are not counted, because the process still allocates RAM in them."""


def time_rounds(
    candidates: Mapping[str, Callable[[], object]],
    *,
    rounds: int,
    warm_up_rounds: int = WARM_UP_ROUNDS,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, float]:
    """Median seconds of every candidate, each run once in `rounds` rounds after the warm-up."""
    seconds: dict[str, list[float]] = {name: [] for name in candidates}
    for number in range(warm_up_rounds + rounds):
        for name, run in candidates.items():
            began = clock()
            run()
            if number >= warm_up_rounds:
                seconds[name].append(clock() - began)
    return {name: statistics.median(values) for name, values in seconds.items()}


@contextmanager
def one_thread() -> Iterator[None]:
    """Run torch's operations of the context on one thread, so that times include no waiting."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
