"""Recovery: what follows a step that has diverged, by `divergence.policy`.

    stop      an error that ends the run on all ranks
    skip      nothing of the step is kept; the run continues with the next segment
    rollback  the run continues from an older checkpoint, without the steps that led to the event

The loss of step n depends on update n - 1, so either may be the cause. A rollback skips both, and
uses no checkpoint of update n - 1. After an evaluation or a save that finds NaN or Inf, it skips
the last update before it. Steps are skipped by number in `TrainState.divergence`, which is written
immediately to the checkpoint that the run returns to: they stay skipped after a kill.

At an event each rank writes the loss and the text of all its lanes, also of those with an ordinary
loss, to compare them: RUN/events/divergence-step-NNNNNNNN-rank-R.json
"""

import json
import logging
import math
from dataclasses import dataclass
from typing import Any

from data_pipeline.streams.segments import Batch
from data_pipeline.system.files import write_file
from txl_dist.checkpoint.directory import divergence_advice
from txl_dist.config.training_config import EVENT_STEPS
from txl_dist.errors import DivergedError
from txl_dist.evaluation.scores import LossSums
from txl_dist.runtime.process import Span
from txl_dist.training.batches import Batches
from txl_dist.training.compatibility import changed_between_turns
from txl_dist.training.report import Observer
from txl_dist.training.resume import ResumePoint, newest_intact
from txl_dist.training.saving import RunSaver
from txl_dist.training.start import Start, resume_at
from txl_dist.training.state import TrainState
from txl_dist.training.step import StepResult, TrainStep

log = logging.getLogger(__name__)


class StepDivergedError(DivergedError):
    """The step after a state has diverged; no rank has changed its weights. It is recorded."""


class BadScoreError(DivergedError):
    """The evaluation of the weights of a state finds that they are unusable."""


@dataclass(frozen=True, slots=True)
class Recovery:
    start: Start
    step: TrainStep
    batches: Batches
    observers: list[Observer]
    saver: RunSaver

    def record(self, state: TrainState, batch: Batch, result: StepResult) -> TrainState:
        """Write the event of the step after `state` down; returns the state with it.

        Raises StepDivergedError unless the policy is `skip`, or after too many events.
        """
        files = self._write_event(state, batch, result)
        facts = (
            f"{result.event} (segment position {batch.position}, this rank's lanes "
            f"{self.step.lanes}); no rank has changed its weights. Losses and text of all "
            f"lanes: {files}"
        )
        for observer in self.observers:
            observer.divergence(state.step + 1, facts)
        if self.start.config.divergence.policy != "skip":
            raise StepDivergedError(facts)
        return self._with_event(state, facts, step=state.step + 1)

    def _with_event(self, state: TrainState, facts: str, *, step: int) -> TrainState:
        config = self.start.config.divergence
        divergence = state.divergence.with_event(step=step)
        number = len(divergence.event_steps)
        if number > config.max_events:
            raise StepDivergedError(
                f"{facts}. This is event {number} within {EVENT_STEPS} steps, "
                f"more than divergence.max_events={config.max_events}"
            )
        limits = f"event {number} of at most {config.max_events}"
        log.info(f"divergence.policy={config.policy}, {limits}: {facts}")
        return state.model_copy(update={"divergence": divergence})

    def advice(self, state: TrainState) -> str:
        """What to do after a divergence that ends the run."""
        # Not the checkpoint of this step: resuming from it would produce the same numbers.
        last_update = state.divergence.last_update(state.step)
        return divergence_advice(self.start.config.run_path, before=last_update)

    def roll_back(self, state: TrainState, error: DivergedError) -> TrainState:
        """Return to the newest good checkpoint after `error`; the state to continue from.

        `error` is of the step after `state`, of the evaluation of `state`, or of the newest save.
        Collective. Raises it if the policy is not `rollback`, and DivergedError after too many
        events, or if no checkpoint is good.
        """
        world, cause = self.start.world, str(error)
        world.activity.enter(Span.OTHER)
        # The step after which the weights may be bad: a loss depends on the update before it.
        weights_of = state.step
        if not isinstance(error, StepDivergedError | BadScoreError):
            assert self.saver.saved_step is not None
            weights_of = self.saver.saved_step
        is_step = isinstance(error, StepDivergedError)
        if not is_step:
            for observer in self.observers:
                observer.divergence(weights_of, cause)
        if self.start.config.divergence.policy != "rollback":
            raise error
        last_update = state.divergence.last_update(weights_of)
        excluded = [last_update, state.step + 1] if is_step else [last_update]
        state = self._with_event(state, cause, step=state.step + 1 if is_step else weights_of)
        if is_step:
            cause = f"step {state.step + 1} has diverged"

        world.activity.name = f"rollback after step {state.step}"
        self.saver.settle()  # a checkpoint may be being written
        point = self._point_before(last_update)
        if point is None:
            raise DivergedError(
                f"{cause}, and divergence.policy=rollback finds no checkpoint of a step before "
                f"{last_update}, the last update of the weights. A lower "
                "training.checkpoint_interval_steps would leave one"
            )
        restored = resume_at(point, self.start, self.step, self.batches)
        skip_steps = {*restored.divergence.skip_steps, *state.divergence.skip_steps, *excluded}
        divergence = restored.divergence.model_copy(
            update={
                "event_steps": state.divergence.event_steps,
                "skip_steps": tuple(sorted(skip_steps)),
                "num_rollbacks": state.divergence.num_rollbacks + 1,
            }
        )
        restored = restored.model_copy(update={"divergence": divergence})
        self.saver.rewind(restored)

        def announce() -> None:
            for observer in self.observers:
                observer.rollback(restored, state.step)

        world.run_on_all(announce)
        log.info(
            f"returned from step {state.step} to the checkpoint of step {restored.step}; the run "
            f"continues without {'steps' if is_step else 'step'} {' and '.join(map(str, excluded))}"
        )
        self.batches.open_at(restored)
        return restored

    def _point_before(self, step: int) -> ResumePoint | None:
        """The newest intact checkpoint before a step that this config can continue. Collective."""
        start, checkpoints = self.start, self.start.directory.checkpoints
        while True:
            point, _ = newest_intact(checkpoints, start.world, before=step)
            if point is None:
                return None
            manifest, state = point.manifest, point.state
            changed = changed_between_turns(manifest, state, spec=start.spec, data=start.data)
            if not changed:
                return point
            log.info(
                f"passed over the checkpoint of step {state.step}: {', '.join(changed)} changed "
                "since, and some of its lanes are a segment ahead of the others"
            )
            step = state.step

    # --- the file of an event -------------------------------------------------------------------

    def _write_event(self, state: TrainState, batch: Batch, result: StepResult) -> str:
        """Write this rank's file; returns the name for all ranks' files.

        Never raises for a disk that cannot be used.
        """
        folder, rank = self.start.directory.events, self.start.world.rank
        stem = f"divergence-step-{state.step + 1:08d}-rank-"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            content = json.dumps(self._content(state, batch, result), indent=1)
            write_file(folder / f"{stem}{rank}.json", content.encode() + b"\n")
        except OSError as error:
            log.warning("%s cannot be written: %s", folder, error.strerror)
        return str(folder / f"{stem}*.json")

    def _content(self, state: TrainState, batch: Batch, result: StepResult) -> dict[str, Any]:
        data = self.start.data
        parts = data.plan_of(state.phases[-1]).epoch_ranges(batch.position, batch.next_position)
        row_of = {lane: row for row, lane in enumerate(batch.lanes)}
        return {
            "step": state.step + 1,
            "event": result.event,
            "position": batch.position,
            "epochs": [part._asdict() for part in parts],
            "loss": _mean(result.sums),
            "gradient_norm": _json(result.gradient_norm),
            "lanes": [
                {
                    "lane": lane,
                    "loss": _mean(lane_sums),
                    "nats": _json(lane_sums.nats),
                    "targets": lane_sums.num_tokens,
                    "text": data.tokenizer.decode(batch.input[row_of[lane]]),
                }
                for lane, lane_sums in result.lane_sums.items()
            ],
        }


def _mean(sums: LossSums) -> float | str | None:
    """Nats per token; None for a segment of one token, which has no target."""
    return _json(sums.nats_per_token) if sums.num_tokens else None


def _json(value: float) -> float | str:
    """As in metrics.jsonl: JSON has no NaN and no infinity."""
    return value if math.isfinite(value) else str(value)
