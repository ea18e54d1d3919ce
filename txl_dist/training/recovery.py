"""Recovery: what follows a step that has diverged, by `divergence.policy`.

    stop      an error that ends the run on all ranks
    skip      nothing of the step is kept; the run continues with the next segment
    rollback  the run continues from an older checkpoint, without the steps that led to the event

The loss of step n depends on update n - 1, so either may be the cause. A rollback skips both, and
uses no checkpoint of update n - 1. After an evaluation or a save that finds NaN or Inf, it skips
the last update before it. Steps are skipped by number in `TrainState.divergence`, which is written
immediately to the checkpoint that the run returns to: they stay skipped after a kill.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from data_pipeline.streams.segments import Segment
from txl_dist.checkpoint.directory import CheckpointDirectory
from txl_dist.config.run_config import RunConfig
from txl_dist.errors import DivergedError
from txl_dist.training.divergence_dump import DivergenceDump
from txl_dist.training.report import Report
from txl_dist.training.resume_point import ResumePoint, newest_before
from txl_dist.training.saving import RunSaver
from txl_dist.training.state import TrainState
from txl_dist.training.step import StepResult, TrainStep


class Rollback(NamedTuple):
    """Where a run continues."""

    state: TrainState
    has_other_settings: bool
    """Other settings hold there (`training.changes`), so all parts of the run must be built again,
    from the newest checkpoint."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Recovery:
    """Responds to events on one rank. Rollbacks are collective."""

    config: RunConfig
    step: TrainStep
    report: Report
    saver: RunSaver
    dump: DivergenceDump
    checkpoints: CheckpointDirectory
    last_step: int
    """Last step of the trainer: the end of the run, or the next change of settings."""
    resume_at: Callable[[ResumePoint], TrainState]
    """Loads weights, optimizer state and memory; returns the state with which the run resumes."""

    def record(self, state: TrainState, segment: Segment, result: StepResult) -> TrainState:
        """Write the event down; returns the state with it.

        Raises DivergedError if the policy is `stop`, or if there were too many events.
        """
        files = self.dump.write(state, segment, result)
        facts = (
            f"{result.event} (segment position {segment.position}, this rank's lanes "
            f"{list(self.step.lanes)}); no rank has changed its weights. Losses and documents of "
            f"all lanes: {files}"
        )
        return self._with_event(state, facts, step=state.step + 1)

    def _with_event(self, state: TrainState, facts: str, *, step: int) -> TrainState:
        config = self.config.divergence
        if config.policy == "stop":
            raise DivergedError(facts)
        divergence = state.divergence.with_event(config, step=step)
        number = len(divergence.event_steps)
        if number > config.max_events:
            raise DivergedError(
                f"{facts}. This is event {number} within {config.max_events_interval_steps} steps, "
                f"more than divergence.max_events={config.max_events}"
            )
        self.report.event(
            "divergence.policy=%s, event %d of at most %d: %s",
            config.policy,
            number,
            config.max_events,
            facts,
        )
        return state.model_copy(update={"divergence": divergence})

    def roll_back_step(self, state: TrainState) -> Rollback:
        """Continue from the newest good checkpoint, after the step after `state` has diverged.

        Collective. Raises DivergedError if there is none.
        """
        step, last_update = state.step + 1, state.divergence.last_update(state.step)
        return self._roll_back(
            state,
            f"step {step} has diverged",
            last_update=last_update,
            excluded={last_update, step},
        )

    def roll_back_weights(self, state: TrainState, error: DivergedError, step: int) -> Rollback:
        """The same after the evaluation or the save of `step`, `state`'s or an earlier one.

        Raises `error` if the policy is not `rollback`.
        """
        if self.config.divergence.policy != "rollback":
            raise error
        last_update = state.divergence.last_update(step)
        state = self._with_event(state, str(error), step=step)
        return self._roll_back(state, str(error), last_update=last_update, excluded={last_update})

    def _roll_back(
        self, state: TrainState, cause: str, *, last_update: int, excluded: set[int]
    ) -> Rollback:
        world = self.step.world
        world.activity.name = f"rollback after step {state.step}"
        self.saver.settle()  # a checkpoint may be being written
        point = newest_before(last_update, self.checkpoints, world)
        if point is None:
            raise DivergedError(
                f"{cause}, and divergence.policy=rollback finds no checkpoint of a step before "
                f"{last_update}, the last update of the weights. A lower "
                "training.checkpoint_interval_steps would leave one"
            )
        has_other_settings = self.config.last_step_with(point.settings_step) != self.last_step
        restored = point.state if has_other_settings else self.resume_at(point)
        divergence = restored.divergence.model_copy(
            update={
                "event_steps": state.divergence.event_steps,
                "skip_steps": tuple(
                    sorted(
                        {*restored.divergence.skip_steps, *state.divergence.skip_steps, *excluded}
                    )
                ),
                "num_rollbacks": state.divergence.num_rollbacks + 1,
            }
        )
        restored = restored.model_copy(
            update={"divergence": divergence, "resumed_from": state.resumed_from}
        )
        self.saver.rewind(restored)
        world.run_on_rank_zero(lambda: self.report.rewind(restored, abandoned_step=state.step))
        self.report.event(
            "returned from step %d to the checkpoint of step %d; the run continues without step%s",
            state.step,
            restored.step,
            f"s {' and '.join(map(str, sorted(excluded)))}"
            if len(excluded) > 1
            else f" {last_update}",
        )
        if not has_other_settings:
            self.report.phase(restored)  # its metrics have the number of the next step
        return Rollback(restored, has_other_settings)
