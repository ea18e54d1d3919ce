"""Promises 1 and 2 while lanes, corpora and weights change inside epochs: every token read once.

A run reads corpora of numbered tokens in legs with different numbers of lanes, segment lengths and
weights of the corpora. The tests compare the segments of all legs with the definitions: which
tokens an epoch has, and which tokens precede each other in its order.
"""

from collections import Counter, defaultdict
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st
from numpy.testing import assert_array_equal

from data_pipeline.streams.lanes import EpochRange, LanePlan
from data_pipeline.streams.mixture import source_of_epoch
from data_pipeline.streams.order import Ordering
from data_pipeline.streams.segments import IGNORED, SegmentReader
from tests.support.hypothesis_examples import examples
from tests.support.token_sources import TextSource, numbered_sources
from txl_dist.training.phases import CorpusEntry, Phase, count_tokens, mixed_source, phases_from

quickly = examples(60)
SEED = 5
NAMES = ("a", "b", "c")
DIGESTS = {name: f"{number:064x}" for number, name in enumerate(NAMES)}


class Leg(NamedTuple):
    """Some steps with one number of lanes and the same weights."""

    num_lanes: int
    tgt_len: int
    num_steps: int
    context_tokens: int
    weights: tuple[tuple[str, float], ...] = ()
    """By corpus; (): all corpora, equally."""


@dataclass(frozen=True)
class Run:
    """Corpora by name and the legs of a run."""

    lengths: dict[str, list[list[int]]]
    legs: list[Leg]
    shuffle: str
    reset: Any
    piece_len: int | None = None

    @property
    def ordering(self) -> Ordering:
        return Ordering.named(self.shuffle, self.piece_len)

    @property
    def sources(self) -> dict[str, TextSource]:
        return {DIGESTS[name]: text for name, text in numbered_sources(self.lengths).items()}

    def mixture(self, leg: Leg, factor: float = 1.0) -> Phase:
        weights = dict(leg.weights) or dict.fromkeys(self.lengths, 1.0)
        entries = [
            CorpusEntry(
                name=name, digest=DIGESTS[name], tokens=sum(map(sum, self.lengths[name])),
                weight=factor * weight,
            )
            for name, weight in weights.items()
        ]  # fmt: skip
        return Phase(corpora=tuple(entries), num_lanes=leg.num_lanes)

    def phases(self) -> list[tuple[Phase, Leg, int]]:
        """Phase and first lane position of every leg."""
        phases: tuple[Phase, ...] = ()
        position, legs = 0, []
        for leg in self.legs:
            phases = phases_from(
                phases, self.mixture(leg), position=position, context_tokens=leg.context_tokens
            )
            legs.append((phases[-1], leg, position))
            position += leg.num_steps * leg.tgt_len
        return legs

    def source(self, phase: Phase) -> Any:
        return mixed_source(phase, self.sources, ordering=self.ordering, seed=SEED)

    def reader(self, phase: Phase, leg: Leg, lanes: range | None = None) -> SegmentReader:
        lanes = range(leg.num_lanes) if lanes is None else lanes
        return SegmentReader(
            self.source(phase), phase.plan(tgt_len=leg.tgt_len), lanes=lanes,
            reset=self.reset, ordering=self.ordering, seed=SEED,
        )  # fmt: skip

    def order(self, phase: Phase, epoch: int) -> list[int]:
        """All tokens of an epoch in its order: the only lane of a plan that begins there."""
        num_tokens = phase.num_tokens
        plan = LanePlan(num_tokens=num_tokens, num_lanes=1, tgt_len=num_tokens, first_epoch=epoch)
        reader = SegmentReader(
            self.source(phase), plan, lanes=[0], reset="stream",
            ordering=self.ordering, seed=SEED,
        )  # fmt: skip
        return reader.read(0, 1)[0].input[0].tolist()

    @property
    def document_of(self) -> dict[int, int]:
        """The number of its document, by token."""
        documents = (text for source in self.sources.values() for text in source.documents)
        return {token: number for number, text in enumerate(documents) for token in text}


corpus = st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=4), min_size=1, max_size=4)


@st.composite
def runs(draw: st.DrawFn, num_corpora: int = 2, *, changes_weights: bool = False) -> Run:
    names = NAMES[: draw(st.integers(1, num_corpora))]
    # 12 tokens or more each, so that 6 lanes have the 2 tokens each that a plan requires.
    lengths = {name: [*draw(corpus), [12]] for name in names}
    weights = st.dictionaries(st.sampled_from(names), st.floats(0.5, 4.0), min_size=1)
    legs = st.builds(
        Leg,
        num_lanes=st.integers(1, 6),
        tgt_len=st.integers(1, 4),
        num_steps=st.integers(1, 6),
        context_tokens=st.integers(0, 5),
        weights=weights.map(lambda each: tuple(each.items())) if changes_weights else st.just(()),
    )
    return Run(
        lengths,
        draw(st.lists(legs, min_size=2, max_size=5)),
        draw(st.sampled_from(["blocks", "none"])),
        draw(st.sampled_from(["document", "stream"])),
        draw(st.none() | st.integers(2, 5)),
    )


@quickly
@given(run=runs())
@example(run=Run({"a": [[12]]}, [Leg(1, 1, 11, 0), Leg(2, 1, 3, 0)], "none", "stream"))
def test_every_epoch_is_read_once_over_all_numbers_of_lanes(run: Run) -> None:
    *legs, (phase, leg, position) = run.phases()
    epoch = phase.plan().progress(position).epoch
    to_finish = phase.plan().lane_tokens_in(epoch) + phase.plan().lane_tokens
    legs.append((phase, leg._replace(num_steps=-(-to_finish // leg.tgt_len)), position))
    read: dict[int, Counter[int]] = defaultdict(Counter)
    for phase, leg, position in legs:
        segments = run.reader(phase, leg).read(position, leg.num_steps)
        inputs = np.concatenate([segment.input for segment in segments], axis=1)
        for epoch, start, stop in phase.plan().epoch_ranges(position, segments[-1].next_position):
            read[epoch].update(inputs[:, : stop - start].ravel().tolist())
            inputs = inputs[:, stop - start :]
    assert list(read) == list(range(len(read))), "no epoch is skipped or read again"
    for epoch, counts in read.items():
        unread = Counter(run.order(legs[0][0], epoch))
        unread.subtract(counts)
        assert min(unread.values()) >= 0, "no token is read twice"
        if epoch <= max(read) - 1:  # finished
            assert unread.total() < max(leg.num_lanes for leg in run.legs)


@quickly
@given(run=runs(num_corpora=3, changes_weights=True))
def test_over_all_weights_the_read_counts_of_any_two_tokens_differ_by_at_most_one(run: Run) -> None:
    """Also for corpora that are removed and added again. A begun epoch counts as read."""
    run = replace(run, legs=[leg._replace(num_lanes=run.legs[0].num_lanes) for leg in run.legs])
    counts: Counter[int] = Counter()
    epochs: list[int] = []
    phases = {phase.position: phase for phase, *_ in run.phases()}
    *_, (_, leg, position) = run.phases()
    stops = [*phases, position + leg.num_steps * leg.tgt_len][1:]
    for phase, stop in zip(phases.values(), stops, strict=True):
        epoch_ranges = phase.plan().epoch_ranges(phase.position, stop)
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
@given(run=runs(num_corpora=1))
def test_ages_and_targets_follow_the_order_of_the_epoch(run: Run) -> None:
    """With one corpus, each token has one place in an epoch's order."""
    document_of = run.document_of
    for phase, leg, _ in run.phases():
        plan, context = phase.plan(tgt_len=leg.tgt_len), phase.context_tokens
        num_segments = -(-(context + plan.lane_tokens_in(phase.first_epoch)) // leg.tgt_len)
        segments = run.reader(phase, leg).read(phase.position - context, num_segments)
        order = run.order(phase, phase.first_epoch)
        place_of = {token: place for place, token in enumerate(order)}
        following = dict(pairwise(replace(run, piece_len=None).order(phase, phase.first_epoch)))
        columns = (
            np.concatenate([getattr(segment, name) for segment in segments], axis=1).tolist()
            for name in ("input", "target", "age")
        )
        for lane, (inputs, targets, ages) in enumerate(zip(*columns, strict=True)):
            first = phase.plan().token_ranges(lane, EpochRange(phase.first_epoch, 0, 1))[0].start
            replayed = min(context, first)
            padding, stop = context - replayed, context + plan.lane_tokens_in(phase.first_epoch)
            assert inputs[context] == order[first]
            assert set(ages[:padding]) <= {0}
            expected_age = 0
            for i in range(padding, stop):
                follows = i > padding and place_of[inputs[i]] == place_of[inputs[i - 1]] + 1
                same = (
                    follows
                    and (place_of[inputs[i]] % (run.piece_len or len(order)))
                    and (
                        run.reset == "stream"
                        or document_of[inputs[i]] == document_of[inputs[i - 1]]
                    )
                )
                expected_age = expected_age + 1 if same else 0
                assert ages[i] == expected_age
                if i > padding:
                    assert targets[i - 1] == (following[inputs[i - 1]] if follows else IGNORED)
                    if run.piece_len is None:
                        assert targets[i - 1] in (inputs[i], IGNORED)


@quickly
@given(run=runs(num_corpora=3, changes_weights=True))
def test_without_a_context_ages_restart_at_each_phase(run: Run) -> None:
    run = replace(run, legs=[leg._replace(context_tokens=0) for leg in run.legs])
    for phase, leg, _ in run.phases():
        first = run.reader(phase, leg).read(phase.position, 1)[0]
        assert (first.age[:, 0] == 0).all()
        assert (first.age <= np.arange(leg.tgt_len)).all()


@quickly
@given(run=runs(num_corpora=3, changes_weights=True))
def test_the_plan_computes_the_targets_of_a_step_before_it_is_read(run: Run) -> None:
    for phase, leg, position in run.phases():
        plan = phase.plan(tgt_len=leg.tgt_len)
        for segment in run.reader(phase, leg).read(position, 2 * leg.num_steps):
            counted = int((segment.target != IGNORED).sum())
            assert plan.targets_in_step(segment.position) == counted
            turns = replace(plan, num_turns=3)
            in_turns = [(segment.target[turn::3] != IGNORED).sum() for turn in range(3)]
            assert in_turns == [turns.targets_in_step(segment.position, n) for n in range(3)]


@quickly
@given(run=runs(num_corpora=3, changes_weights=True), data=st.data())
def test_a_resume_inside_a_phase_reads_on_with_any_number_of_ranks(
    run: Run, data: st.DataObject
) -> None:
    phase, leg, _ = run.phases()[-1]
    straight = run.reader(phase, leg).read(phase.position, leg.num_steps + 3)
    start = data.draw(st.integers(0, leg.num_steps))
    num_ranks = data.draw(st.integers(1, leg.num_lanes))
    for rank in range(num_ranks):
        lanes = phase.plan().lanes_of_rank(rank, num_ranks)
        reader = run.reader(phase, leg, lanes)
        for expected in straight[start:]:
            segment = reader.read(expected.position, 1)[0]
            for name in ("input", "target", "age"):
                rows = getattr(expected, name)[lanes.start : lanes.stop]
                assert_array_equal(getattr(segment, name), rows)


@quickly
@given(run=runs())
def test_other_lanes_lose_no_token(run: Run) -> None:
    phases: tuple[Phase, ...] = ()
    for phase, _, position in run.phases():
        if phase not in phases:
            before, phases = phases, (*phases, phase)
            count = count_tokens(before or phases, phase, position=position)
            assert (count.lost, count.twice) == (0, 0)


@quickly
@given(run=runs(num_corpora=3, changes_weights=True))
def test_the_same_lanes_and_shares_begin_no_phase(run: Run) -> None:
    phases: tuple[Phase, ...] = ()
    for phase, leg, position in run.phases():
        phases = phases if phase in phases else (*phases, phase)
        stop = position + leg.num_steps * leg.tgt_len
        assert phases_from(phases, run.mixture(leg, factor=3.0), position=stop) == phases
