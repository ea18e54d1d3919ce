"""TrainState: the progress of a run, stored as plain JSON in a checkpoint's manifest (`state`).

Tensors (weights, optimizer state, memory) are stored separately. No random state is needed: dropout
masks follow from seed, step and lane (`dropout.py`), the order of tokens from seed and epoch
(`data_pipeline/streams/order.py`).

A new phase begins at the lane position where the corpora, their weights or the number of lanes
change, with a new division of the tokens into lanes.

If only the number of lanes changes, the new phase reads the unread remainder of the epoch first, so
every token is still read once per epoch, except fewer than `num_lanes`. The memory of a new lane is
rebuilt from the tokens before it (loading.py), and ages count from the first of these.

If the corpora or weights change, ages restart at 0, as at the end of an epoch. Each corpus is read
cyclically (data_pipeline/streams/mixture.py) and continues after the last epoch that was begun, so
tokens not read yet come before tokens read already. Corpora are identified by digest: a new name or
path for the same data changes nothing.
"""

import json
import math
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field, ValidationError

from data_pipeline.streams.lanes import LanePlan
from data_pipeline.streams.mixture import tokens_per_epoch
from data_pipeline.streams.order import Remainder, merged, num_tokens
from data_pipeline.system.remote_path import DatasetPath
from data_pipeline.system.strict import StrictModel, first_problem
from txl_dist.checkpoint.manifest import MANIFEST_NAME, CheckpointManifest, Count, Sha256
from txl_dist.errors import CheckpointError
from txl_dist.evaluation.scores import LossSums
from txl_dist.training.divergence import DivergenceState
from txl_dist.training.scores import StepScore


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

    def plan(self, *, tgt_len: int = 1, num_turns: int = 1) -> LanePlan:
        """The lanes of the phase. Without sizes, for questions that do not depend on them."""
        return LanePlan(
            num_tokens=self.num_tokens,
            num_lanes=self.num_lanes,
            tgt_len=tgt_len,
            start=self.position,
            first_epoch=self.first_epoch,
            remainder=self.remainder,
            num_turns=num_turns,
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
    turn: Count = 0
    """Which part of the lanes reads next there (`data.lanes_per_step`); 0 if all do."""
    tokens: Count = 0
    """Targets trained on, over all lanes."""
    best: StepScore | None = None
    """The best score when the checkpoint was saved; None in a run that trains (`scores.py`)."""
    unreported: tuple[float, Count, int] = (0.0, 0, 0)
    """LossSums since the last line of metrics.jsonl."""
    unreported_steps: Count = 0
    last_update: LastUpdate | None = None
    """None before the first one."""
    phases: tuple[Phase, ...] = ()
    """All phases in order; the last one is the current one."""
    contiguous_from: Count = 0
    """No token from this lane position on may attend to tokens before it: steps between them were
    skipped, so the memory of the lanes does not end where the text continues."""
    divergence: DivergenceState = DivergenceState()
    forked_from: str | None = None
    """The checkpoint of another run where this run began: PATH of `--resume PATH`, absolute."""

    @property
    def unreported_sums(self) -> LossSums:
        return LossSums(*self.unreported)


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


@dataclass(frozen=True, slots=True)
class PhaseChange:
    """The differences between two phases; false if there are none."""

    replaced: tuple[tuple[CorpusEntry, CorpusEntry], ...]
    """Other data under the same name: (before, after)."""
    mixture: tuple[str, ...]
    """One line per corpus that was added, removed or has another share."""
    num_lanes: bool
    """Whether the number of lanes changes."""

    def __bool__(self) -> bool:
        return bool(self.replaced or self.mixture or self.num_lanes)

    @classmethod
    def between(cls, before: Phase, after: Phase) -> "PhaseChange":
        """Compare the corpora and their shares, but not their positions in the cyclic order."""
        old_corpora = {corpus.digest: corpus for corpus in before.corpora}
        new_corpora = {corpus.digest: corpus for corpus in after.corpora}
        removed = {c.name: c for digest, c in old_corpora.items() if digest not in new_corpora}
        added = {c.name: c for digest, c in new_corpora.items() if digest not in old_corpora}
        replaced = tuple(
            (removed.pop(name), added.pop(name)) for name in sorted(removed.keys() & added.keys())
        )
        pairs = [
            (c, new_corpora[digest]) for digest, c in old_corpora.items() if digest in new_corpora
        ]
        old_shares, new_shares = before.shares, after.shares
        lines = [f"{name}: checkpoint {old_shares[name]:.2%}, now not there" for name in removed]
        lines += [f"{name}: not in the checkpoint, now {new_shares[name]:.2%}" for name in added]
        lines += [
            f"{new.name}: checkpoint {old_shares[old.name]:.6g}, now {new_shares[new.name]:.6g}"
            for old, new in [*pairs, *replaced]
            if not math.isclose(old_shares[old.name], new_shares[new.name])
        ]
        return cls(replaced, tuple(lines), before.num_lanes != after.num_lanes)


def phases_from(
    phases: tuple[Phase, ...], current: Phase, *, position: int, context_tokens: int = 0
) -> tuple[Phase, ...]:
    """The phases of a run that continues at lane `position` with the data and lanes of `current`.

    `context_tokens` per lane will be replayed if the number of lanes changes inside an epoch.
    """
    if not phases:
        return (current,)
    last, change = phases[-1], PhaseChange.between(phases[-1], current)
    if not change:
        return phases
    epoch, _, unread = last.plan().progress(position)
    changes: dict[str, Any] = {"position": position, "first_epoch": epoch}
    if unread != ((0, last.num_tokens),):  # inside an epoch
        if change.replaced or change.mixture or num_tokens(unread) < current.num_lanes:
            changes["first_epoch"] = epoch + 1
        else:
            changes |= {"unread": unread, "context_tokens": context_tokens}
    # With the same shares, the weights of the checkpoint: rounding must not move the epoch's cuts.
    corpora = current.corpora if change.replaced or change.mixture else last.corpora
    starts = _cyclic_starts(phases, next_epoch=changes["first_epoch"])
    changes["corpora"] = tuple(
        corpus.model_copy(update={"start": starts.get(corpus.digest, 0)}) for corpus in corpora
    )
    return (*phases, current.model_copy(update=changes))


def _cyclic_starts(phases: tuple[Phase, ...], *, next_epoch: int) -> dict[str, int]:
    """Where each corpus, by digest, has arrived in its cyclic order when `next_epoch` begins."""
    # Recomputed from the list of phases on every change; nothing but the phases is stored.
    starts: dict[str, int] = {}
    next_epochs = [*(phase.first_epoch for phase in phases[1:]), next_epoch]
    for phase, stop in zip(phases, next_epochs, strict=True):
        for corpus in phase.corpora:
            tokens = (stop - phase.first_epoch) * phase.tokens_per_epoch[corpus.name]
            # Over all phases, so a corpus that was removed and added again continues too.
            starts[corpus.digest] = (corpus.start + tokens) % corpus.tokens
    return starts


@dataclass(frozen=True, slots=True)
class RealisedShare:
    """The part of an epoch that one corpus provides."""

    name: str
    weight: float
    share: float
    """Share of the epoch's tokens."""
    tokens_per_epoch: int
    tokens: int
    """Tokens of the whole corpus."""

    @property
    def passes(self) -> float:
        """How often an epoch reads the corpus."""
        return self.tokens_per_epoch / self.tokens

    @property
    def line(self) -> str:
        """`web 75.00%: 3,000 tokens per epoch, 1.50 times its 2,000`."""
        return (
            f"{self.name} {self.share:.2%}: {self.tokens_per_epoch:,} tokens per epoch, "
            f"{self.passes:.3g} times its {self.tokens:,}"
        )


def realised_shares(phase: Phase) -> list[RealisedShare]:
    """The shares of all corpora of a phase, in its order."""
    return [
        RealisedShare(
            name=corpus.name,
            weight=corpus.weight,
            share=phase.tokens_per_epoch[corpus.name] / phase.num_tokens,
            tokens_per_epoch=phase.tokens_per_epoch[corpus.name],
            tokens=corpus.tokens,
        )
        for corpus in phase.corpora
    ]


# --- the tokens of a resume -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TokenCount:
    """Tokens of the epoch in which a run resumes."""

    epoch: int
    read: int
    unread: int
    """Tokens that the run is going to read in this epoch, with the tail that no lane gets."""
    lost: int
    """Neither read nor going to be read, if they are enough for one token per lane."""
    twice: int
    """Read already and going to be read again."""
    targets_missing: int
    """Targets up to the resume, less those that were trained on; 0 if no step was skipped."""

    @property
    def line(self) -> str:
        """`tokens lost by this resume 0, read twice 0 | epoch 3: 1,000 tokens read, 500 unread`."""
        trained = f" | targets not trained on {self.targets_missing:,}"
        return (
            f"tokens lost by this resume {self.lost:,}, read twice {self.twice:,}"
            f" | epoch {self.epoch}: {self.read:,} tokens read, {self.unread:,} unread"
            f"{trained if self.targets_missing else ''}"
        )


def count_tokens(before: tuple[Phase, ...], state: TrainState, plan: LanePlan) -> TokenCount:
    """Count the tokens that a resume would lose or read twice, without the rules of `phases_from`.

    Compares what the phases of a checkpoint, `before`, have read of the epoch with what `plan`, of
    the last phase of `state`, is going to read.
    """
    plans = [phase.plan() for phase in before]
    stops = [*(phase.position for phase in before[1:]), state.position]
    progress = [past.progress(stop) for past, stop in zip(plans, stops, strict=True)]
    epoch = progress[-1].epoch
    read = [part for past in progress if past.epoch == epoch for part in past.read]
    next_epoch, _, unread = plan.progress(state.position)
    unread = unread if next_epoch == epoch else ()
    covered = num_tokens(merged([*read, *unread]))
    missing = before[-1].num_tokens - covered
    targets = sum(
        earlier.targets_between(earlier.start, stop)
        for earlier, stop in zip(plans, stops, strict=True)
    )
    # The lanes of earlier turns are a segment ahead, and have no other plan there.
    targets += sum(plan.targets_in_step(state.position, turn) for turn in range(state.turn))
    return TokenCount(
        epoch=epoch,
        read=num_tokens(read),
        unread=num_tokens(unread),
        lost=missing if missing >= plan.num_lanes else 0,
        twice=num_tokens(read) + num_tokens(unread) - covered,
        targets_missing=targets - state.tokens,
    )
