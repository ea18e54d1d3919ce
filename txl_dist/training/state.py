"""TrainState: the progress of a run, stored as plain JSON in a checkpoint's manifest (`state`).

Tensors (weights, optimizer state, memory) are stored separately. No random state is needed: dropout
masks follow from seed, step and lane (`dropout.py`), the order of tokens from seed and epoch
(`data_pipeline/streams/order.py`).
"""

import json
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field, ValidationError

from data_pipeline.streams.lanes import LanePlan
from data_pipeline.streams.mixture import tokens_per_epoch
from data_pipeline.streams.order import Remainder
from data_pipeline.system.remote_path import DatasetPath
from data_pipeline.system.strict import StrictModel, first_problem
from txl_dist.checkpoint.manifest import MANIFEST_NAME, CheckpointManifest, Count, Sha256
from txl_dist.config.training_config import DivergenceConfig
from txl_dist.errors import CheckpointError
from txl_dist.evaluation.scores import LossSums
from txl_dist.training.divergence import DivergenceState
from txl_dist.training.scores import Score

if TYPE_CHECKING:
    from data_pipeline.streams.segments import Segment
    from txl_dist.training.step import StepResult


class CorpusEntry(StrictModel):
    """One corpus of a phase."""

    name: str
    digest: Sha256
    """Digest of the dataset's manifest, which contains the hash of every shard."""
    tokens: Annotated[Count, Field(ge=1)]
    weight: Annotated[float, Field(gt=0)]
    start: Count = 0
    """Token of the corpus's cyclic order where the phase begins (`CyclicCorpus`)."""


class Phase(StrictModel):
    """The corpora, weights and lanes that a run reads from one lane position until they change."""

    position: Count = 0
    first_epoch: Count = 0
    """Number of the epoch that begins at `position`, or continues there if `unread` is set."""
    corpora: Annotated[tuple[CorpusEntry, ...], Field(min_length=1)]
    num_lanes: Annotated[Count, Field(ge=1)]
    unread: tuple[tuple[Count, Count], ...] = ()
    """Ranges of the order of `first_epoch` that earlier phases have not read; empty: all of it."""
    context_tokens: Count = 0
    """Tokens per lane before `position` that were replayed when the phase began (`Remainder`)."""

    @property
    def remainder(self) -> Remainder | None:
        """The part of `first_epoch` that this phase reads; None: all of it."""
        return Remainder(self.unread, self.context_tokens) if self.unread else None

    def plan(self, *, tgt_len: int = 1) -> LanePlan:
        """The lanes of the phase. Without `tgt_len`, for questions that do not depend on it."""
        return LanePlan(
            num_tokens=self.num_tokens,
            num_lanes=self.num_lanes,
            tgt_len=tgt_len,
            start=self.position,
            first_epoch=self.first_epoch,
            remainder=self.remainder,
        )

    @property
    def num_tokens(self) -> int:
        """Tokens per epoch, over all corpora."""
        return sum(corpus.tokens for corpus in self.corpora)

    @property
    def tokens_per_epoch(self) -> dict[str, int]:
        """Tokens per epoch of each corpus, by name, as the weights demand."""
        return tokens_per_epoch(
            {corpus.name: corpus.tokens for corpus in self.corpora},
            {corpus.name: corpus.weight for corpus in self.corpora},
        )

    @property
    def shares(self) -> dict[str, float]:
        """Weight of each corpus divided by the sum of all weights, by name."""
        total = sum(corpus.weight for corpus in self.corpora)
        return {corpus.name: corpus.weight / total for corpus in self.corpora}


class LastUpdate(StrictModel):
    """What the step line says about the last step that updated the weights."""

    step: Count
    gradient_norm: float
    memory_valid: float


class TrainState(StrictModel):
    """The progress of a run after a step."""

    step: Count = 0
    """Steps done, including skipped ones."""
    skipped_steps: Count = 0
    """Steps without an update of the weights. The optimizer has counted the others only."""
    position: Count = 0
    """Lane position of the next segment."""
    tokens: Count = 0
    """Targets trained on, over all lanes."""
    best: Score | None = None
    """The best score when the checkpoint was saved; None in a run that trains (`scores.py`)."""
    unreported: tuple[float, Count, Count] = (0.0, 0, 0)
    """Nats, tokens and bytes since the last line of metrics.jsonl."""
    unreported_steps: Count = 0
    last_update: LastUpdate | None = None
    """None before the first one."""
    phases: tuple[Phase, ...] = ()
    """All phases in order; the last one is the current one."""
    contiguous_from: Count = 0
    """Lane position from which the memory is contiguous: the lanes' memory of earlier tokens is not
    followed directly by this position, so no token may attend across it."""
    divergence: DivergenceState = DivergenceState()
    forked_from: str | None = None
    """The checkpoint of another run where this run began: PATH of `--resume PATH`, absolute."""


def load_state(path: DatasetPath, manifest: CheckpointManifest) -> TrainState:
    """The state in the manifest of checkpoint `path`. Raises CheckpointError if it is invalid."""
    try:
        # From JSON text: in strict mode only JSON input may give a tuple as a list.
        return TrainState.model_validate_json(json.dumps(manifest.state))
    except ValidationError as error:
        raise CheckpointError(
            f"{path / MANIFEST_NAME}: state.{first_problem(error)}. The checkpoint was written by "
            f"{manifest.written_by}; resume with that version, or choose another checkpoint"
        ) from None


def after_step(
    state: TrainState, segment: "Segment", result: "StepResult", config: DivergenceConfig
) -> TrainState:
    """The state after the step that has read `segment`.

    A step that was skipped or rejected counts as a step, but not as an update.
    """
    changes = _updated(state, result, config) if result.is_update else _skipped(state, segment)
    position = {"step": state.step + 1, "position": segment.next_position, "score": None}
    return state.model_copy(update={**position, **changes})


def _updated(state: TrainState, result: "StepResult", config: DivergenceConfig) -> dict[str, Any]:
    unreported = LossSums(*state.unreported) + result.sums
    divergence = state.divergence.with_accepted(
        config, sums=result.sums, gradient_norm=result.gradient_norm
    )
    return {
        "tokens": state.tokens + result.sums.num_tokens,
        "unreported": (unreported.nats, unreported.num_tokens, unreported.num_bytes),
        "unreported_steps": state.unreported_steps + 1,
        "last_update": LastUpdate(
            step=state.step + 1,
            gradient_norm=result.gradient_norm,
            memory_valid=result.memory_valid,
        ),
        "divergence": divergence,
    }


def _skipped(state: TrainState, segment: "Segment") -> dict[str, Any]:
    # The memory is that of the tokens before this segment: the next one must not attend to it.
    return {
        "skipped_steps": state.skipped_steps + 1,
        "contiguous_from": segment.next_position,
    }
