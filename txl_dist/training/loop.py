"""The training loop: the order of events, and nothing of how they are done.

    segment -> step -> state -> report -> checkpoint -> stop? -> evaluation -> score

Every rank runs this loop in step with the others. It knows no devices, no files and no launcher;
`step.py` computes, `report.py` speaks, `build.py` puts the parts together.
"""

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NoReturn, Protocol

from data_pipeline.streams.lanes import LanePlan
from data_pipeline.streams.segments import Segment
from txl_dist.checkpoint.manifest import BestScore, TrainState
from txl_dist.config.run_config import RunConfig
from txl_dist.errors import DivergedError, PreemptedError
from txl_dist.evaluation.evaluate import EvaluationResult
from txl_dist.evaluation.loss_sums import LossSums
from txl_dist.runtime.stop_request import StopRequest
from txl_dist.training.report import Report
from txl_dist.training.schedule import lr_at
from txl_dist.training.step import StepResult, TrainStep


class Evaluate(Protocol):
    """Scores the validation split on all ranks; None on all once `stop` is true on one."""

    def __call__(self, *, stop: object) -> EvaluationResult | None: ...


class DivergenceAdvice(Protocol):
    """Says which of the checkpoints of steps below `before` to go back to, and how."""

    def __call__(self, *, before: int) -> str: ...


class Saver(Protocol):
    """Writes checkpoints from all ranks."""

    saved_step: int | None
    """Step of the newest checkpoint of this run; None if there is none."""

    def save(self, state: TrainState) -> None:
        """Write a checkpoint of the state and of all tensors."""

    def save_score(self, state: TrainState) -> None:
        """Add the score in `state` to the checkpoint of its step, which is there already."""

    def confirm(self, state: TrainState) -> None:
        """The newest checkpoint led to a finite loss, or is the last: older ones may go."""


@dataclass(kw_only=True)
class Training:
    """The parts of one run on one rank."""

    config: RunConfig
    plan: LanePlan
    segments: Iterator[Segment]
    step: TrainStep
    report: Report
    stop: StopRequest
    saver: Saver
    evaluate: Evaluate | None
    evaluated_data: str | None
    """Digest of the data that `evaluate` scores."""
    state: TrainState
    divergence_advice: DivergenceAdvice

    def run(self) -> TrainState:
        """Train to the last step; returns the final state, saved.

        Raises DivergedError before a step that cannot be taken or a checkpoint that must not be
        written, and PreemptedError once the state is saved after a request to stop; both on every
        rank.
        """
        try:
            return self._train()
        except DivergedError as error:
            # A checkpoint of this very step would lead to the same numbers at any rate.
            advice = self.divergence_advice(before=self.state.step)
            raise DivergedError(f"{error}. {advice}") from error

    def _train(self) -> TrainState:
        if self.state.evaluation_pending:
            self._evaluate()  # what the run that is resumed here was stopped in
        while self.state.step < self.config.training.num_steps:
            segment = self._next_segment()
            result, lr = self._step(segment)
            self.saver.confirm(self.state)
            self._advance(segment, result)
            if self._is_due(self.config.training.log_interval_steps):
                self._report(result, lr)
            if self._is_due(self.config.training.checkpoint_interval_steps):
                self._save()
            if result.stop_requested and not self._is_finished:
                self._stop()
            if self.state.evaluation_pending:
                self._evaluate()
        self.saver.confirm(self.state)
        return self.state

    def _is_due(self, interval_steps: int) -> bool:
        step = self.state.step
        return step % interval_steps == 0 or step == self.config.training.num_steps

    @property
    def _is_finished(self) -> bool:
        is_last = self.state.step == self.config.training.num_steps
        return is_last and not self.state.evaluation_pending

    def _next_segment(self) -> Segment:
        began = time.monotonic()
        segment = next(self.segments)
        self.report.waited(time.monotonic() - began)
        return segment

    def _step(self, segment: Segment) -> tuple[StepResult, float]:
        number = self.state.step + 1
        lr = lr_at(number, self.config.optimizer, num_steps=self.config.training.num_steps)
        result = self.step(
            segment,
            step=number,
            num_targets=self.plan.targets_in_step(segment.position),
            lr=lr,
            stop_requested=bool(self.stop),
            peak_is_due=self.report.peak_is_due,
        )
        return result, lr

    def _advance(self, segment: Segment, result: StepResult) -> None:
        unreported = LossSums(*self.state.unreported) + result.sums
        self.state = self.state.model_copy(
            update={
                "step": self.state.step + 1,
                "position": segment.next_position,
                "tokens": self.state.tokens + result.sums.num_tokens,
                "unreported": (unreported.nats, unreported.num_tokens, unreported.num_bytes),
                "unreported_steps": self.state.unreported_steps + 1,
            }
        )
        if self.evaluate is not None and self._is_due(self.config.evaluation.interval_steps):
            self.state = self.state.model_copy(update={"evaluation_pending": True})

    def _report(self, result: StepResult, lr: float) -> None:
        if not self.state.unreported[1]:  # no target yet: the next line covers these steps
            return
        self.report.step(
            self.state,
            lr=lr,
            gradient_norm=result.gradient_norm,
            memory_valid=result.memory_valid,
        )
        if result.peak_is_due:
            self.report.measure_peak()
        self.state = self.state.model_copy(
            update={"unreported": (0.0, 0, 0), "unreported_steps": 0}
        )

    def _evaluate(self) -> None:
        """Score the validation split; the score joins the checkpoint of this step."""
        assert self.evaluate is not None
        began = time.monotonic()
        result = self.evaluate(stop=self.stop)
        if result is None:
            self._stop()
        improved = self._take_score(result)
        self.report.evaluation(self.state, result, improved=improved)
        self.report.not_training(time.monotonic() - began)
        if self.saver.saved_step == self.state.step:
            self._save_score()
        elif improved:
            self._save()

    def _take_score(self, result: EvaluationResult) -> bool:
        """Put the score into the state; true if it is the best so far."""
        sums, settings = result.sums, result.settings
        if not math.isfinite(sums.nats):
            raise DivergedError(
                f"the loss of split {settings.split} after step {self.state.step} is {sums.nats}: "
                "the updates before it were too large, and the weights are of no more use"
            )
        score = BestScore(
            step=self.state.step,
            nats_per_token=sums.nats_per_token,
            split=settings.split,
            max_tokens=settings.max_tokens,
            data_digest=self.evaluated_data,
        )
        improved = score.improves_on(self.state.best)
        self.state = self.state.model_copy(
            update={
                "best": score if improved else self.state.best,
                "evaluation_pending": False,
            }
        )
        return improved

    def _save(self) -> None:
        began = time.monotonic()
        self.report.sync()
        self.saver.save(self.state)
        self.report.not_training(time.monotonic() - began)

    def _save_score(self) -> None:
        self.report.sync()
        self.saver.save_score(self.state)

    def _stop(self) -> NoReturn:
        """End the run on request, with its state saved."""
        if self.saver.saved_step != self.state.step:
            self._save()
        pending = " Its evaluation comes first then." if self.state.evaluation_pending else ""
        raise PreemptedError(
            f"stopped on request after step {self.state.step}; everything is saved. "
            f"The same command resumes there.{pending}"
        )
