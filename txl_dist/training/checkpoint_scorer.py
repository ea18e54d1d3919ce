"""CheckpointScorer: a thread of rank 0 that has checkpoints scored while training continues.

    submit(step) -> wait until the checkpoint is complete -> worker -> take() -> ScoredCheckpoint

Checkpoints are scored in the order of their steps, because metrics have to be logged in that order.
If they come faster than they are scored, the oldest that waits is skipped. The sums of finished
batches are kept in RUN/evaluations: a worker or run that is killed does not score them again. A
checkpoint that cannot be scored is reported with the reason. Nothing here ends training; a loss
that is not finite is reported as such, and the training loop ends as after its own evaluation.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from data_pipeline.system.workers import Workers
from txl_dist.checkpoint.directory import CheckpointDirectory
from txl_dist.checkpoint.manifest import CheckpointManifest, load_checkpoint_manifest
from txl_dist.config.training_config import EvaluationConfig
from txl_dist.errors import TxlError
from txl_dist.evaluation.batch_scores import NonFiniteScoreError
from txl_dist.evaluation.distributed import evaluate_on_workers, plan_job
from txl_dist.evaluation.evaluate import EvaluationJob, EvaluationResult, EvaluationSettings
from txl_dist.training.data import EvaluatedSplit

POLL_SECONDS = 0.1
"""Polling interval while waiting for a checkpoint that is being written."""
MAX_FAILURES = 3
"""Checkpoints in a row that cannot be scored. After that no more are tried until the next start."""
CLOSE_TIMEOUT_SECONDS = 5.0

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoredCheckpoint:
    """The outcome for one checkpoint; without a `result`, `reason` says why."""

    step: int
    tokens: int = 0
    """Targets that the run had trained on."""
    result: EvaluationResult | None = None
    reason: str = ""
    has_diverged: bool = False
    """The loss is not finite."""


class _CancelledError(Exception):
    """The checkpoint is not wanted any more."""


class CheckpointScorer:
    """Any thread may call the methods; none of them waits for a score, except `wait`."""

    def __init__(
        self,
        checkpoints: CheckpointDirectory,
        evaluation: EvaluatedSplit,
        config: EvaluationConfig,
        *,
        open_workers: Callable[[], Workers],
        close_workers: Callable[[], None],
    ) -> None:
        """`open_workers` is called once, in the thread, `close_workers` by `close`."""
        self._checkpoints, self._evaluation, self._config = checkpoints, evaluation, config
        self._open_workers, self._close_workers = open_workers, close_workers
        self._workers: Workers | None = None
        # Of the calling thread, which has set the number of rank 0. As many for the worker: the
        # number of threads may change the last bit of a matrix product.
        self._num_threads = torch.get_num_threads()
        self._condition = threading.Condition()
        self._waiting: deque[int] = deque()
        self._current: int | None = None
        self._finished: list[ScoredCheckpoint] = []
        self._num_restarts = self._num_failures = 0
        self._is_closed = False
        self._done, self._total, self._progressed_at = 0, 0, time.monotonic()
        self._thread = threading.Thread(target=self._run, name="evaluation", daemon=True)
        self._thread.start()

    @property
    def is_ready(self) -> bool:
        """Whether `take` would return something."""
        return bool(self._finished)

    @property
    def progress(self) -> str:
        """`the score of step 500 (40 %), 1 more waiting`."""
        step, share = self._current, self._done / max(1, self._total)
        return f"the score of step {step} ({share:.0%}), {len(self._waiting)} more waiting"

    @property
    def idle_seconds(self) -> float:
        """Time since the last batch was scored, or since the checkpoint was begun."""
        return time.monotonic() - self._progressed_at

    def submit(self, step: int) -> None:
        """Score the checkpoint of a step that has been or is being saved."""
        with self._condition:
            self._waiting.append(step)
            while len(self._waiting) > self._config.max_waiting_checkpoints:
                missing = self._workers.missing() if self._workers else ""
                self._finish(
                    self._waiting.popleft(),
                    reason="checkpoints come faster than they are scored, so the oldest that waits "
                    f"is skipped{missing and f' (waiting for {missing})'}",
                )
            self._condition.notify_all()

    def restart(self, steps: Sequence[int], *, last_step: int = 0) -> None:
        """Score the checkpoints of these steps and nothing from before.

        The checkpoint of `last_step` may still be written; the others must be there.
        """
        with self._condition:
            self._num_restarts += 1
            self._current = None
            self._finished.clear()
            self._waiting.clear()
            self._progressed_at = time.monotonic()
            for step in steps:
                if step == last_step or self._checkpoints.at(step).exists():
                    self._waiting.append(step)
                else:
                    self._finish(step, reason="its checkpoint is not in the run directory")
            self._condition.notify_all()

    def give_up(self, reason: str) -> None:
        """Score nothing of what was submitted."""
        with self._condition:
            steps = [*([] if self._current is None else [self._current]), *self._waiting]
            finished = self._finished[:]
            self.restart(())
            self._finished = finished
            for step in steps:
                self._finish(step, reason=reason)

    def take(self) -> list[ScoredCheckpoint]:
        """What was finished since the last call; scores are in the order of their steps."""
        with self._condition:
            finished, self._finished = self._finished, []
        return finished

    def wait(self, timeout_seconds: float) -> bool:
        """Wait until something is finished or nothing is left to do; whether that is so now."""

        def is_over() -> bool:
            return self.is_ready or (self._current is None and not self._waiting)

        with self._condition:
            return self._condition.wait_for(is_over, timeout_seconds)

    def close(self) -> None:
        """End the thread and its worker. What is unfinished is scored after the next start."""
        with self._condition:
            self._is_closed = True
            self._num_restarts += 1
            self._condition.notify_all()
        self._close_workers()
        self._thread.join(CLOSE_TIMEOUT_SECONDS)

    def _finish(
        self,
        step: int,
        *,
        tokens: int = 0,
        result: EvaluationResult | None = None,
        reason: str = "",
        has_diverged: bool = False,
    ) -> None:
        outcome = ScoredCheckpoint(
            step=step, tokens=tokens, result=result, reason=reason, has_diverged=has_diverged
        )
        self._finished.append(outcome)
        self._condition.notify_all()

    # --- in the thread --------------------------------------------------------------------------

    def _run(self) -> None:
        while (task := self._next()) is not None:
            step, number = task
            tokens, result, reason, has_diverged = 0, None, "", False
            try:
                if self._num_failures >= MAX_FAILURES:
                    raise TxlError("the worker has failed too often; a new start opens another")
                self._workers = self._workers or self._open_workers()
                is_wanted = partial(self._is_current, number)
                tokens, result = self._score(step, self._workers, is_wanted)
                self._num_failures = 0
            except _CancelledError:
                continue
            except NonFiniteScoreError as error:
                reason, has_diverged = str(error), True
            except Exception as error:
                self._num_failures += 1
                reason = str(error) if isinstance(error, TxlError) else repr(error)
            with self._condition:
                if self._is_current(number):
                    self._current = None
                    self._finish(
                        step,
                        tokens=tokens,
                        result=result,
                        reason=reason,
                        has_diverged=has_diverged,
                    )

    def _next(self) -> tuple[int, int] | None:
        """The next step and the number of the restart that it belongs to; None after `close`."""
        with self._condition:
            self._condition.wait_for(lambda: bool(self._waiting) or self._is_closed)
            if self._is_closed:
                return None
            self._current = self._waiting.popleft()
            self._done, self._total, self._progressed_at = 0, 0, time.monotonic()
            return self._current, self._num_restarts

    def _is_current(self, number: int) -> bool:
        return number == self._num_restarts and not self._is_closed

    def _score(
        self, step: int, workers: Workers, is_wanted: Callable[[], bool]
    ) -> tuple[int, EvaluationResult]:
        path = self._checkpoints.at(step)
        while not path.exists():
            with self._condition:
                if self._condition.wait_for(lambda: not is_wanted(), POLL_SECONDS):
                    raise _CancelledError

        def count(_phase: str, done: int, total: int) -> None:
            if not is_wanted():
                raise _CancelledError
            self._done, self._total, self._progressed_at = done, total, time.monotonic()

        manifest = load_checkpoint_manifest(path)
        scores = self._checkpoints.run / "evaluations"
        planned = plan_job(self._job(manifest, step), scores, resume=True, allow_short_split=True)
        (result,) = evaluate_on_workers([planned], workers, progress=count)
        tokens: int = manifest.state["tokens"]
        return tokens, result

    def _job(self, manifest: CheckpointManifest, step: int) -> EvaluationJob:
        """The evaluation that the ranks would have done when they wrote the checkpoint."""
        model, run = manifest.architecture, manifest.run
        settings = EvaluationSettings(
            split=self._evaluation.name,
            mode="exact",
            tgt_len=run["data.tgt_len"],
            mem_len=model.mem_len,
            clamp_len=model.clamp_len,
            same_length=model.same_length,
            reset=run["data.reset"],
            precision=run["precision"],
            max_tokens=self._config.max_tokens,
        )
        return EvaluationJob(
            checkpoint=self._checkpoints.at(step),
            data=self._evaluation.corpus.directory,
            settings=settings,
            batch_chunks=self._config.batch_chunks,
            num_ranks=manifest.num_ranks,
            num_threads=self._num_threads,
        )
