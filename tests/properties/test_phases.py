"""Changing corpora and weights during a run: equal read counts over all phases, exact resume."""

import hashlib
from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_array_equal

from data_pipeline.streams.lanes import LanePlan
from data_pipeline.streams.mixture import source_of_epoch
from data_pipeline.streams.order import ORDERINGS
from data_pipeline.streams.segments import SegmentReader
from tests.support.hypothesis_examples import examples
from tests.support.token_sources import TextSource, numbered_sources
from txl_dist.training.phases import CorpusEntry, Phase, mixed_source, phases_from

TGT_LEN = 3
quickly = examples(100)


def digest(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()


@dataclass(frozen=True)
class Run:
    """Corpora by name, and legs: weights of the corpora and a number of steps."""

    lengths: dict[str, list[list[int]]]
    legs: list[tuple[dict[str, float], int]]
    num_lanes: int
    shuffle: Any

    @property
    def sources(self) -> dict[str, TextSource]:
        return {digest(name): source for name, source in numbered_sources(self.lengths).items()}

    def mixture(self, weights: dict[str, float]) -> Phase:
        entries = [
            CorpusEntry(
                name=name, digest=digest(name), tokens=sum(map(sum, self.lengths[name])),
                weight=weight,
            )
            for name, weight in weights.items()
        ]  # fmt: skip
        return Phase(corpora=tuple(entries), num_lanes=self.num_lanes)

    def phases(self) -> tuple[tuple[Phase, ...], int]:
        """The phases after all legs, and the position reached."""
        phases: tuple[Phase, ...] = ()
        position = 0
        for weights, num_steps in self.legs:
            current = self.mixture(weights)
            phases = phases_from(phases, current, position=position)
            position += num_steps * TGT_LEN
        return phases, position

    def plan(self, phase: Phase) -> LanePlan:
        return phase.plan(tgt_len=TGT_LEN)

    def source(self, phase: Phase) -> Any:
        return mixed_source(phase, self.sources, ordering=ORDERINGS[self.shuffle], seed=5)

    def reader(self, phase: Phase, lanes: range) -> SegmentReader:
        return SegmentReader(
            self.source(phase), self.plan(phase), lanes=lanes,
            reset="document", ordering=ORDERINGS[self.shuffle], seed=5,
        )  # fmt: skip


corpus = st.lists(st.lists(st.integers(2, 7), min_size=1, max_size=3), min_size=2, max_size=5)


@st.composite
def runs(draw: st.DrawFn) -> Run:
    names = ("a", "b", "c")
    lengths = {name: draw(corpus) for name in names}
    legs = draw(
        st.lists(
            st.tuples(
                st.dictionaries(st.sampled_from(names), st.floats(0.5, 4.0), min_size=1),
                st.integers(1, 30),
            ),
            min_size=1,
            max_size=4,
        )
    )
    return Run(lengths, legs, draw(st.integers(1, 2)), draw(st.sampled_from(["blocks", "none"])))


@quickly
@given(run=runs())
def test_over_all_phases_the_read_counts_of_any_two_tokens_differ_by_at_most_one(run: Run) -> None:
    """Also for corpora that are removed and added again. A begun epoch counts as read."""
    phases, position = run.phases()
    counts: Counter[int] = Counter()
    epochs = []
    stops = [*(phase.position for phase in phases[1:]), position]
    for phase, stop in zip(phases, stops, strict=True):
        epoch_ranges = run.plan(phase).epoch_ranges(phase.position, stop)
        for epoch in sorted({span.epoch for span in epoch_ranges}):
            source = source_of_epoch(run.source(phase), epoch)
            for part, num_tokens in enumerate(source.block_tokens):
                counts.update(source.read(part, 0, int(num_tokens)).tolist())
            epochs.append(epoch)
    assert epochs == list(range(len(epochs))), "no two epochs share a number, so none an order"
    for source in run.sources.values():
        read = [counts[token] for document in source.documents for token in document]
        assert max(read) - min(read) <= 1


@quickly
@given(run=runs(), data=st.data())
def test_a_resume_inside_the_last_phase_reads_on_with_any_number_of_ranks(
    run: Run, data: st.DataObject
) -> None:
    phases, position = run.phases()
    phase = phases[-1]
    straight = run.reader(phase, range(run.num_lanes))
    num_steps = (position - phase.position) // TGT_LEN
    expected = straight.read(phase.position, num_steps + 4)[num_steps:]

    weights = {name: 3 * weight for name, weight in run.legs[-1][0].items()}
    renamed = run.mixture(weights)
    again = phases_from(phases, renamed, position=position)
    assert again == phases, "the same shares are no new phase"
    num_ranks = data.draw(st.integers(1, run.num_lanes))
    for rank in range(num_ranks):
        lanes = run.plan(phase).lanes_of_rank(rank, num_ranks)
        for segment, whole in zip(
            run.reader(again[-1], lanes).read(position, 4), expected, strict=True
        ):
            for name in ("input", "target", "age"):
                assert_array_equal(
                    getattr(segment, name), getattr(whole, name)[lanes.start : lanes.stop]
                )


@quickly
@given(run=runs())
def test_ages_restart_at_each_phase(run: Run) -> None:
    phases, _ = run.phases()
    for phase in phases:
        first = run.reader(phase, range(run.num_lanes)).read(phase.position, 1)[0]
        assert (first.age[:, 0] == 0).all()
        assert (first.age <= np.arange(TGT_LEN)).all()
