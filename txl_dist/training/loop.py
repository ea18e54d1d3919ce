"""The training loop: the order of events of a run.

    segment -> step (diverged? -> skip or rollback) -> state -> line -> checkpoint -> stop?
            -> evaluation -> score

A rollback, also one because of a save or an evaluation, ends the events of its step, and the loop
continues at the older step.

Every rank runs this loop, and all ranks are at the same event. The loop contains no device, file or
launcher code: `step.py` computes, observers report (`observer.py`), `saving.py` writes checkpoints,
and `setup.py` creates these parts.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NoReturn

from data_pipeline.streams.segments import Segment
from txl_dist.config.run_config import RunConfig
from txl_dist.errors import DivergedError, PreemptedError
from txl_dist.runtime.activity import Activity, Span
from txl_dist.runtime.fault_injection import fault_point
from txl_dist.runtime.stop import StopRequest
from txl_dist.training.observer import Observers
from txl_dist.training.recovery import Recovery
from txl_dist.training.saving import RunSaver
from txl_dist.training.schedule import lr_at
from txl_dist.training.scores import Evaluate, ScoreTable
from txl_dist.training.segment_source import SegmentSource
from txl_dist.training.state import TrainState, after_step
from txl_dist.training.step import StepResult, TrainStep


class RolledBackError(Exception):
    """Ends the events of a step after a rollback. Never leaves the loop."""

    def __init__(self, state: TrainState) -> None:
        super().__init__(state)
        self.state = state


@dataclass(kw_only=True)
class Trainer:
    """One rank's part of a run.

    These calls are collective, so all ranks must make them at the same event: `step`, `evaluate`,
    `recovery.roll_back_*`, of `saver` save, wait, wait_after and finish, and of `observers` start
    and step. All others are local to the rank.
    """

    config: RunConfig
    state: TrainState
    source: SegmentSource
    segments: Iterator[Segment]
    """Those of `source` from the position of `state` on."""
    step: TrainStep
    recovery: Recovery
    observers: Observers
    saver: RunSaver
    stop: StopRequest
    evaluate: Evaluate | None
    """None: the ranks evaluate nothing."""
    scores: ScoreTable | None
    """On rank 0."""
    evaluation_is_pending: bool = False
    """The ranks have to evaluate the weights of `state` before the next step."""
    _segment: Segment | None = field(default=None, init=False)
    """The newest one."""

    def run(self) -> TrainState:
        """Train to the last step, save, and return the final state.

        Raises, on every rank, DivergedError if a step has diverged and `divergence.policy` ends the
        run (that step is not saved), and PreemptedError after a stop request, once the state is
        saved.
        """
        is_complete = is_stopped = False
        self.observers.start(self.state)
        try:
            self._train()
            is_complete = True
        except PreemptedError:
            is_stopped = True
            raise
        except DivergedError as error:
            cause = self.saver.wait_after(error)
            raise DivergedError(f"{cause}. {self.recovery.advice(self.state)}") from error
        finally:
            self.observers.end(self.state, is_complete=is_complete, is_stopped=is_stopped)
        return self.state

    def _train(self) -> None:
        """All events, in their order."""
        training, num_steps = self.config.training, self.config.num_steps
        while True:
            try:
                if self.evaluation_is_pending:
                    self._evaluate()
                if self.state.step >= num_steps:
                    self.saver.confirm()
                    self._finish_saving(require_copies=True)
                    return
                segment = self._next_segment()
                result = self._step(segment)
                # Before anything that can raise: a running save may detect the same bad weights.
                if result.event is not None:
                    self._respond(segment, result)
                if "save_failed" in result.raised:
                    with self._finite_weights():
                        self.saver.wait()  # raises the error on every rank
                if result.is_update:
                    # The step was accepted, so the checkpoint after the previous one is usable.
                    self.saver.confirm()
                self.state = after_step(self.state, segment, result, self.config)
                self.observers.step(self.state, result)
                if self._is_due(training.log_interval_steps):
                    self._write_line()
                self.evaluation_is_pending = self.evaluate is not None and self._is_due(
                    self.config.evaluation.interval_steps
                )
                # Before the evaluation, which may take minutes: a stop would lose the checkpoint.
                if self._is_due(training.checkpoint_interval_steps) or "save_due" in result.raised:
                    self._save()
                # Agreed on by all ranks in the step's collective, so all stop after the same step.
                has_work = self.state.step < num_steps or self.evaluation_is_pending
                if "stop" in result.raised and has_work:
                    self._stop()
            except RolledBackError as event:
                self._continue_from(event.state)

    @property
    def _activity(self) -> Activity:
        return self.step.world.activity

    def _is_due(self, interval_steps: int) -> bool:
        # A function of the step number only, so a resumed run has the same events.
        step = self.state.step
        return step % interval_steps == 0 or step == self.config.num_steps

    def _next_segment(self) -> Segment:
        self.observers.segment(self.state.step + 1)
        self._activity.name = f"step {self.state.step + 1}"
        self._activity.enter(Span.DATA_WAIT)
        # The lanes of a segment may be read in turns, by several steps.
        if self._segment is None or self._segment.position != self.state.position:
            self._segment = next(self.segments)
        segment = self._segment
        self._activity.enter(Span.OTHER)
        if self._activity.num_steps == 0:
            self.observers.event("first batch")
        return segment

    def _step(self, segment: Segment) -> StepResult:
        number = self.state.step + 1
        flags = {
            "stop": bool(self.stop),
            "save_due": self.saver.is_due,
            "save_failed": self.saver.has_failed,
            **self.observers.flags(),
        }
        if number in self.state.divergence.skip_steps:
            self.observers.event("step %d is skipped: a rollback has excluded it", number)
            return self.step.skip(step=number, flags=flags)
        result = self.step(
            segment,
            step=number,
            turn=self.state.turn,
            num_targets=self.source.plan.targets_in_step(
                segment.position, self.state.turn, self.config.data.num_turns
            ),
            lr=lr_at(number, self.config.optimizer, num_steps=self.config.num_steps),
            check=lambda sums, norm: self.state.divergence.find_event(
                self.config.divergence, step=number, sums=sums, gradient_norm=norm
            ),
            contiguous_from=self.state.contiguous_from,
            flags=flags,
        )
        self._activity.end_step()
        return result

    def _respond(self, segment: Segment, result: StepResult) -> None:
        """Respond to a step that has diverged. Raises RolledBackError after a rollback."""
        self.state = self.recovery.record(self.state, segment, result)
        if self.config.divergence.policy == "rollback":
            raise RolledBackError(self.recovery.roll_back_step(self.state))

    def _continue_from(self, state: TrainState) -> None:
        self._activity.enter(Span.OTHER)
        self.state, self.evaluation_is_pending = state, False
        self.segments, self._segment = self.source.open_at(state), None

    def _write_line(self) -> None:
        self.observers.line(self.state, {})
        if self.state.unreported[1]:  # else the next line covers this step too
            changes = {"unreported": (0.0, 0, 0), "unreported_steps": 0}
            self.state = self.state.model_copy(update=changes)

    def _evaluate(self) -> None:
        """Score the weights of this step on all ranks."""
        assert self.evaluate is not None
        fault_point("evaluation")
        previous, step = self._activity.enter(Span.EVALUATION), self.state.step
        score = self.evaluate(self.state, stop=self.stop)
        self._activity.enter(previous)
        if score is None:
            self._stop()
        if score.nats is None:
            error = DivergedError(score.reason)
            raise RolledBackError(self.recovery.roll_back_weights(self.state, error, step))
        self.evaluation_is_pending = False
        # The file first: if this process is killed now, the next start writes the line.
        gain = self.step.world.broadcast(self.scores and self.scores.add(score))
        self.observers.score(score, gain)
        if gain is not None and self.saver.saved_step != step:
            self._save()  # without a checkpoint at its step: save only the best ones
        if gain is not None:
            self.saver.mark_best()

    @contextmanager
    def _finite_weights(self) -> Iterator[None]:
        """Around a wait for a save, which finds NaN and Inf in the weights."""
        saved_step = self.saver.saved_step
        try:
            yield
        except DivergedError as error:
            assert saved_step is not None
            state = self.recovery.roll_back_weights(self.state, error, saved_step)
            raise RolledBackError(state) from error

    def _save(self) -> None:
        previous = self._activity.enter(Span.SAVE_WAIT)
        self.observers.save(self.state)
        # What `txl eval --watch` has scored since the last save.
        for score, gain in self.scores.refresh() if self.scores else ():
            self.observers.score(score, gain)
        with self._finite_weights():
            self.saver.save(self.state)
        self._activity.enter(previous)

    def _finish_saving(self, *, require_copies: bool) -> None:
        previous = self._activity.enter(Span.SAVE_WAIT)
        with self._finite_weights():
            self.saver.finish(require_copies=require_copies)
        self._activity.enter(previous)

    def _stop(self) -> NoReturn:
        """Save and end the run, as requested by a signal or a stop file."""
        if self.saver.saved_step != self.state.step:
            self._save()
        self._finish_saving(require_copies=False)
        pending = " It begins with the evaluation." if self.evaluation_is_pending else ""
        raise PreemptedError(
            f"stopped on request after step {self.state.step}; everything is saved. "
            f"The same command resumes from this step.{pending}"
        )
