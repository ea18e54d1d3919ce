"""The training loop: the order of events of a run, in `Trainer.run`.

    read -> compute -> (diverged? -> skip or rollback) -> record -> save -> stop? -> evaluate

A rollback, also one because of a save or an evaluation, ends the events of its step, and the loop
continues at the older step.

Every rank runs this loop, and all ranks are at the same event. The loop contains no device, file or
launcher code: `step.py` computes, observers report (`report.py`), `saving.py` writes checkpoints,
`recovery.py` returns to them, and `rank.py` creates these parts.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from typing import Any, NoReturn

from txl_dist.config.run_config import RunConfig
from txl_dist.errors import DivergedError, PreemptedError
from txl_dist.evaluation.scores import LossSums
from txl_dist.runtime.fault_injection import fault_point
from txl_dist.runtime.process import Span
from txl_dist.runtime.stop import StopRequest
from txl_dist.training.batches import Batches, DeviceBatch
from txl_dist.training.recovery import BadScoreError, Recovery
from txl_dist.training.report import Observer, Values
from txl_dist.training.saving import RunSaver
from txl_dist.training.scores import ScoreTable, StepScore, due_in
from txl_dist.training.state import LastUpdate, TrainState
from txl_dist.training.step import StepResult, TrainStep, lr_at

log = logging.getLogger(__name__)

Evaluate = Callable[[TrainState, StopRequest], StepScore | None]
"""Scores a split with the weights of all ranks. Collective.

Returns None on all ranks if the request to stop is true on any.
"""


@dataclass(kw_only=True)
class Trainer:
    """One rank's part of a run.

    These calls are collective, so all ranks must make them at the same event: `evaluate`,
    `recovery.roll_back`, those of `step`, and of `saver` save, wait, wait_after and finish. All
    others are local to the rank.
    """

    config: RunConfig
    state: TrainState
    batches: Batches
    """Those from `state` on."""
    step: TrainStep
    observers: list[Observer]
    saver: RunSaver
    evaluate: Evaluate | None
    """None: the ranks evaluate nothing."""
    evaluation_is_pending: bool
    """Whether the ranks have to evaluate the current weights before the next step."""
    scores: ScoreTable | None
    """On rank 0; also of scores by `txl eval --watch`."""
    recovery: Recovery
    stop: StopRequest

    def run(self) -> TrainState:
        """Train to the last step, save, and return the final state.

        Raises, on every rank, DivergedError if a step has diverged and `divergence.policy` ends the
        run (that step is not saved), and PreemptedError after a stop request, once the state is
        saved.
        """
        training, num_steps = self.config.training, self.config.num_steps
        with self._observed():
            while True:
                try:
                    if self.config.init_from is not None and self.saver.saved_step is None:
                        self._save()  # from now on, the run does not need its origin
                    if self.evaluation_is_pending:
                        self._evaluate()
                    if self.state.step >= num_steps:
                        self.saver.confirm()
                        with self._in_span(Span.SAVE_WAIT):
                            self.saver.finish(require_copies=True)
                        return self.state

                    batch = self._read()
                    result = self._compute(batch)

                    # Before anything that can raise: a running save may find the same bad weights.
                    if result.event is not None:
                        self.state = self.recovery.record(self.state, batch, result)
                    if "save_failed" in result.raised:
                        self.saver.wait()  # raises the error on every rank
                    if result.is_update:
                        # The step was accepted, so the checkpoint after the previous one is usable.
                        self.saver.confirm()
                    self.state = after_step(self.state, batch, result, self.config)
                    for observer in self.observers:
                        observer.step(self.state, result)
                    if self._is_due(training.log_interval_steps):
                        self._write_line()

                    self.evaluation_is_pending = self.evaluate is not None and due_in(self.config)(
                        self.state.step
                    )
                    # Before the evaluation, which may take minutes: a kill would lose the save.
                    is_due = self._is_due(training.checkpoint_interval_steps)
                    if is_due or "save_due" in result.raised:
                        self._save()

                    # Agreed on by all ranks in the step's collective, so all stop after this step.
                    has_work = self.state.step < num_steps or self.evaluation_is_pending
                    if "stop" in result.raised and has_work:
                        self._stop()
                except DivergedError as error:
                    self.state = self.recovery.roll_back(self.state, error)  # or raises an error
                    self.evaluation_is_pending = False

    @contextmanager
    def _observed(self) -> Iterator[None]:
        """Tell the observers when the run starts, and how it ends."""
        is_complete = is_stopped = False
        for observer in self.observers:
            observer.start(self.state)
        try:
            yield
            is_complete = True
        except PreemptedError:
            is_stopped = True
            raise
        except DivergedError as error:
            cause = self.saver.wait_after(error)
            raise DivergedError(f"{cause}. {self.recovery.advice(self.state)}") from error
        finally:
            for observer in self.observers:
                observer.end(self.state, is_complete=is_complete, is_stopped=is_stopped)

    def _is_due(self, interval_steps: int) -> bool:
        # A function of the step number only, so a resumed run has the same events.
        step = self.state.step
        return step % interval_steps == 0 or step == self.config.num_steps

    def _read(self) -> DeviceBatch:
        number, activity = self.state.step + 1, self.step.world.activity
        for observer in self.observers:
            observer.segment(number)
        activity.name = f"step {number}"
        activity.enter(Span.DATA_WAIT)
        batch = self.batches.read()
        activity.enter(Span.OTHER)
        if activity.num_steps == 0:
            log.info("first batch")
        return batch

    def _compute(self, batch: DeviceBatch) -> StepResult:
        number, divergence = self.state.step + 1, self.state.divergence
        flags = {
            "stop": bool(self.stop),
            "save_due": self.saver.is_due,
            "save_failed": self.saver.has_failed,
        }
        if number in divergence.skip_steps:
            log.info("step %d is skipped: a rollback has excluded it", number)
            return self.step.skip(step=number, flags=flags)
        computed = self.step.compute(
            batch, step=number, contiguous_from=self.state.contiguous_from, flags=flags
        )
        self.batches.prefetch()  # a GPU is busy with what was computed
        result = self.step.update(
            computed,
            lr=lr_at(number, self.config.optimizer, num_steps=self.config.num_steps),
            check=lambda sums, norm, memory_valid: divergence.find_event(
                self.config.divergence,
                step=number,
                sums=sums,
                gradient_norm=norm,
                # Tokens after the end of an epoch have no memory, although the first ones do.
                memory_valid=0.0 if batch.breaks_off else memory_valid,
            ),
        )
        self.step.world.activity.end_step()
        return result

    def _write_line(self) -> None:
        values: Values = {}
        for observer in self.observers:
            observer.line(self.state, values)
        for observer in self.observers:
            observer.report(self.state, values)
        if self.state.unreported_sums.num_tokens:  # else the next line covers this step too
            self.state = self.state.model_copy(
                update={"unreported": astuple(LossSums()), "unreported_steps": 0}
            )

    def _evaluate(self) -> None:
        assert self.evaluate is not None
        fault_point("evaluation")
        with self._in_span(Span.EVALUATION):
            score = self.evaluate(self.state, self.stop)
        if score is None:
            self._stop()
        if score.nats is None:
            raise BadScoreError(score.reason)
        self.evaluation_is_pending = False
        # The file first: if this process is killed now, the next start writes the line.
        world, scores = self.step.world, self.scores
        gain = world.run_on_all(lambda: scores.add(score) if scores else None)[0]
        for observer in self.observers:
            observer.score(score, gain)
        if gain is not None and self.saver.saved_step != self.state.step:
            self._save()  # without a checkpoint at its step: save only the best ones
        if gain is not None:
            self.saver.mark_best()

    def _save(self) -> None:
        with self._in_span(Span.SAVE_WAIT):
            for observer in self.observers:
                observer.save(self.state)
            # What `txl eval --watch` has scored since the last save.
            for score, gain in self.scores.refresh() if self.scores else ():
                for observer in self.observers:
                    observer.score(score, gain)
            self.saver.save(self.state)

    @contextmanager
    def _in_span(self, span: Span) -> Iterator[None]:
        """Count the time inside as that of `span`, which stays the current one after an error."""
        activity = self.step.world.activity
        previous = activity.enter(span)
        yield
        activity.enter(previous)

    def _stop(self) -> NoReturn:
        """Save and end the run, as requested by a signal or a stop file."""
        if self.saver.saved_step != self.state.step:
            self._save()
        with self._in_span(Span.SAVE_WAIT):
            self.saver.finish(require_copies=False)
        pending = " It begins with the evaluation." if self.evaluation_is_pending else ""
        raise PreemptedError(
            f"stopped on request after step {self.state.step}; everything is saved. "
            f"The same command resumes from this step.{pending}"
        )


def after_step(
    state: TrainState, batch: DeviceBatch, result: StepResult, config: RunConfig
) -> TrainState:
    """The state after the step that has read `batch`.

    A step that was skipped or rejected counts as a step, but not as an update.
    """
    changes: dict[str, Any] = {"step": state.step + 1, "turn": batch.next_turn}
    if batch.next_turn == 0:
        changes["position"] = batch.next_position
    if result.is_update:
        changes |= {
            "tokens": state.tokens + result.sums.num_tokens,
            "unreported": astuple(state.unreported_sums + result.sums),
            "unreported_steps": state.unreported_steps + 1,
            "last_update": LastUpdate(
                step=state.step + 1,
                gradient_norm=result.gradient_norm,
                memory_valid=result.memory_valid,
            ),
            "divergence": state.divergence.with_accepted(
                config.divergence,
                sums=result.sums,
                gradient_norm=result.gradient_norm,
                memory_valid=result.memory_valid,
            ),
        }
    else:
        # The memory is that of the tokens before this batch: the next one must not attend to it.
        changes |= {
            "skipped_steps": state.skipped_steps + 1,
            "contiguous_from": batch.next_position,
        }
    return state.model_copy(update=changes)
