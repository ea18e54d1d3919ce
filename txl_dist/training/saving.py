"""RunSaver: when the checkpoints of a run are written and removed.

`save` copies this rank's tensors. One thread per rank does the work in the order of the calls
(`txl_dist/checkpoint/checkpoints.py`). An error on any rank reaches all ranks at the same step: the
loop passes `has_failed` with the flags of a step, and then calls `wait`.

Weights can be finite and yet too large to compute with. The run then has to resume from an older
checkpoint, so older ones are removed only at `confirm`, not at `save`. The reasons are in
docs/decisions/0016-background-checkpoints.md.
"""

import logging
import math
import time
import uuid
from contextlib import closing
from functools import partial
from pathlib import Path

from data_pipeline.system.remote_path import RemotePath
from data_pipeline.system.sources import shown
from data_pipeline.system.workers import BackgroundQueue
from txl_dist.checkpoint.checkpoints import CheckpointHeader, Checkpoints, Save
from txl_dist.checkpoint.copies import CheckpointCopies, Uploader
from txl_dist.checkpoint.directory import Retention
from txl_dist.checkpoint.tensors import Snapshot
from txl_dist.config.training_config import TrainingConfig
from txl_dist.errors import CheckpointError, DivergedError, TxlError
from txl_dist.runtime.world import do_on_rank_zero, wait_for_queues
from txl_dist.tracking.process import TrackingProcess
from txl_dist.training.scores import ScoreTable
from txl_dist.training.start import Start
from txl_dist.training.state import TrainState
from txl_dist.training.step import TrainStep

UPLOAD_SECONDS = 600.0
"""How long the end of a run waits for the copies at `training.checkpoint_url`."""
CLOSE_TIMEOUT_SECONDS = 10.0
"""How long a save may take to complete after an error that ends the run."""

log = logging.getLogger(__name__)


def open_saver(start: Start, step: TrainStep, tracker: TrackingProcess | None) -> "RunSaver":
    """The saver of a run. Collective. Records a new attempt at `training.checkpoint_url` too."""
    config, directory = start.config.training, start.directory.checkpoints
    retention = Retention(
        keep=config.keep_checkpoints, keep_interval_steps=config.keep_interval_steps
    )
    uploader = None
    if config.checkpoint_url and start.world.is_rank_zero:
        copies = CheckpointCopies(RemotePath(config.checkpoint_url))
        uploader = Uploader(copies, directory, retention)
    start.world.run_on_rank_zero(lambda: uploader.open() if uploader else None)
    saver = RunSaver(
        Checkpoints(directory, uploader, retention=retention),
        header=start.checkpoint_header,
        step=step,
        tracker=tracker,
        config=config,
        scores=start.scores,
        saved_file=Path(start.spec.saved_file) if start.spec.saved_file else None,
        saved_step=start.kept_step if start.point else None,
    )
    return start.stack.enter_context(closing(saver))


class RunSaver:
    """Saves from all ranks. Collective are `save`, `wait*`, `settle`, `rewind` and `finish`.

    `saved_file` is created at the first checkpoint (see TrainSpec). `saved_step` is the step of the
    newest save of this run, or of the checkpoint that it resumed from. `scores` on rank 0.
    """

    def __init__(
        self,
        checkpoints: Checkpoints,
        *,
        header: CheckpointHeader,
        step: TrainStep,
        tracker: TrackingProcess | None,
        config: TrainingConfig,
        scores: ScoreTable | None,
        saved_file: Path | None,
        saved_step: int | None,
    ) -> None:
        self._checkpoints, self._header, self._config = checkpoints, header, config
        self._uploader, self._scores = checkpoints.uploader, scores
        self._step, self._tracker, self._saved_file = step, tracker, saved_file
        self.saved_step = saved_step
        self._is_confirmed = False
        self._saved_at = time.monotonic()
        self._save_id = ""
        self._deadline = math.inf
        """When the background thread gives up, in seconds of the monotonic clock."""
        self._queue = BackgroundQueue("checkpoint")

    @property
    def is_due(self) -> bool:
        """Whether `checkpoint_interval_minutes` have passed, by the clock of rank 0.

        For the flags of a step: true on rank 0 only, so that all ranks follow one clock.
        """
        minutes = self._config.checkpoint_interval_minutes
        if minutes is None or not self._step.world.is_rank_zero:
            return False
        return time.monotonic() - self._saved_at >= 60 * minutes

    @property
    def has_failed(self) -> bool:
        """Whether `wait` would raise an error of this rank; for the flags of a step."""
        is_fenced = self._uploader is not None and self._uploader.fenced is not None
        return self._queue.error is not None or is_fenced

    def save(self, state: TrainState) -> None:
        """Start to write a checkpoint. Collective.

        Waits for the save before, and raises its CheckpointError or DivergedError on every rank.
        """
        world = self._step.world
        world.activity.name = f"checkpoint of step {state.step}"
        self.wait()
        # From rank 0: unique, also if an older process of this run still writes.
        self._save_id = world.broadcast(uuid.uuid4().hex)
        if self._scores is not None:
            state = state.model_copy(update={"best": self._scores.best})
        save = Save(
            save_id=self._save_id,
            state=state.model_dump(mode="json"),
            rank=world.rank,
            num_ranks=world.num_ranks,
            timeout_seconds=self._config.rank_timeout_seconds,
            mlflow_run_id=self._tracker.run_id if self._tracker else None,
            require_useful=partial(self._require_useful, self._queue),
        )
        snapshot = Snapshot(self._step.engine.fragments(), self._step.memory_of_lanes())
        self._queue.submit(partial(self._write, save, snapshot))
        self.saved_step, self._is_confirmed = state.step, False
        self._saved_at = time.monotonic()

    def mark_best(self) -> None:
        """Let BEST point to the checkpoint of the best score, once it is written."""
        if self._scores is not None:  # rank 0
            self._queue.submit(self._checkpoints.explained()(self._scores.mark_best))
        self._is_confirmed = False  # the one before may be removed now

    def rewind(self, state: TrainState) -> None:
        """Continue from the checkpoint of `state`, which a rollback has loaded.

        Later checkpoints are superseded, and `state.divergence` becomes part of this one, so that a
        resume from it skips the same steps. Raises CheckpointError on every rank.
        """
        changes = state.model_dump(mode="json", include={"divergence"})

        def rewrite() -> None:
            assert self._scores is not None
            with self._checkpoints.explained():
                self._scores.rewind(state.step)
                best_step = self._scores.best_step_with_new_files
                self._checkpoints.rewind(state.step, changes, best_step=best_step)

        self._step.world.run_on_rank_zero(rewrite)
        self.saved_step, self._is_confirmed = state.step, False

    def confirm(self) -> None:
        """Remove old checkpoints; call after an accepted step, and at the end of the run."""
        # Called after every step, but needed only once per checkpoint.
        if not self._is_confirmed and self._step.world.is_rank_zero:
            self._queue.submit(self._checkpoints.prune)
        self._is_confirmed = True

    def wait(self) -> None:
        """Wait until everything is written. Collective.

        Raises CheckpointError or DivergedError on every rank if the thread of any rank has failed,
        and the FencedError of the uploads, if they had one.
        """
        if self._uploader is not None:
            self._queue.submit(self._uploader.require_newest_attempt)
        wait_for_queues(
            self._step.world,
            self._queue,
            name="checkpoint files",
            limit_seconds=self._config.rank_timeout_seconds,
            on_error=self._give_up,
        )

    def finish(self, *, require_copies: bool) -> None:
        """`wait`, then wait until the copies at the URL are complete. Collective.

        While the object storage fails, the uploads are repeated, for at most UPLOAD_SECONDS. After
        that, CheckpointError on every rank. Without `require_copies` a failure is logged.
        """
        self.wait()
        if self._config.checkpoint_url is None:
            return
        self._step.world.activity.name = "upload of checkpoints"
        failure = do_on_rank_zero(
            self._step.world,
            lambda: (
                self._uploader.finish(UPLOAD_SECONDS, retry=require_copies)
                if self._uploader
                else None
            ),
            name="the upload of checkpoints",
        )
        if failure is None:
            return
        message = (
            f"the checkpoints could not be copied to {shown(self._config.checkpoint_url)}: "
            f"{failure}. They are complete in {self._checkpoints.directory.path}. The same command "
            "repeats the upload"
        )
        if require_copies:
            raise CheckpointError(message)
        log.warning("%s", message)

    def settle(self) -> None:
        """`wait` before a rollback, which a save that has found NaN or Inf must not prevent.

        Collective.
        """
        try:
            self.wait()
        except DivergedError as error:
            log.info("%s", error)
            self._queue.close(timeout_seconds=0)
            self._queue, self._deadline = BackgroundQueue("checkpoint"), math.inf

    def wait_after(self, error: DivergedError) -> DivergedError:
        """`wait` before a run ends with `error`. Collective; returns the error to end it with.

        That is the error of the save if it has found NaN or Inf, which then caused what came later.
        """
        try:
            self.wait()
        except DivergedError as cause:
            return cause
        except TxlError as failure:
            log.error("%s", failure)
        return error

    def close(self) -> None:
        """End the thread. A save in flight is completed first, if the other ranks have done so."""
        self._deadline = min(self._deadline, time.monotonic() + CLOSE_TIMEOUT_SECONDS)
        if self._uploader is not None:
            self._uploader.close()
        if not self._queue.close(2 * CLOSE_TIMEOUT_SECONDS):
            log.warning("the checkpoint of step %s could not be completed", self.saved_step)
        elif self._queue.error is not None:
            log.info("%s", self._queue.error)
            self._checkpoints.directory.remove_staging(self._save_id)

    def _give_up(self) -> None:
        """Remove the files of a save that has failed on some rank; all ranks call this."""
        self._deadline = -math.inf
        self._queue.wait(CLOSE_TIMEOUT_SECONDS)
        # By every rank, after its own thread has ended: the last one finds all files.
        self._checkpoints.directory.remove_staging(self._save_id)

    # --- in the background thread ---------------------------------------------------------------

    def _require_useful(self, queue: BackgroundQueue) -> None:
        queue.progress += 1
        # A rollback has given the run another queue.
        if queue is not self._queue or time.monotonic() > self._deadline:
            raise TxlError("save cancelled: another rank failed to write its part")

    def _write(self, save: Save, snapshot: Snapshot) -> None:
        path = self._checkpoints.save(save, snapshot, self._header)
        if path is not None:
            with self._checkpoints.explained():
                # After the rename: once this file exists, a restart has `resume: auto`.
                if self._saved_file:
                    self._saved_file.touch()
                log.info("checkpoint at step %d | %s", save.state["step"], path)
