"""Waits of all ranks for background threads, which have no collectives of their own."""

from collections.abc import Callable

from data_pipeline.processes.background_queue import BackgroundQueue
from txl_dist.errors import DivergedError
from txl_dist.runtime.world import World

POLL_SECONDS = 1.0
"""Between two collectives of ranks that wait. Far below the limit of a collective: a slow disk or
download must not look like a lost rank."""


def wait_for_queues(
    world: World, queue: BackgroundQueue, *, on_error: Callable[[], None] = lambda: None
) -> None:
    """Wait until the queue of every rank is idle. Collective.

    If a job of any rank has failed, every rank calls `on_error` and raises the error: a
    DivergedError if there is one, as it ends a run for good, or else that of the lowest rank.
    """
    while True:
        is_idle = queue.wait(POLL_SECONDS)
        outcomes = world.all_gather((is_idle, queue.error))
        errors = [error for _, error in outcomes if error is not None]
        if errors:
            on_error()
            raise next((e for e in errors if isinstance(e, DivergedError)), errors[0])
        if all(is_idle for is_idle, _ in outcomes):
            return
