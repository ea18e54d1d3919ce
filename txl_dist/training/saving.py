"""RunSaver: the checkpoints of one run, as the loop asks for them, and what follows each of them.

    save        all tensors and the state; LATEST, and BEST if it has the best score
    save_score  the score joins them; BEST
    confirm     a loss computed from it was finite: older checkpoints are removed

Weights can be finite and yet too large to compute with; then an older checkpoint is the one to go
on from. So the older ones stay until `confirm`. `checkpoint/writer.py` knows what a checkpoint is.
"""

import logging
from pathlib import Path

from txl_dist.checkpoint.directory import CheckpointDirectory
from txl_dist.checkpoint.manifest import TrainState
from txl_dist.checkpoint.writer import (
    CheckpointHeader,
    explain_failed_save,
    save_checkpoint,
    save_score,
)
from txl_dist.tracking.tracker import Tracker
from txl_dist.training.step import TrainStep

log = logging.getLogger(__name__)


class RunSaver:
    """Saves from all ranks; every method is called by all of them."""

    def __init__(
        self,
        checkpoints: CheckpointDirectory,
        *,
        header: CheckpointHeader,
        step: TrainStep,
        tracker: Tracker | None,
        keep: int,
        saved_file: Path | None,
        saved_step: int | None,
    ) -> None:
        """`saved_file` is created with each checkpoint (TrainJob); `saved_step` as below."""
        self._checkpoints, self._header, self._keep = checkpoints, header, keep
        self._step, self._tracker, self._saved_file = step, tracker, saved_file
        self.saved_step = saved_step
        """Step of the newest checkpoint of this run, which it wrote or goes on from."""
        self._is_confirmed = False

    def save(self, state: TrainState) -> None:
        """Write a checkpoint. Raises CheckpointError or DivergedError, on every rank."""
        world = self._step.world
        world.activity.name = f"checkpoint of step {state.step}"
        path = save_checkpoint(
            self._checkpoints,
            header=self._header,
            state=state,
            fragments=self._step.engine.fragments(),
            memory_of_lane=self._step.memory_of_lanes(),
            mlflow_run_id=self._tracker.run_id if self._tracker else None,
            world=world,
        )
        self.saved_step, self._is_confirmed = state.step, False
        with explain_failed_save(self._checkpoints):
            world.run_on_rank_zero(lambda: self._saved(state, path))

    def save_score(self, state: TrainState) -> None:
        """Add the score to the checkpoint of this step. Raises CheckpointError on every rank."""
        with explain_failed_save(self._checkpoints):
            self._step.world.run_on_rank_zero(lambda: self._scored(state))

    def confirm(self, state: TrainState) -> None:
        """Remove old checkpoints: the newest one can be gone on from, or is the run's last."""
        if not self._is_confirmed:
            best_step = state.best.step if state.best else None
            with explain_failed_save(self._checkpoints):
                self._step.world.run_on_rank_zero(
                    lambda: self._checkpoints.prune(keep=self._keep, best_step=best_step)
                )
        self._is_confirmed = True

    def _saved(self, state: TrainState, path: Path) -> None:
        if self._saved_file:
            self._saved_file.touch()
        log.info("checkpoint at step %d | %s", state.step, path)
        self._point_at_best(state)

    def _scored(self, state: TrainState) -> None:
        save_score(self._checkpoints, state)
        self._point_at_best(state)

    def _point_at_best(self, state: TrainState) -> None:
        if state.best is not None and state.best.step == state.step:
            self._checkpoints.point("BEST", state.step)
