"""RunSaver: when the checkpoints of a run are written, scored and removed.

    save        write all tensors and the state; set LATEST, and BEST if it has the best score
    save_score  add the score to the existing checkpoint; set BEST
    confirm     a loss computed from it was accepted: remove older checkpoints
    rewind      continue from an older checkpoint; later ones are superseded

Weights can be finite and yet too large to compute with. The run then has to resume from an older
checkpoint, so older ones are removed only at `confirm`, not at `save`. The format is defined in
`txl_dist/checkpoint/`.
"""

import logging
from pathlib import Path

from txl_dist.checkpoint.directory import CheckpointDirectory
from txl_dist.checkpoint.writer import (
    CheckpointHeader,
    explain_failed_save,
    save_checkpoint,
    update_state,
)
from txl_dist.tracking.tracker import Tracker
from txl_dist.training.state import TrainState
from txl_dist.training.step import TrainStep

log = logging.getLogger(__name__)


class RunSaver:
    """Saves from all ranks. Every method is collective.

    `saved_file` is created at the first checkpoint (see TrainJob). `saved_step` is the step of the
    newest checkpoint of this run: the one it resumed from, or wrote last.
    """

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
        self._checkpoints, self._header, self._keep = checkpoints, header, keep
        self._step, self._tracker, self._saved_file = step, tracker, saved_file
        self.saved_step = saved_step
        self._is_confirmed = False

    def save(self, state: TrainState) -> None:
        """Write a checkpoint. Raises CheckpointError or DivergedError, on every rank."""
        world = self._step.world
        world.activity.name = f"checkpoint of step {state.step}"
        path = save_checkpoint(
            self._checkpoints,
            header=self._header,
            state=state.model_dump(mode="json"),
            fragments=self._step.engine.fragments(),
            memory_of_lane=self._step.memory_of_lanes(),
            mlflow_run_id=self._tracker.run_id if self._tracker else None,
            world=world,
        )
        self.saved_step, self._is_confirmed = state.step, False
        with explain_failed_save(self._checkpoints):
            world.run_on_rank_zero(lambda: self._finish_save(state, path))

    def save_score(self, state: TrainState) -> None:
        """Add the score to the checkpoint of this step. Raises CheckpointError on every rank."""
        with explain_failed_save(self._checkpoints):
            self._step.world.run_on_rank_zero(lambda: self._write_score(state))

    def rewind(self, state: TrainState) -> None:
        """Continue from the checkpoint of `state`, which a rollback has loaded.

        Later checkpoints are superseded, and `state.divergence` becomes part of this one, so that a
        resume from it skips the same steps. Raises CheckpointError on every rank.
        """
        best_step = state.best.step if state.best else None
        changes = state.model_dump(mode="json", include={"divergence"})

        def rewrite() -> None:
            self._checkpoints.rewind(state.step, best_step=best_step)
            update_state(self._checkpoints, state.step, changes)

        with explain_failed_save(self._checkpoints):
            self._step.world.run_on_rank_zero(rewrite)
        self.saved_step, self._is_confirmed = state.step, False

    def confirm(self, state: TrainState) -> None:
        """Remove old checkpoints; call after an accepted step, and at the end of the run."""
        # Called after every step, but collective only once per checkpoint.
        if not self._is_confirmed:
            best_step = state.best.step if state.best else None
            with explain_failed_save(self._checkpoints):
                self._step.world.run_on_rank_zero(
                    lambda: self._checkpoints.prune(keep=self._keep, best_step=best_step)
                )
        self._is_confirmed = True

    def _finish_save(self, state: TrainState, path: Path) -> None:
        # Only now: Ray restarts with `resume: auto` once this file exists.
        if self._saved_file:
            self._saved_file.touch()
        log.info("checkpoint at step %d | %s", state.step, path)
        self._update_best(state)

    def _write_score(self, state: TrainState) -> None:
        score = state.model_dump(mode="json", include={"best", "evaluation_pending"})
        update_state(self._checkpoints, state.step, score)
        self._update_best(state)

    def _update_best(self, state: TrainState) -> None:
        if state.best is not None and state.best.step == state.step:
            self._checkpoints.set_pointer("BEST", state.step)
