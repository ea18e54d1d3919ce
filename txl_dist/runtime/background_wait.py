"""Waits of all ranks for background threads, which have no collectives of their own."""

import logging
import math
import time
from collections.abc import Callable

from data_pipeline.system.workers import BackgroundQueue
from txl_dist.errors import DivergedError, LostRankError
from txl_dist.runtime.world import World

POLL_SECONDS = 1.0
"""Between two collectives of ranks that wait. Far below the limit of a collective: a slow disk or
download must not look like a lost rank."""
NOTICE_SECONDS = 10.0
"""Between two lines about a wait."""

log = logging.getLogger("txl_dist.training")


def wait_for_queues(
    world: World,
    queue: BackgroundQueue,
    *,
    name: str,
    limit_seconds: float = math.inf,
    on_error: Callable[[], None] = lambda: None,
) -> None:
    """Wait until the queue of every rank is idle. Collective. `name` says what the ranks wait for.

    If a job of any rank has failed, every rank calls `on_error` and raises the error: a
    DivergedError if there is one, as it ends a run for good, or else that of the lowest rank.
    If no queue reports progress for `limit_seconds`, every rank raises LostRankError.
    """
    start = changed_at = time.monotonic()
    next_notice, previous = start + NOTICE_SECONDS, None
    while True:
        is_idle = queue.wait(POLL_SECONDS)
        now = time.monotonic()
        outcomes = world.all_gather((is_idle, queue.error, queue.progress, now - changed_at))
        errors = [error for _, error, _, _ in outcomes if error is not None]
        if errors:
            on_error()
            raise next((e for e in errors if isinstance(e, DivergedError)), errors[0])
        busy = [rank for rank, (is_idle, *_) in enumerate(outcomes) if not is_idle]
        if not busy:
            return
        progress = [progress for _, _, progress, _ in outcomes]
        if progress != previous:
            previous, changed_at = progress, now
        ranks = f"rank{'s' if len(busy) > 1 else ''} {', '.join(map(str, busy))}"
        if now >= next_notice and world.is_rank_zero:
            next_notice = now + NOTICE_SECONDS
            log.info("waiting %.0f s for %s of %s", now - start, name, ranks)
        if outcomes[0][3] > limit_seconds:  # by the clock of rank 0, so that all ranks agree
            raise LostRankError(
                f"{name} of {ranks} made no progress for training.rank_timeout_seconds="
                f"{limit_seconds:g}: the storage does not respond, or is very slow"
            )
