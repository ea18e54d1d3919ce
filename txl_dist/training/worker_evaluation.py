"""Scores of a worker: what all ranks know of `evaluation.on: workers`.

    checkpoint_scorer.py  rank 0: a thread with the queue of checkpoints
    scoring_worker.py     the process or actor that scores their chunks

The ranks agree by the flags of a step that scores are ready. Then all take them after the same
step, so their states stay equal.
"""

import logging
import time
from contextlib import ExitStack
from dataclasses import dataclass

from txl_dist.runtime.world import World
from txl_dist.training.checkpoint_scorer import CheckpointScorer, ScoredCheckpoint
from txl_dist.training.inputs import RankContext
from txl_dist.training.state import TrainState

POLL_SECONDS = 1.0
"""Between two collectives of ranks that wait for scores. Far below the limit of a collective."""
PROGRESS_SECONDS = 10.0
"""Between two lines about the scores that the end of a run waits for."""

log = logging.getLogger("txl_dist.training")


@dataclass(frozen=True, slots=True)
class WorkerEvaluation:
    """Scores of checkpoints from a worker. `take` and `wait` are collective."""

    world: World
    scorer: CheckpointScorer | None
    """On rank 0 only, and only with `evaluation.on: workers`. Without it, nothing is scored."""
    timeout_seconds: float
    """How long `wait` waits without progress."""

    @property
    def is_ready(self) -> bool:
        """Whether there is something to take; for the flags of a step: true on rank 0 only."""
        return self.scorer is not None and self.scorer.is_ready

    def submit(self, step: int) -> None:
        """Have the checkpoint of a step scored, as soon as it is written."""
        if self.scorer is not None:
            self.scorer.submit(step)

    def restart(self, state: TrainState) -> None:
        """Continue with the missing scores of `state`, at the start and after a rollback."""
        if self.scorer is not None:
            self.scorer.restart(state.unscored_steps, last_step=state.step)

    def take(self) -> list[ScoredCheckpoint]:
        """The outcomes since the last call, on every rank."""
        outcomes: list[ScoredCheckpoint] = self.world.broadcast(self.scorer and self.scorer.take())
        return outcomes

    def wait(self, *, stop: object) -> bool:
        """Wait until there is something to take; False if `stop` is true on any rank.

        Without progress for `timeout_seconds`, the checkpoints that wait are given up.
        """
        self.world.activity.name = "evaluation by a worker"
        said_at = time.monotonic()
        while True:
            is_over = self.scorer is None or self.scorer.wait(POLL_SECONDS)
            if self.scorer is not None and not is_over:
                if self.scorer.idle_seconds > self.timeout_seconds:
                    self.scorer.give_up(f"no progress in {self.timeout_seconds:g} s")
                elif time.monotonic() - said_at > PROGRESS_SECONDS:
                    said_at = time.monotonic()
                    log.info("waiting for %s", self.scorer.progress)
            answers = self.world.all_gather((is_over, bool(stop)))
            if any(is_stopped for _, is_stopped in answers):
                return False
            if all(is_over for is_over, _ in answers):
                return True


def build_worker_evaluation(rank: RankContext) -> WorkerEvaluation:
    """Has no effect if the run has no evaluation, or evaluates on its ranks."""
    config, data, world = rank.config, rank.data, rank.world
    scorer = None
    if world.is_rank_zero and data.evaluation is not None and config.evaluation.on == "workers":
        workers = rank.stack.enter_context(ExitStack())
        log_file = rank.directory.logs / "evaluation.log"
        scorer = CheckpointScorer(
            rank.directory.checkpoints,
            data.evaluation,
            config.evaluation,
            open_workers=lambda: workers.enter_context(rank.open_workers(log_file)),
            close_workers=workers.close,
        )
        rank.stack.callback(scorer.close)
    return WorkerEvaluation(world, scorer, config.training.rank_timeout_seconds)
