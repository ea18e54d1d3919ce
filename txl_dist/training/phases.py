"""Phases: how a run continues when its corpora, their weights or its lanes change. Pure integers.

A new phase begins at the lane position of the change, with a new division of the tokens into lanes.

If only the number of lanes changes, the new phase reads the unread remainder of the epoch first, so
every token is still read once per epoch, except fewer than `num_lanes`. The memory of a new lane is
rebuilt from the tokens before it (segment_source.py), and ages count from the first of these.

If the corpora or weights change, ages restart at 0, as at the end of an epoch. Each corpus is read
cyclically (data_pipeline/streams/mixture.py) and continues after the last epoch that was begun, so
tokens not read yet come before tokens read already. Corpora are identified by digest: a new name or
path for the same data changes nothing.
"""

import math
from dataclasses import dataclass
from typing import Any

from data_pipeline.streams.order import num_tokens
from txl_dist.training.state import CorpusEntry, Phase


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
