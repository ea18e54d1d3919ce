"""Phases: how a run goes on when its corpora or their weights change. Pure integers, no files.

A new phase begins at the lane position where the change is made, with a new cut of lanes: ages
count from there, as at an epoch's end. Tapes (streams/mixture.py) go on behind the last epoch
that was begun, so what a corpus has left comes before what was read. Corpora are known by digest;
a new name or path of the same data changes nothing.
"""

import math
from dataclasses import dataclass

from txl_dist.training.state import CorpusEntry, Phase


@dataclass(frozen=True, slots=True)
class PhaseChange:
    """What sets two phases apart; false if nothing does."""

    replaced: tuple[tuple[CorpusEntry, CorpusEntry], ...]
    """Other data under the same name: (before, now)."""
    mixture: tuple[str, ...]
    """A line for every corpus that came, went or has another share."""

    def __bool__(self) -> bool:
        return bool(self.replaced or self.mixture)

    @classmethod
    def between(cls, before: Phase, now: Phase) -> "PhaseChange":
        """Compares what is read, not from where on."""
        old = {corpus.digest: corpus for corpus in before.corpora}
        new = {corpus.digest: corpus for corpus in now.corpora}
        gone = {corpus.name: corpus for digest, corpus in old.items() if digest not in new}
        came = {corpus.name: corpus for digest, corpus in new.items() if digest not in old}
        replaced = tuple(
            (gone.pop(name), came.pop(name)) for name in sorted(gone.keys() & came.keys())
        )
        pairs = [(old[digest], new[digest]) for digest in old if digest in new]
        shares, shares_now = before.shares, now.shares
        lines = [f"{name}: checkpoint {shares[name]:.2%}, now not there" for name in gone]
        lines += [f"{name}: not in the checkpoint, now {shares_now[name]:.2%}" for name in came]
        lines += [
            f"{now.name}: checkpoint {shares[then.name]:.6g}, now {shares_now[now.name]:.6g}"
            for then, now in [*pairs, *replaced]
            if not math.isclose(shares[then.name], shares_now[now.name])
        ]
        return cls(replaced, tuple(lines))


def phases_from(
    phases: tuple[Phase, ...], now: Phase, *, position: int, num_lanes: int
) -> tuple[Phase, ...]:
    """The phases of a run that goes on at lane `position` and reads the corpora of `now` there."""
    if not phases:
        return (now,)
    if not PhaseChange.between(phases[-1], now):
        return phases
    tape: dict[str, int] = {}
    first_epoch = 0
    stops = [*(phase.position for phase in phases[1:]), position]
    for phase, stop in zip(phases, stops, strict=True):
        lane_tokens = phase.num_tokens // num_lanes
        num_epochs = -(-(stop - phase.position) // lane_tokens)
        for corpus in phase.corpora:
            read = corpus.start + num_epochs * phase.tokens_per_epoch[corpus.name]
            tape[corpus.digest] = read % corpus.tokens
        first_epoch = phase.first_epoch + num_epochs
    corpora = tuple(
        corpus.model_copy(update={"start": tape.get(corpus.digest, 0)}) for corpus in now.corpora
    )
    return (*phases, Phase(position=position, first_epoch=first_epoch, corpora=corpora))


@dataclass(frozen=True, slots=True)
class RealisedShare:
    """What an epoch of a phase reads of one corpus."""

    name: str
    weight: float
    share: float
    """Of the epoch's tokens."""
    tokens_per_epoch: int
    tokens: int
    """Of the whole corpus."""

    @property
    def passes(self) -> float:
        """Times an epoch reads the corpus."""
        return self.tokens_per_epoch / self.tokens

    @property
    def line(self) -> str:
        """`web 75.00%: 3,000 tokens an epoch, 1.50 times its 2,000`."""
        return (
            f"{self.name} {self.share:.2%}: {self.tokens_per_epoch:,} tokens an epoch, "
            f"{self.passes:.3g} times its {self.tokens:,}"
        )


def realised_shares(phase: Phase) -> list[RealisedShare]:
    """Of every corpus of a phase, in its order."""
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
