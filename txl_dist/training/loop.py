"""The training loop: the order of events, and nothing of how they are done.

    segment -> step -> state -> report -> evaluation -> checkpoint -> stop?

Every rank runs this loop in step with the others. It knows no devices, no files and no launcher;
`step.py` computes, `report.py` speaks, `build.py` puts the parts together.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from data_pipeline.streams.lanes import LanePlan
from data_pipeline.streams.segments import Segment
from txl_dist.checkpoint.manifest import BestScore, TrainState
from txl_dist.config import RunConfig
from txl_dist.errors import PreemptedError
from txl_dist.evaluation.evaluate import EvaluationResult
from txl_dist.loss_sums import LossSums
from txl_dist.runtime.stop_signals import StopRequest
from txl_dist.training.report import Report
from txl_dist.training.schedule import lr_at
from txl_dist.training.step import StepResult, TrainStep


class Evaluate(Protocol):
    """Scores the validation split on all ranks."""

    def __call__(self) -> EvaluationResult: ...


class Save(Protocol):
    """Writes a checkpoint of the state, and of all tensors, from all ranks."""

    def __call__(self, state: TrainState) -> None: ...


@dataclass(kw_only=True)
class Training:
    """The parts of one run on one rank."""

    config: RunConfig
    plan: LanePlan
    segments: Iterator[Segment]
    step: TrainStep
    report: Report
    stop: StopRequest
    save: Save
    evaluate: Evaluate | None
    evaluated_data: str | None
    """Digest of the data that `evaluate` scores."""
    state: TrainState

    def run(self) -> TrainState:
        """Train to the last step; returns the final state, saved.

        Raises DivergedError before a step that cannot be taken, and PreemptedError once the state
        is saved after a request to stop; both on every rank.
        """
        training = self.config.training
        while self.state.step < training.num_steps:
            segment = self._next_segment()
            result, lr = self._step(segment)
            self._advance(segment, result)
            if self.state.step % training.log_interval_steps == 0 or self._is_last:
                self._report(result, lr)
            improved = self._is_evaluation_due and self._evaluate()
            stopping = result.stop_requested and not self._is_last
            if improved or stopping or self._is_checkpoint_due:
                self._save()
            if stopping:
                raise PreemptedError(
                    f"stopped on request after step {self.state.step}; everything is saved. "
                    "The same command resumes there"
                )
        return self.state

    @property
    def _is_last(self) -> bool:
        return self.state.step == self.config.training.num_steps

    @property
    def _is_evaluation_due(self) -> bool:
        interval = self.config.evaluation.interval_steps
        return self.evaluate is not None and (self.state.step % interval == 0 or self._is_last)

    @property
    def _is_checkpoint_due(self) -> bool:
        interval = self.config.training.checkpoint_interval_steps
        return self.state.step % interval == 0 or self._is_last

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

    def _evaluate(self) -> bool:
        """Score the validation split; true if it is the best so far."""
        assert self.evaluate is not None
        began = time.monotonic()
        result = self.evaluate()
        best = BestScore(
            step=self.state.step,
            nats_per_token=result.sums.nats_per_token,
            split=result.settings.split,
            max_tokens=result.settings.max_tokens,
            data_digest=self.evaluated_data,
        )
        improved = best.improves_on(self.state.best)
        if improved:
            self.state = self.state.model_copy(update={"best": best})
        self.report.evaluation(self.state, result, improved=improved)
        self.report.not_training(time.monotonic() - began)
        return improved

    def _save(self) -> None:
        began = time.monotonic()
        self.report.sync()
        self.save(self.state)
        self.report.not_training(time.monotonic() - began)
