"""TrainState: the progress of a run, stored as plain JSON in a checkpoint's manifest (`state`).

Tensors (weights, optimizer state, memory) are stored separately. No random state is needed: dropout
masks follow from seed, step and lane (`lane_dropout.py`), the order of tokens from seed and epoch
(`data_pipeline/streams/order.py`).
"""

import json
import math
from typing import TYPE_CHECKING, Annotated, Self

from pydantic import Field, JsonValue, ValidationError

from data_pipeline.streams.lanes import LanePlan
from data_pipeline.streams.mixture import tokens_per_epoch
from data_pipeline.streams.remainder import Remainder
from data_pipeline.system.remote_path import DatasetPath
from data_pipeline.system.strict import StrictModel, first_problem
from txl_dist.checkpoint.manifest import MANIFEST_NAME, CheckpointManifest, Count, Sha256
from txl_dist.errors import CheckpointError, DivergedError
from txl_dist.training.divergence import DivergenceState

if TYPE_CHECKING:
    from txl_dist.evaluation.evaluate import EvaluationResult


class BestScore(StrictModel):
    """The validation loss of a step; in `TrainState.best` the lowest one up to now."""

    step: Count
    nats_per_token: float
    split: str
    max_tokens: Count | None
    data_digest: Sha256 | None = None
    """Digest of the dataset that was scored. Losses on different text are not compared."""

    @classmethod
    def of(cls, result: "EvaluationResult", *, step: int, data_digest: str | None) -> Self:
        """The score of a result. Raises DivergedError if it is not finite."""
        sums, settings = result.sums, result.settings
        if not math.isfinite(sums.nats):
            raise DivergedError(
                f"the loss of split {settings.split} after step {step} is {sums.nats}: "
                "earlier updates were too large, and the weights are unusable"
            )
        return cls(
            step=step,
            nats_per_token=sums.nats_per_token,
            split=settings.split,
            max_tokens=settings.max_tokens,
            data_digest=data_digest,
        )

    def improves_on(self, other: "BestScore | None") -> bool:
        """Whether this loss is lower than `other`, or the first on this text."""
        return (
            other is None or self._text != other._text or self.nats_per_token < other.nats_per_token
        )

    def gain_over(self, other: "BestScore | None") -> float:
        """Nats per token by which this is below `other`; 0 if it is not, or on other text."""
        if other is None or self._text != other._text:
            return 0.0
        return max(0.0, other.nats_per_token - self.nats_per_token)

    @property
    def _text(self) -> tuple[str, int | None, str | None]:
        return self.split, self.max_tokens, self.data_digest


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
    num_lanes: Annotated[Count, Field(ge=1)] | None = None
    """None only in a checkpoint of an older version; `load_state` sets it."""
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
        assert self.num_lanes is not None
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


class GivenCheckpoint(StrictModel):
    """What a command with `--resume PATH` has named, and with which settings."""

    path: str
    """PATH, absolute."""
    settings: dict[str, JsonValue]
    """Those that change the trajectory, and the data (`given_checkpoint.py`)."""


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
    best: BestScore | None = None
    score: BestScore | None = None
    """Score of this step; None: it was not evaluated, or not yet."""
    unreported: tuple[float, Count, Count] = (0.0, 0, 0)
    """Nats, tokens and bytes since the last line of metrics.jsonl."""
    unreported_steps: Count = 0
    last_update: LastUpdate | None = None
    """None before the first one, and in a checkpoint of an older version."""
    phases: tuple[Phase, ...] = ()
    """All phases in order; the last one is the current one."""
    evaluation_pending: bool = False
    """The evaluation due at this step has not been done yet by the ranks."""
    unscored_steps: tuple[Count, ...] = ()
    """Steps whose checkpoints wait for the score of a worker, ascending (`evaluation.on`)."""
    contiguous_from: Count = 0
    """Lane position from which the memory is contiguous: the lanes' memory of earlier tokens is not
    followed directly by this position, so no token may attend across it."""
    divergence: DivergenceState = DivergenceState()
    resumed_from: GivenCheckpoint | None = None
    """Where this trajectory began, if the run last went to a given checkpoint."""

    def continues(self, earlier: "TrainState") -> bool:
        """Whether this state and an earlier one of the same run are of one trajectory."""
        return (
            self.resumed_from == earlier.resumed_from
            and self.divergence.num_rollbacks == earlier.divergence.num_rollbacks
        )

    @property
    def missing_scores(self) -> tuple[int, ...]:
        """Steps whose evaluation was due, but has no score yet, ascending."""
        return (*self.unscored_steps, *((self.step,) if self.evaluation_pending else ()))

    @property
    def is_unscored(self) -> bool:
        """Whether a worker has to score this step."""
        return self.step in self.unscored_steps

    def with_missing_score(self, scorer: str) -> "TrainState":
        """The state when the evaluation of this step is due; `scorer` is `evaluation.on`."""
        if scorer == "ranks":
            return self.model_copy(update={"evaluation_pending": True})
        return self.model_copy(update={"unscored_steps": (*self.unscored_steps, self.step)})

    def with_score(self, score: BestScore) -> "TrainState":
        """The state after the evaluation of `score.step`, which may be an earlier step."""
        return self.model_copy(
            update={
                "best": score if score.improves_on(self.best) else self.best,
                "score": score if score.step == self.step else self.score,
                "evaluation_pending": False,
                "unscored_steps": self._unscored_without(score.step),
            }
        )

    def without_score(self, step: int) -> "TrainState":
        """The state after it was decided not to score `step`."""
        return self.model_copy(update={"unscored_steps": self._unscored_without(step)})

    def _unscored_without(self, step: int) -> tuple[int, ...]:
        return tuple(other for other in self.unscored_steps if other != step)

    def scored_on(self, scorer: str | None) -> "TrainState":
        """The state with its missing scores where this run computes them.

        `scorer`: `evaluation.on`; None: the run has no evaluation. The ranks can score only the
        present weights, so scores of earlier steps are given up for them.
        """
        missing = self.missing_scores
        return self.model_copy(
            update={
                "evaluation_pending": scorer == "ranks" and self.step in missing,
                "unscored_steps": missing if scorer == "workers" else (),
            }
        )


def load_state(path: DatasetPath, manifest: CheckpointManifest) -> TrainState:
    """The state in the manifest of checkpoint `path`. Raises CheckpointError if it is invalid."""
    try:
        # From JSON text: in strict mode only JSON input may give a tuple as a list.
        state = TrainState.model_validate_json(json.dumps(manifest.state))
    except ValidationError as error:
        raise CheckpointError(
            f"{path / MANIFEST_NAME}: state.{first_problem(error)}. The checkpoint was written by "
            f"{manifest.written_by}; resume with that version, or choose another checkpoint"
        ) from None
    # Before the number of lanes could change, it was stored only in the list of their memories.
    num_lanes = len(manifest.rank_of_lane)
    phases = tuple(
        phase if phase.num_lanes else phase.model_copy(update={"num_lanes": num_lanes})
        for phase in state.phases
    )
    return state.model_copy(update={"phases": phases})
