"""The training loop: the order of events of a run.

    segment -> step (diverged? -> skip or rollback) -> state -> report -> checkpoint -> stop?
            -> evaluation -> score

With `evaluation.on: workers`, the evaluation is a request, and its score is taken after a later
step.

Every rank runs this loop, and all ranks are at the same event. The loop contains no device, file or
launcher code: `step.py` computes, `report.py` writes metrics, `saving.py` writes checkpoints, and
`build.py` creates these parts.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NoReturn, Protocol

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
from txl_dist.training.profiler import StepProfiler
from txl_dist.training.recovery import Recovery
from txl_dist.training.report import Report
from txl_dist.training.saving import RunSaver
from txl_dist.training.schedule import lr_at
from txl_dist.training.state import BestScore, TrainState
from txl_dist.training.step import StepResult, TrainStep
from txl_dist.training.worker_evaluation import WorkerEvaluation


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
    step: TrainStep
    report: Report
    stop: StopRequest
    saver: RunSaver
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
    _last_update: tuple[StepResult, float] | None = field(default=None, init=False)
    """Result and learning rate of the last step of this process that updated the weights."""

    def run(self) -> TrainState:
        """Train to `last_step`, save, and return the final state.

        Raises, on every rank, DivergedError if a step has diverged and `divergence.policy` ends the
        run (that step is not saved), and PreemptedError after a stop request, once the state is
        saved.
        """
        is_complete = False
        try:
            state = self._train()
            is_complete = state.step >= self.config.num_steps
        except DivergedError as error:
            cause = self.saver.wait_after(error)
            # Not the checkpoint of this step: resuming from it would produce the same numbers.
            last_update = self.state.divergence.last_update(self.state.step)
            advice = divergence_advice(self.config.run_path, before=last_update)
            raise DivergedError(f"{cause}. {advice}") from error
        finally:
            self.report.end(self.state, is_complete=is_complete)
        return state

    @property
    def _activity(self) -> Activity:
        return self.step.world.activity

    @property
    def _is_evaluated(self) -> bool:
        return self.evaluated_data is not None

    def _train(self) -> TrainState:
        self._resume_evaluation()
        while self.state.step < self.last_step:
            if self.profiler is not None:
                self.profiler.before_step(self.state.step + 1)
            segment = self._next_segment()
            result, lr = self._step(segment)
            if "save_failed" in result.raised:
                self.saver.wait()  # raises the error on every rank
            if result.event is not None and self._rolls_back(segment, result):
                continue
            if result.is_update:
                # The step was accepted, so the checkpoint written after the previous one is usable.
                self.saver.confirm(self.state)
                self._last_update = result, lr
            self._advance(segment, result)
            if self._is_due(self.config.training.log_interval_steps):
                self._report()
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
        self._finish()
        return self.state

    def _finish(self) -> None:
        """Save what is not saved at the end of the run, or before a change of settings."""
        if self.state.step == self.config.num_steps:
            self._wait_for_scores()
            self.saver.confirm(self.state)
        elif self.saver.saved_step != self.state.step:
            self._save()  # the run continues from here with other settings
        self._finish_saving(require_copies=self.state.step == self.config.num_steps)

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
            self.report.event("first batch")
        self.report.data_wait(time.monotonic() - start)
        return segment

    def _step(self, segment: Segment) -> tuple[StepResult, float]:
        number = self.state.step + 1
        lr = lr_at(number, self.config.optimizer, num_steps=self.config.num_steps)
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
            return self.step.skip(step=number, flags=flags), lr
        result = self.step(
            segment,
            step=number,
            num_targets=self.plan.targets_in_step(segment.position),
            lr=lr,
            judge=self._judge,
            contiguous_from=self.state.contiguous_from,
            flags=flags,
        )
        self._activity.end_step()
        return result, lr

    def _judge(self, sums: LossSums, gradient_norm: float) -> str | None:
        return self.state.divergence.find_event(
            self.config.divergence,
            step=self.state.step + 1,
            sums=sums,
            gradient_norm=gradient_norm,
        )

    def _rolls_back(self, segment: Segment, result: StepResult) -> bool:
        """Respond to a step that has diverged; returns whether the run is at an older step now."""
        self.state = self.recovery.record(self.state, segment, result)
        if self.config.divergence.policy != "rollback":
            return False
        self.state, self.plan, self.segments = self.recovery.roll_back(self.state)
        self._last_update = None  # a step of the abandoned trajectory
        self._resume_evaluation()
        return True

    def _advance(self, segment: Segment, result: StepResult) -> None:
        self.state = self.state.model_copy(
            update={
                "step": self.state.step + 1,
                "position": segment.next_position,
                "score": None,
                **(self._trained(result) if result.is_update else self._skipped(segment)),
            }
        )
        if self._is_evaluated and self._is_due(self.config.evaluation.interval_steps):
            self.state = self.state.with_missing_score(self.config.evaluation.on)

    def _trained(self, result: StepResult) -> dict[str, Any]:
        unreported = LossSums(*self.state.unreported) + result.sums
        divergence = self.state.divergence.with_accepted(
            self.config.divergence, sums=result.sums, gradient_norm=result.gradient_norm
        )
        return {
            "tokens": self.state.tokens + result.sums.num_tokens,
            "unreported": (unreported.nats, unreported.num_tokens, unreported.num_bytes),
            "unreported_steps": self.state.unreported_steps + 1,
            "divergence": divergence,
        }

    def _skipped(self, segment: Segment) -> dict[str, Any]:
        # The memory is that of the tokens before this segment: the next one must not attend to it.
        return {
            "skipped_steps": self.state.skipped_steps + 1,
            "contiguous_from": segment.next_position,
        }

    def _report(self) -> None:
        # Without trained targets (skipped steps, a segment of one token), the next line covers
        # this step too.
        if not self.state.unreported[1] or self._last_update is None:
            self.report.without_loss(self.state)
            return
        result, lr = self._last_update
        self.report.step(
            self.state,
            lr=lr,
            gradient_norm=result.gradient_norm,
            memory_valid=result.memory_valid,
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
        score = self._take_score(result, step=self.state.step, tokens=self.state.tokens)
        self.report.exclude(time.monotonic() - start)
        if self.saver.saved_step == self.state.step:
            self._save_score(score)
        elif self.state.best == score:  # without a checkpoint at its step: save only the best ones
            self._save()

    def _take_scores(self) -> None:
        """Take what the worker has finished, and save the scores with their checkpoints."""
        for outcome in self.worker_evaluation.take():
            if outcome.has_diverged:
                raise DivergedError(f"after step {outcome.step}, {outcome.reason}")
            if outcome.result is None:
                self.state = self.state.without_score(outcome.step)
                self.report.no_score(outcome.step, outcome.reason)
            else:
                self._save_score(
                    self._take_score(outcome.result, step=outcome.step, tokens=outcome.tokens)
                )

    def _wait_for_scores(self) -> None:
        if not self.state.unscored_steps:
            return
        self.saver.wait()  # raises if the checkpoint that would be scored cannot be written
        previous = self._activity.enter(Span.EVALUATION)
        while self.state.unscored_steps:
            if not self.worker_evaluation.wait(stop=self.stop):
                self._stop()
            self._take_scores()
        self._activity.enter(previous)

    def _take_score(self, result: EvaluationResult, *, step: int, tokens: int) -> BestScore:
        """Update the state with the score of a step, and report it. Raises DivergedError."""
        score = BestScore.of(result, step=step, data_digest=self.evaluated_data)
        self.state = self.state.with_score(score)
        improved = self.state.best == score
        self.report.evaluation(result, step=step, tokens=tokens, improved=improved)
        return score

    def _save(self) -> None:
        start = time.monotonic()
        previous = self._activity.enter(Span.SAVE_WAIT)
        self.report.sync()  # a resume from this checkpoint keeps all lines up to its step
        self.saver.save(self.state)
        if self.state.is_unscored:
            self.worker_evaluation.submit(self.state.step)
        self._activity.enter(previous)
        self.report.save_wait(self.state, time.monotonic() - start)

    def _finish_saving(self, *, require_copies: bool) -> None:
        previous = self._activity.enter(Span.SAVE_WAIT)
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
