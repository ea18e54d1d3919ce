"""Recovery: what follows a step that has diverged, by `divergence.policy`.

    stop      an error that ends the run on all ranks
    skip      nothing of the step is kept; the run continues with the next segment
    rollback  the run continues from an older checkpoint, without the steps that led to the event

The loss of step n depends on update n - 1, so either may be the cause. A rollback skips both, and
uses no checkpoint of update n - 1. After an evaluation or a save that finds NaN or Inf, it skips
the last update before it. Steps are skipped by number in `TrainState.divergence`, which is written
immediately to the checkpoint that the run returns to: they stay skipped after a kill.

At an event each rank writes the loss and the documents of all its lanes, also of those with an
ordinary loss, to compare them: RUN/events/divergence-step-NNNNNNNN-rank-R.json
"""

import json
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data_pipeline.streams.segments import LaneDocument, Segment, documents_of_lanes
from data_pipeline.system.files import write_file
from txl_dist.checkpoint.directory import divergence_advice
from txl_dist.config.training_config import EVENT_STEPS
from txl_dist.errors import DivergedError, TxlError
from txl_dist.evaluation.scores import LossSums
from txl_dist.training.context import RankContext
from txl_dist.training.observer import Observers
from txl_dist.training.resume import newest_before
from txl_dist.training.saving import RunSaver
from txl_dist.training.start_state import resume_at
from txl_dist.training.state import Phase, TrainState
from txl_dist.training.step import StepResult, TrainStep

MAX_FILES = 100
"""Files of each rank that are kept; the oldest are removed."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Recovery:
    """Responds to events on one rank. Rollbacks are collective."""

    rank: RankContext
    step: TrainStep
    observers: Observers
    saver: RunSaver

    def record(self, state: TrainState, segment: Segment, result: StepResult) -> TrainState:
        """Write the event down; returns the state with it.

        Raises DivergedError if the policy is `stop`, or if there were too many events.
        """
        files = _Dump(self.rank, self.step.lanes).write(state, segment, result)
        facts = (
            f"{result.event} (segment position {segment.position}, this rank's lanes "
            f"{list(self.step.lanes)}); no rank has changed its weights. Losses and documents of "
            f"all lanes: {files}"
        )
        return self._with_event(state, facts, step=state.step + 1)

    def _with_event(self, state: TrainState, facts: str, *, step: int) -> TrainState:
        config = self.rank.config.divergence
        self.observers.divergence(step, facts)
        if config.policy == "stop":
            raise DivergedError(facts)
        divergence = state.divergence.with_event(step=step)
        number = len(divergence.event_steps)
        if number > config.max_events:
            raise DivergedError(
                f"{facts}. This is event {number} within {EVENT_STEPS} steps, "
                f"more than divergence.max_events={config.max_events}"
            )
        self.observers.event(
            "divergence.policy=%s, event %d of at most %d: %s",
            config.policy,
            number,
            config.max_events,
            facts,
        )
        return state.model_copy(update={"divergence": divergence})

    def advice(self, state: TrainState) -> str:
        """What to do after a divergence that ends the run."""
        # Not the checkpoint of this step: resuming from it would produce the same numbers.
        last_update = state.divergence.last_update(state.step)
        return divergence_advice(self.rank.config.run_path, before=last_update)

    def roll_back_step(self, state: TrainState) -> TrainState:
        """Load the newest good checkpoint, after the step after `state` has diverged.

        Collective. Returns the state to continue from. Raises DivergedError if there is none.
        """
        step, last_update = state.step + 1, state.divergence.last_update(state.step)
        return self._roll_back(
            state,
            f"step {step} has diverged",
            last_update=last_update,
            excluded={last_update, step},
        )

    def roll_back_weights(self, state: TrainState, error: DivergedError, step: int) -> TrainState:
        """The same after the evaluation or the save of `step`, `state`'s or an earlier one.

        Raises `error` if the policy is not `rollback`.
        """
        if self.rank.config.divergence.policy != "rollback":
            self.observers.divergence(step, str(error))
            raise error
        last_update = state.divergence.last_update(step)
        state = self._with_event(state, str(error), step=step)
        return self._roll_back(state, str(error), last_update=last_update, excluded={last_update})

    def _roll_back(
        self, state: TrainState, cause: str, *, last_update: int, excluded: set[int]
    ) -> TrainState:
        world = self.rank.world
        world.activity.name = f"rollback after step {state.step}"
        self.saver.settle()  # a checkpoint may be being written
        point = newest_before(last_update, self.rank.directory.checkpoints, world)
        if point is None:
            raise DivergedError(
                f"{cause}, and divergence.policy=rollback finds no checkpoint of a step before "
                f"{last_update}, the last update of the weights. A lower "
                "training.checkpoint_interval_steps would leave one"
            )
        restored = resume_at(point, self.rank, self.step)
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
        restored = restored.model_copy(update={"divergence": divergence})
        self.saver.rewind(restored)
        world.run_on_all(lambda: self.observers.rollback(restored, state.step))
        self.observers.event(
            "returned from step %d to the checkpoint of step %d; the run continues without step%s",
            state.step,
            restored.step,
            f"s {' and '.join(map(str, sorted(excluded)))}"
            if len(excluded) > 1
            else f" {last_update}",
        )
        return restored


@dataclass(frozen=True, slots=True)
class _Dump:
    """Writes the files of one rank. Never raises for a disk or data that cannot be used."""

    context: RankContext
    lanes: Sequence[int]
    """Lanes of this rank."""

    def write(self, state: TrainState, segment: Segment, result: StepResult) -> str:
        """Write the file of the step after `state`; returns the name for all ranks' files."""
        stem = f"divergence-step-{state.step + 1:08d}-rank-"
        try:
            self.context.directory.events.mkdir(parents=True, exist_ok=True)
            content = json.dumps(self._content(state, segment, result), indent=1)
            write_file(
                self.context.directory.events / f"{stem}{self.context.world.rank}.json",
                content.encode() + b"\n",
            )
            for path in self._own_files()[:-MAX_FILES]:
                path.unlink()
        except OSError as error:
            log.warning("%s cannot be written: %s", self.context.directory.events, error.strerror)
        return str(self.context.directory.events / f"{stem}*.json")

    def _content(self, state: TrainState, segment: Segment, result: StepResult) -> dict[str, Any]:
        sums, phase = result.sums, state.phases[-1]
        parts = self.context.data.plan_of(phase).epoch_ranges(
            segment.position, segment.next_position
        )
        content: dict[str, Any] = {
            "step": state.step + 1,
            "event": result.event,
            "position": segment.position,
            "epochs": [part._asdict() for part in parts],
            "loss": _mean(sums),
            "gradient_norm": _json(result.gradient_norm),
        }
        documents: list[LaneDocument] = []
        try:
            documents = self._documents(phase, segment)
        except (TxlError, OSError) as error:  # the event matters more than a list of documents
            content["documents_error"] = str(error)
        content["lanes"] = [
            {
                "lane": lane,
                "loss": _mean(lane_sums),
                "nats": _json(lane_sums.nats),
                "targets": lane_sums.num_tokens,
                "documents": [
                    {
                        "id": document.id,
                        "corpus": phase.corpora[document.corpus].name,
                        "epoch": document.epoch,
                        "position": document.position,
                        "num_tokens": document.num_tokens,
                    }
                    for document in documents
                    if document.lane == lane
                ],
            }
            for lane, lane_sums in result.lane_sums.items()
        ]
        return content

    def _documents(self, phase: Phase, segment: Segment) -> list[LaneDocument]:
        """The documents of this rank's lanes. Raises TxlError or OSError for damaged data."""
        return documents_of_lanes(
            self.context.data.source_of(phase, self.context.config),
            self.context.data.plan_of(phase),
            lanes=self.lanes,
            start=segment.position,
            stop=segment.next_position,
            ordering=self.context.config.data.ordering,
            seed=self.context.config.seed,
        )

    def _own_files(self) -> list[Path]:
        """This rank's files, oldest step first."""
        return sorted(
            self.context.directory.events.glob(
                f"divergence-step-*-rank-{self.context.world.rank}.json"
            )
        )


def _mean(sums: LossSums) -> float | str | None:
    """Nats per token; None for a segment of one token, which has no target."""
    return _json(sums.nats_per_token) if sums.num_tokens else None


def _json(value: float) -> float | str:
    """As in metrics.jsonl: JSON has no NaN and no infinity."""
    return value if math.isfinite(value) else str(value)
