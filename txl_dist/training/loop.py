"""The training loop: the order of events of a run.

    segment -> step (diverged? -> skip or rollback) -> state -> report -> checkpoint -> stop?
            -> evaluation -> score

A rollback, also one because of a save or an evaluation, abandons the rest of the events, and the
loop continues at the older step. With `evaluation.on: workers`, the evaluation is a request, and
its score is taken after a later step.

Every rank runs this loop, and all ranks are at the same event. The loop contains no device, file or
launcher code: `step.py` computes, `report.py` writes metrics, `saving.py` writes checkpoints, and
`setup.py` creates these parts.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NoReturn, Protocol

from data_pipeline.streams.lanes import LanePlan
from data_pipeline.streams.segments import Segment
from txl_dist.checkpoint.directory import divergence_advice
from txl_dist.config.run_config import RunConfig
from txl_dist.errors import DivergedError, PreemptedError
from txl_dist.evaluation.evaluate import EvaluationResult
from txl_dist.evaluation.loss_sums import LossSums
from txl_dist.runtime.activity import Activity, Span
from txl_dist.runtime.fault_injection import fault_point
from txl_dist.runtime.stop_request import StopRequest
from txl_dist.tracking.tracker import Tracker
from txl_dist.training.advance import after_step
from txl_dist.training.follow import FIRST_BATCH
from txl_dist.training.profiler import StepProfiler
from txl_dist.training.recovery import Recovery, Rollback
from txl_dist.training.report import Report
from txl_dist.training.saving import RunSaver
from txl_dist.training.schedule import lr_at
from txl_dist.training.state import BestScore, TrainState
from txl_dist.training.step import StepResult, TrainStep
from txl_dist.training.worker_evaluation import WorkerEvaluation


class RolledBackError(Exception):
    """Leaves the events of a step that a rollback has abandoned. Never leaves the loop."""

    def __init__(self, rollback: Rollback) -> None:
        super().__init__(rollback)
        self.rollback = rollback


class Evaluate(Protocol):
    """Scores the validation split on all ranks. Returns None on all if `stop` is true on any."""

    def __call__(self, *, stop: object) -> EvaluationResult | None: ...


@dataclass(kw_only=True)
class Trainer:
    """One rank's part of a run.

    These calls are collective, so all ranks must make them at the same event: `step`, `evaluate`,
    `report.measure_peak`, `report.compare_ranks`, of `worker_evaluation` take and wait, and of
    `saver` save, wait, wait_after and finish. Their other methods, `segments` and `stop` are local
    to the rank. The peak is the highest FLOP/s that the machine reaches (`utilisation.py`).
    """

    config: RunConfig
    plan: LanePlan
    segments: Iterator[Segment]
    read_from: Callable[[TrainState], tuple[LanePlan, Iterator[Segment]]]
    """Opens `plan` and `segments` at a state to which a rollback has returned."""
    step: TrainStep
    report: Report
    stop: StopRequest
    saver: RunSaver
    tracker: Tracker | None
    evaluate: Evaluate | None
    worker_evaluation: WorkerEvaluation
    """At most one of the two scores the validation split."""
    evaluated_data: str | None
    """Digest of the dataset that is scored."""
    state: TrainState
    last_step: int
    """Where `run` returns: the last step of the run, or that of a change of settings."""
    recovery: Recovery
    profiler: StepProfiler | None = None
    _is_resuming: bool = field(default=True, init=False)
    """Whether evaluations may be missing in the checkpoint."""
    _is_done: bool = field(default=False, init=False)
    _must_rebuild: bool = field(default=False, init=False)
    """A rollback has returned to a checkpoint of other settings."""

    def run(self) -> TrainState:
        """Train to `last_step`, save, and return the final state.

        Raises, on every rank, DivergedError if a step has diverged and `divergence.policy` ends the
        run (that step is not saved), and PreemptedError after a stop request, once the state is
        saved.
        """
        is_complete = is_stopped = False
        try:
            state = self._train()
            is_complete = state.step >= self.config.num_steps
        except PreemptedError:
            is_stopped = True
            raise
        except DivergedError as error:
            cause = self.saver.wait_after(error)
            # Not the checkpoint of this step: resuming from it would produce the same numbers.
            last_update = self.state.divergence.last_update(self.state.step)
            advice = divergence_advice(self.config.run_path, before=last_update)
            raise DivergedError(f"{cause}. {advice}") from error
        finally:
            self.report.end(self.state, is_complete=is_complete, is_stopped=is_stopped)
        return state

    @property
    def _activity(self) -> Activity:
        return self.step.world.activity

    @property
    def _is_evaluated(self) -> bool:
        return self.evaluated_data is not None

    def _train(self) -> TrainState:
        while not (self._is_done or self._must_rebuild):
            try:
                if self._is_resuming:
                    self._resume_evaluation()
                elif self.state.step < self.last_step:
                    self._train_step()
                else:
                    self._finish()
            except RolledBackError as event:
                self._continue_from(event.rollback)
        return self.state

    def _train_step(self) -> None:
        if self.profiler is not None:
            self.profiler.before_step(self.state.step + 1)
        segment = self._next_segment()
        result = self._step(segment)
        # Before anything that can raise: a running save may detect the same bad weights.
        if result.event is not None:
            self._respond(segment, result)
        if "save_failed" in result.raised:
            with self._finite_weights():
                self.saver.wait()  # raises the error on every rank
        if result.is_update:
            # The step was accepted, so the checkpoint written after the previous one is usable.
            self.saver.confirm(self.state)
        self._advance(segment, result)
        self.report.end_step(self.state, is_computed=result.is_update or result.event is not None)
        if self._is_due(self.config.training.log_interval_steps):
            self._report(result)
        self.report.statistics(self.state, result.statistics)
        if "scores_ready" in result.raised:
            self._take_scores()
        # Before the evaluation, which may take minutes: a preemption would lose the checkpoint.
        if self._save_is_due(result):
            self._save()
        # Agreed on by all ranks in the step's collective, so all stop after the same step.
        if "stop" in result.raised and not self._is_finished:
            self._stop()
        if self.state.evaluation_pending:
            self._evaluate()

    def _finish(self) -> None:
        """Save what is not saved at the end of the run, or before a change of settings."""
        if self.state.step == self.config.num_steps:
            self._wait_for_scores()
            self.saver.confirm(self.state)
        elif self.saver.saved_step != self.state.step:
            self._save()  # the run continues from here with other settings
        self._finish_saving(require_copies=self.state.step == self.config.num_steps)
        self._is_done = True

    def _save_is_due(self, result: StepResult) -> bool:
        is_due = self._is_due(self.config.training.checkpoint_interval_steps)
        is_due = is_due or self.state.is_unscored  # a worker scores a checkpoint
        return is_due or self.state.step == self.last_step or "save_due" in result.raised

    def _is_due(self, interval_steps: int) -> bool:
        # A function of the step number only, so a resumed run has the same events.
        step = self.state.step
        return step % interval_steps == 0 or step == self.config.num_steps

    @property
    def _is_finished(self) -> bool:
        is_last = self.state.step == self.config.num_steps
        return is_last and not self.state.missing_scores

    def _next_segment(self) -> Segment:
        start = time.monotonic()
        self._activity.name = f"step {self.state.step + 1}"
        self._activity.enter(Span.DATA_WAIT)
        segment = next(self.segments)
        self._activity.enter(Span.OTHER)
        if self._activity.num_steps == 0:
            self.report.event(FIRST_BATCH)
        self.report.data_wait(time.monotonic() - start)
        return segment

    def _step(self, segment: Segment) -> StepResult:
        number = self.state.step + 1
        flags = {
            "stop": bool(self.stop),
            "measure_peak": self.report.peak_is_due,
            "save_due": self.saver.is_due,
            "save_failed": self.saver.has_failed,
            "scores_ready": self.worker_evaluation.is_ready,
            "compare_ranks": self.report.comparison_is_due,
        }
        if number in self.state.divergence.skip_steps:
            self.report.event("step %d is skipped: a rollback has excluded it", number)
            return self.step.skip(step=number, flags=flags)
        result = self.step(
            segment,
            step=number,
            num_targets=self.plan.targets_in_step(segment.position),
            lr=self._lr_at(number),
            check=self._check,
            contiguous_from=self.state.contiguous_from,
            flags=flags,
        )
        self._activity.end_step()
        return result

    def _lr_at(self, step: int) -> float:
        return lr_at(step, self.config.optimizer, num_steps=self.config.num_steps)

    def _check(self, sums: LossSums, gradient_norm: float) -> str | None:
        return self.state.divergence.find_event(
            self.config.divergence,
            step=self.state.step + 1,
            sums=sums,
            gradient_norm=gradient_norm,
        )

    def _respond(self, segment: Segment, result: StepResult) -> None:
        """Respond to a step that has diverged. Raises RolledBackError after a rollback."""
        self.state = self.recovery.record(self.state, segment, result)
        if self.config.divergence.policy == "rollback":
            raise RolledBackError(self.recovery.roll_back_step(self.state))

    def _continue_from(self, rollback: Rollback) -> None:
        self._activity.enter(Span.OTHER)
        self.state, self._is_resuming = rollback.state, True
        self._must_rebuild = rollback.has_other_settings
        if not self._must_rebuild:
            self.plan, self.segments = self.read_from(self.state)

    def _advance(self, segment: Segment, result: StepResult) -> None:
        self.state = after_step(self.state, segment, result, self.config.divergence)
        if self._is_evaluated and self._is_due(self.config.evaluation.interval_steps):
            self.state = self.state.with_missing_score(self.config.evaluation.on)

    def _report(self, result: StepResult) -> None:
        # Without trained targets (skipped steps, a segment of one token), the next line covers
        # this step too.
        last = self.state.last_update
        if not self.state.unreported[1] or last is None:
            self.report.without_loss(self.state)
            return
        self.report.step(
            self.state,
            lr=self._lr_at(last.step),
            gradient_norm=last.gradient_norm,
            memory_valid=last.memory_valid,
        )
        if "measure_peak" in result.raised:
            self.report.measure_peak()
        if "compare_ranks" in result.raised:
            self.report.compare_ranks()
        self.state = self.state.model_copy(
            update={"unreported": (0.0, 0, 0), "unreported_steps": 0}
        )

    def _resume_evaluation(self) -> None:
        """Do or request the evaluations that are missing in the checkpoint."""
        if self.state.evaluation_pending:
            self._evaluate()  # the checkpoint was written before the evaluation of its step
        if self.state.is_unscored and self.saver.saved_step != self.state.step:
            self._save()  # resumed from a checkpoint of another run
        self.worker_evaluation.restart(self.state)
        self._is_resuming = False

    def _evaluate(self) -> None:
        """Score the validation split, and save the score with the checkpoint of this step."""
        assert self.evaluate is not None
        fault_point("evaluation")
        start = time.monotonic()
        previous = self._activity.enter(Span.EVALUATION)
        result = self.evaluate(stop=self.stop)
        self._activity.enter(previous)
        if result is None:
            self._stop()
        self.report.evaluation_wait(time.monotonic() - start)
        score = self._take_score(result, step=self.state.step, tokens=self.state.tokens)
        if self.saver.saved_step == self.state.step:
            self._save_score(score)
        elif self.state.best == score:  # without a checkpoint at its step: save only the best ones
            self._save()

    def _take_scores(self) -> None:
        """Take what the worker has finished, and save the scores with their checkpoints."""
        for outcome in self.worker_evaluation.take():
            if outcome.has_diverged:
                error = DivergedError(f"after step {outcome.step}, {outcome.reason}")
                self._give_up_weights(error, outcome.step)
            if outcome.result is None:
                self.state = self.state.without_score(outcome.step)
                self.report.no_score(outcome.step, outcome.reason)
            else:
                self._save_score(
                    self._take_score(outcome.result, step=outcome.step, tokens=outcome.tokens)
                )

    def _give_up_weights(self, error: DivergedError, step: int) -> NoReturn:
        """Respond to weights that are of no use. Raises `error`, or RolledBackError."""
        raise RolledBackError(self.recovery.roll_back_weights(self.state, error, step))

    @contextmanager
    def _finite_weights(self) -> Iterator[None]:
        """Around a wait for a save, which finds weights that are not finite."""
        saved_step = self.saver.saved_step
        try:
            yield
        except DivergedError as error:
            assert saved_step is not None
            self._give_up_weights(error, saved_step)

    def _wait_for_scores(self) -> None:
        if not self.state.unscored_steps:
            return
        with self._finite_weights():
            self.saver.wait()  # raises if the checkpoint that would be scored cannot be written
        previous = self._activity.enter(Span.EVALUATION)
        while self.state.unscored_steps:
            if not self.worker_evaluation.wait(stop=self.stop):
                self._stop()
            self._take_scores()
        self._activity.enter(previous)

    def _take_score(self, result: EvaluationResult, *, step: int, tokens: int) -> BestScore:
        """Update the state with the score of a step, and report it.

        Raises DivergedError or RolledBackError if it is not finite.
        """
        try:
            score = BestScore.of(result, step=step, data_digest=self.evaluated_data)
        except DivergedError as error:
            self._give_up_weights(error, step)
        gain = score.gain_over(self.state.best)
        self.state = self.state.with_score(score)
        self.report.evaluation(result, step=step, tokens=tokens, gain=gain)
        return score

    def _save(self) -> None:
        start = time.monotonic()
        previous = self._activity.enter(Span.SAVE_WAIT)
        self.report.sync()  # a resume from this checkpoint keeps all lines up to its step
        with self._finite_weights():
            self.saver.save(self.state)
        if self.state.is_unscored:
            self.worker_evaluation.submit(self.state.step)
        self._activity.enter(previous)
        self.report.save_wait(self.state, time.monotonic() - start)

    def _finish_saving(self, *, require_copies: bool) -> None:
        previous = self._activity.enter(Span.SAVE_WAIT)
        with self._finite_weights():
            self.saver.finish(require_copies=require_copies)
        self._activity.enter(previous)

    def _save_score(self, score: BestScore) -> None:
        self.report.sync()
        self.saver.save_score(self.state, score)

    def _stop(self) -> NoReturn:
        """Save and end the run, as requested by a signal or a stop file."""
        if self.saver.saved_step != self.state.step:
            self._save()
        self._finish_saving(require_copies=False)
        pending = " It begins with the evaluation." if self.state.missing_scores else ""
        raise PreemptedError(
            f"stopped on request after step {self.state.step}; everything is saved. "
            f"The same command resumes from this step.{pending}"
        )
