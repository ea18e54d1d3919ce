"""Phases: how a run continues when its corpora or their weights change. Pure integers, no files.

A new phase begins at the lane position of the change, with a new division of the tokens into lanes;
ages restart at 0 there, as at the end of an epoch. Each corpus is read cyclically
(data_pipeline/streams/mixture.py) and continues after the last epoch that was begun, so tokens not
read yet come before tokens read already. Corpora are identified by digest: a new name or path for
the same data changes nothing.
"""

import math
from dataclasses import dataclass

from txl_dist.training.state import CorpusEntry, Phase


@dataclass(frozen=True, slots=True)
class PhaseChange:
    """The differences between two phases; false if there are none."""

    replaced: tuple[tuple[CorpusEntry, CorpusEntry], ...]
    """Other data under the same name: (before, after)."""
    mixture: tuple[str, ...]
    """One line per corpus that was added, removed or has another share."""

    def __bool__(self) -> bool:
        return bool(self.replaced or self.mixture)

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
        return cls(replaced, tuple(lines))


def phases_from(
    phases: tuple[Phase, ...], current: Phase, *, position: int, num_lanes: int
) -> tuple[Phase, ...]:
    """The phases of a run that continues at lane `position` with the corpora of `current`."""
    if not phases:
        return (current,)
    if not PhaseChange.between(phases[-1], current):
        return phases
    # Recomputed from the list of phases on every change; nothing but the phases is stored.
    cyclic_starts: dict[str, int] = {}
    first_epoch = 0
    stops = [*(phase.position for phase in phases[1:]), position]
    for phase, stop in zip(phases, stops, strict=True):
        lane_tokens = phase.num_tokens // num_lanes
        num_epochs = -(-(stop - phase.position) // lane_tokens)  # rounded up
        for corpus in phase.corpora:
            end = corpus.start + num_epochs * phase.tokens_per_epoch[corpus.name]
            # Over all phases, so a corpus that was removed and added again continues too.
            cyclic_starts[corpus.digest] = end % corpus.tokens
        first_epoch = phase.first_epoch + num_epochs
    corpora = tuple(
        corpus.model_copy(update={"start": cyclic_starts.get(corpus.digest, 0)})
        for corpus in current.corpora
    )
    return (*phases, Phase(position=position, first_epoch=first_epoch, corpora=corpora))


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
