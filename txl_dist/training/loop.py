"""The training loop: the order of events of a run.

    segment -> step (diverged? -> skip or rollback) -> state -> report -> checkpoint -> stop?
            -> evaluation -> score

Every rank runs this loop, and all ranks are at the same event. The loop contains no device, file or
launcher code: `step.py` computes, `report.py` writes metrics, `saving.py` writes checkpoints, and
`build.py` creates these parts.
"""

import math
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


class Evaluate(Protocol):
    """Scores the validation split on all ranks. Returns None on all if `stop` is true on any."""

    def __call__(self, *, stop: object) -> EvaluationResult | None: ...


@dataclass(kw_only=True)
class Trainer:
    """One rank's part of a run.

    These calls are collective, so all ranks must make them at the same event: `step`, `evaluate`,
    `report.measure_peak`, `report.compare_ranks`, and of `saver` save, wait, wait_after and finish.
    The other methods of `report` and `saver`, `segments` and `stop` are local to the rank. The peak
    is the highest FLOP/s that the machine reaches (`utilisation.py`).
    """

    config: RunConfig
    plan: LanePlan
    segments: Iterator[Segment]
    step: TrainStep
    report: Report
    stop: StopRequest
    saver: RunSaver
    evaluate: Evaluate | None
    evaluated_data: str | None
    """Digest of the dataset that `evaluate` scores."""
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
            is_complete = True
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

    def _train(self) -> TrainState:
        if self.state.evaluation_pending:
            self._evaluate()  # the checkpoint was written before the evaluation of its step
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
            # Before the evaluation, which may take minutes: a preemption would lose the checkpoint.
            if self._save_is_due(result):
                self._save()
            # Agreed on by all ranks in the step's collective, so all stop after the same step.
            if "stop" in result.raised and not self._is_finished:
                self._stop()
            if self.state.evaluation_pending:
                self._evaluate()
        if self.state.step == self.config.num_steps:
            self.saver.confirm(self.state)
        elif self.saver.saved_step != self.state.step:
            self._save()  # the run continues from here with other settings
        self._finish_saving(require_copies=self.state.step == self.config.num_steps)
        return self.state

    def _save_is_due(self, result: StepResult) -> bool:
        is_due = self._is_due(self.config.training.checkpoint_interval_steps)
        return is_due or self.state.step == self.last_step or "save_due" in result.raised

    def _is_due(self, interval_steps: int) -> bool:
        # A function of the step number only, so a resumed run has the same events.
        step = self.state.step
        return step % interval_steps == 0 or step == self.config.num_steps

    @property
    def _is_finished(self) -> bool:
        is_last = self.state.step == self.config.num_steps
        return is_last and not self.state.evaluation_pending

    def _next_segment(self) -> Segment:
        start = time.monotonic()
        self._activity.name = f"step {self.state.step + 1}"
        self._activity.enter(Span.DATA_WAIT)
        segment = next(self.segments)
        self._activity.enter(Span.OTHER)
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
        if self.state.evaluation_pending:
            self._evaluate()
        return True

    def _advance(self, segment: Segment, result: StepResult) -> None:
        self.state = self.state.model_copy(
            update={
                "step": self.state.step + 1,
                "position": segment.next_position,
                **(self._trained(result) if result.is_update else self._skipped(segment)),
            }
        )
        if self.evaluate is not None and self._is_due(self.config.evaluation.interval_steps):
            self.state = self.state.model_copy(update={"evaluation_pending": True})

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
        improved = self._take_score(result)
        self.report.evaluation(self.state, result, improved=improved)
        self.report.exclude(time.monotonic() - start)
        if self.saver.saved_step == self.state.step:
            self._save_score()
        elif improved:  # evaluations without a checkpoint at their step: save only the best ones
            self._save()

    def _take_score(self, result: EvaluationResult) -> bool:
        """Update the state with the score; returns whether it is the best one yet."""
        sums, settings = result.sums, result.settings
        if not math.isfinite(sums.nats):
            raise DivergedError(
                f"the loss of split {settings.split} after step {self.state.step} is {sums.nats}: "
                "earlier updates were too large, and the weights are unusable"
            )
        score = BestScore(
            step=self.state.step,
            nats_per_token=sums.nats_per_token,
            split=settings.split,
            max_tokens=settings.max_tokens,
            data_digest=self.evaluated_data,
        )
        improved = score.improves_on(self.state.best)
        best = score if improved else self.state.best
        self.state = self.state.model_copy(update={"best": best, "evaluation_pending": False})
        return improved

    def _save(self) -> None:
        start = time.monotonic()
        previous = self._activity.enter(Span.SAVE_WAIT)
        self.report.sync()  # a resume from this checkpoint keeps all lines up to its step
        self.saver.save(self.state)
        self._activity.enter(previous)
        self.report.save_wait(self.state, time.monotonic() - start)

    def _finish_saving(self, *, require_copies: bool) -> None:
        previous = self._activity.enter(Span.SAVE_WAIT)
        self.saver.finish(require_copies=require_copies)
        self._activity.enter(previous)

    def _save_score(self) -> None:
        self.report.sync()
        self.saver.save_score(self.state)

    def _stop(self) -> NoReturn:
        """Save and end the run, as requested by a signal or a stop file."""
        if self.saver.saved_step != self.state.step:
            self._save()
        self._finish_saving(require_copies=False)
        pending = " It begins with the evaluation." if self.state.evaluation_pending else ""
        raise PreemptedError(
            f"stopped on request after step {self.state.step}; everything is saved. "
            f"The same command resumes from this step.{pending}"
        )
