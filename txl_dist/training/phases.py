"""Phases: which corpora, weights and lanes a run reads, from one lane position until they change.

At a change a new phase begins, with a new division of the tokens into lanes. All phases of a run
are in its checkpoints (`TrainState.phases`).

If only the number of lanes changes, the new phase reads the unread remainder of the epoch first, so
every token is still read once per epoch, except fewer than `num_lanes`. The memory of a new lane is
rebuilt from the tokens before it (start.py), and ages count from the first of these.

If the corpora or weights change, ages restart at 0, as at the end of an epoch. Each corpus is read
cyclically (data_pipeline/streams/mixture.py) and continues after the last epoch that was begun. So
if an epoch reads less than the whole corpus, tokens not read yet come first. After a change from a
single corpus, whose order is another one, some that were read may come before others. Corpora are
identified by digest: a new name or path for the same data changes nothing.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field

from data_pipeline.shards.shard_reader import TokenSource
from data_pipeline.streams.lanes import LanePlan
from data_pipeline.streams.mixture import CyclicCorpus, MixedSource, tokens_per_epoch
from data_pipeline.streams.order import Ordering, Remainder, merged, num_tokens
from data_pipeline.system.strict import StrictModel
from txl_dist.checkpoint.manifest import Count, Sha256


class CorpusEntry(StrictModel):
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

    def plan(self, *, tgt_len: int = 1, num_turns: int = 1) -> LanePlan:
        """The lanes of the phase. Without sizes, for questions that do not depend on them."""
        return LanePlan(
            num_tokens=self.num_tokens,
            num_lanes=self.num_lanes,
            tgt_len=tgt_len,
            start=self.position,
            first_epoch=self.first_epoch,
            remainder=Remainder(self.unread, self.context_tokens) if self.unread else None,
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


@dataclass(frozen=True, slots=True)
class PhaseChange:
    """The differences between two phases; false if there are none."""

    replaced: tuple[tuple[CorpusEntry, CorpusEntry], ...]
    """Other data under the same name: (before, after)."""
    mixture: tuple[str, ...]
    """One line per corpus that was added, removed or has another share."""
    num_lanes: bool

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


def mixed_source(
    phase: Phase, sources: Mapping[str, TokenSource], *, ordering: Ordering, seed: int
) -> TokenSource | MixedSource:
    """Return the tokens that a phase reads; `sources` has the tokens of each corpus by digest."""
    # Not read cyclically: the order of a single corpus is that of a run without a mixture.
    if len(phase.corpora) == 1:
        return sources[phase.corpora[0].digest]
    tokens_per_epoch = phase.tokens_per_epoch
    return MixedSource(
        [
            CyclicCorpus(
                sources[entry.digest],
                tokens_per_epoch=tokens_per_epoch[entry.name],
                ordering=ordering,
                seed=seed,
                key=int(entry.digest[:16], 16),  # its order does not depend on the other corpora
                start=entry.start,
                first_epoch=phase.first_epoch,
            )
            for entry in phase.corpora
        ]
    )


@dataclass(frozen=True, slots=True)
class RealisedShare:
    """The part of an epoch that one corpus provides."""

    name: str
    weight: float
    share: float
    tokens_per_epoch: int
    tokens: int
    """Tokens of the whole corpus."""
    passes: float
    """How often an epoch reads the corpus."""

    def __str__(self) -> str:
        """`web 75.00%: 3,000 tokens per epoch, 1.50 times its 2,000`."""
        return (
            f"{self.name} {self.share:.2%}: {self.tokens_per_epoch:,} tokens per epoch, "
            f"{self.passes:.3g} times its {self.tokens:,}"
        )


def realised_shares(phase: Phase) -> list[RealisedShare]:
    per_epoch = phase.tokens_per_epoch
    return [
        RealisedShare(
            name=corpus.name,
            weight=corpus.weight,
            share=per_epoch[corpus.name] / phase.num_tokens,
            tokens_per_epoch=per_epoch[corpus.name],
            tokens=corpus.tokens,
            passes=per_epoch[corpus.name] / corpus.tokens,
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

    def __str__(self) -> str:
        """`tokens lost by this resume 0, read twice 0 | epoch 3: 1,000 tokens read, 500 unread`."""
        return (
            f"tokens lost by this resume {self.lost:,}, read twice {self.twice:,}"
            f" | epoch {self.epoch}: {self.read:,} tokens read, {self.unread:,} unread"
        )


def count_tokens(before: tuple[Phase, ...], after: Phase, *, position: int) -> TokenCount:
    """Count the tokens that a resume would lose or read twice, without the rules of `phases_from`.

    Compares what the phases of a checkpoint, `before`, have read of the epoch up to `position` with
    what the phase `after` is going to read.
    """
    stops = [*(phase.position for phase in before[1:]), position]
    progress = [past.plan().progress(stop) for past, stop in zip(before, stops, strict=True)]
    epoch = progress[-1].epoch
    read = [part for past in progress if past.epoch == epoch for part in past.read]
    next_epoch, _, unread = after.plan().progress(position)
    unread = unread if next_epoch == epoch else ()
    covered = num_tokens(merged([*read, *unread]))
    missing = before[-1].num_tokens - covered
    return TokenCount(
        epoch=epoch,
        read=num_tokens(read),
        unread=num_tokens(unread),
        lost=missing if missing >= after.num_lanes else 0,
        twice=num_tokens(read) + num_tokens(unread) - covered,
    )
