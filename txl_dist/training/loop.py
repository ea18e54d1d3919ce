"""The training loop: the order of events of a run.

    segment -> step -> state -> report -> checkpoint -> stop? -> evaluation -> score

Every rank runs this loop, and all ranks are at the same event. The loop contains no device, file or
launcher code: `step.py` computes, `report.py` writes metrics, `saving.py` writes checkpoints, and
`build.py` creates these parts.
"""

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NoReturn, Protocol

from data_pipeline.streams.lanes import LanePlan
from data_pipeline.streams.segments import Segment
from txl_dist.checkpoint.directory import divergence_advice
from txl_dist.config.run_config import RunConfig
from txl_dist.errors import DivergedError, PreemptedError
from txl_dist.evaluation.evaluate import EvaluationResult
from txl_dist.evaluation.loss_sums import LossSums
from txl_dist.runtime.fault_injection import fault_point
from txl_dist.runtime.stop_request import StopRequest
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

    These calls are collective, so all ranks must make them at the same event: `step`, `saver.*`,
    `evaluate` and `report.measure_peak`. Other methods of `report`, `segments` and `stop` are local
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
    evaluated_data: str | None
    """Digest of the dataset that `evaluate` scores."""
    state: TrainState

    def run(self) -> TrainState:
        """Train to the last step, save, and return the final state.

        Raises, on every rank, DivergedError if a loss, gradient or weight is not finite (that step
        is not saved), and PreemptedError after a stop request, once the state is saved.
        """
        try:
            return self._train()
        except DivergedError as error:
            # Not the checkpoint of this step: resuming from it would produce the same numbers.
            advice = divergence_advice(self.config.run_path, before=self.state.step)
            raise DivergedError(f"{error}. {advice}") from error

    def _train(self) -> TrainState:
        if self.state.evaluation_pending:
            self._evaluate()  # the checkpoint was written before the evaluation of its step
        while self.state.step < self.config.training.num_steps:
            segment = self._next_segment()
            result, lr = self._step(segment)
            # The loss was finite, so the checkpoint written after the previous step is usable.
            self.saver.confirm(self.state)
            self._advance(segment, result)
            if self._is_due(self.config.training.log_interval_steps):
                self._report(result, lr)
            # Before the evaluation, which may take minutes: a preemption would lose the checkpoint.
            if self._is_due(self.config.training.checkpoint_interval_steps):
                self._save()
            # Agreed on by all ranks in the step's collective, so all stop after the same step.
            if "stop" in result.raised and not self._is_finished:
                self._stop()
            if self.state.evaluation_pending:
                self._evaluate()
        self.saver.confirm(self.state)
        return self.state

    def _is_due(self, interval_steps: int) -> bool:
        # A function of the step number only, so a resumed run has the same events.
        step = self.state.step
        return step % interval_steps == 0 or step == self.config.training.num_steps

    @property
    def _is_finished(self) -> bool:
        is_last = self.state.step == self.config.training.num_steps
        return is_last and not self.state.evaluation_pending

    def _next_segment(self) -> Segment:
        start = time.monotonic()
        segment = next(self.segments)
        self.report.data_wait(time.monotonic() - start)
        return segment

    def _step(self, segment: Segment) -> tuple[StepResult, float]:
        number = self.state.step + 1
        lr = lr_at(number, self.config.optimizer, num_steps=self.config.training.num_steps)
        result = self.step(
            segment,
            step=number,
            num_targets=self.plan.targets_in_step(segment.position),
            lr=lr,
            flags={"stop": bool(self.stop), "measure_peak": self.report.peak_is_due},
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
        # A segment of one token has no target. The next line then covers this step too.
        if not self.state.unreported[1]:
            return
        self.report.step(
            self.state,
            lr=lr,
            gradient_norm=result.gradient_norm,
            memory_valid=result.memory_valid,
        )
        if "measure_peak" in result.raised:
            self.report.measure_peak()
        self.state = self.state.model_copy(
            update={"unreported": (0.0, 0, 0), "unreported_steps": 0}
        )

    def _evaluate(self) -> None:
        """Score the validation split, and save the score with the checkpoint of this step."""
        assert self.evaluate is not None
        fault_point("evaluation")
        start = time.monotonic()
        result = self.evaluate(stop=self.stop)
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
        self.report.sync()  # a resume from this checkpoint keeps all lines up to its step
        self.saver.save(self.state)
        self.report.exclude(time.monotonic() - start)

    def _save_score(self) -> None:
        self.report.sync()
        self.saver.save_score(self.state)

    def _stop(self) -> NoReturn:
        """Save and end the run, as requested by a signal or a stop file."""
        if self.saver.saved_step != self.state.step:
            self._save()
        pending = " It begins with the evaluation." if self.state.evaluation_pending else ""
        raise PreemptedError(
            f"stopped on request after step {self.state.step}; everything is saved. "
            f"The same command resumes from this step.{pending}"
        )
