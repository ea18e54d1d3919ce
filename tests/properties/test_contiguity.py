"""Promise 1, contiguity, and the age rule: the stream against a pure-Python list of every token.

The reference implementation lists an epoch token by token, cuts it into lanes and applies the
definitions. It uses no code of the package. Every token of a corpus has its own number, so a lost,
repeated or misplaced token is detected.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_pipeline.streams import order, segment_stream, segments
from data_pipeline.streams.lanes import LanePlan
from data_pipeline.streams.order import Ordering
from data_pipeline.streams.segment_stream import SegmentStream
from data_pipeline.streams.segments import Segment, in_turns, read_range
from tests.support.hypothesis_examples import examples
from tests.support.token_sources import NumberedSource

MASK_64 = 2**64 - 1
FIELDS = ("input", "target", "age")
PIECE_GROUP_TOKENS = 11
"""A prime: groups have one to five pieces, and no multiple of all lengths."""


class Token(NamedTuple):
    id: int
    document: int
    document_age: int
    piece_age: int
    """Tokens since the piece's start; without pieces since the epoch's."""
    following: int
    """Id of the next token of the text, -1 at its end."""


@dataclass(frozen=True)
class Case:
    """One corpus and one run over it."""

    blocks: list[list[int]]
    num_lanes: int
    tgt_len: int
    reset: Any
    shuffle: str
    piece_len: int | None
    seed: int
    chunk_tokens: int

    @cached_property
    def source(self) -> NumberedSource:
        return NumberedSource(*self.blocks)

    @cached_property
    def plan(self) -> LanePlan:
        num_tokens = sum(map(sum, self.blocks))
        return LanePlan(num_tokens=num_tokens, num_lanes=self.num_lanes, tgt_len=self.tgt_len)

    @contextmanager
    def stream(
        self, rank: int = 0, num_ranks: int = 1, *, position: int = 0, prefetch: int = 1
    ) -> Iterator[SegmentStream]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(segments, "CHUNK_TOKENS", self.chunk_tokens)
            patch.setattr(order, "GROUP_TOKENS", PIECE_GROUP_TOKENS)
            patch.setattr(segment_stream, "GROUP_TOKENS", 3 * self.num_lanes * self.tgt_len)
            with SegmentStream(
                self.source,
                self.plan,
                lanes=self.plan.lanes_of_rank(rank, num_ranks),
                reset=self.reset,
                ordering=Ordering.named(self.shuffle, self.piece_len),
                seed=self.seed,
                position=position,
                prefetch_segments=prefetch,
            ) as stream:
                yield stream

    def segments(self, num_segments: int, *rank: int, **options: int) -> list[Segment]:
        with self.stream(*rank, **options) as stream:
            return [next(stream) for _ in range(num_segments)]


# --- the reference implementation -----------------------------------------------------------------


def splitmix64_of(*words: int) -> int:
    """The published generator on Python integers, chained over words."""
    state = 0
    for word in words:
        z = ((state ^ word) + 0x9E3779B97F4A7C15) & MASK_64
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK_64
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK_64
        state = z ^ (z >> 31)
    return state


def epoch_tokens(case: Case, epoch: int) -> list[Token]:
    """One epoch in reading order, token by token."""
    corpus: list[tuple[int, int, list[Token]]] = []  # block, document of the block, tokens
    num_tokens = 0
    for block, lengths in enumerate(case.blocks):
        for document, length in enumerate(lengths):
            number = len(corpus)
            tokens = [Token(num_tokens + age, number, age, -1, -1) for age in range(length)]
            corpus.append((block, document, tokens))
            num_tokens += length
    if case.shuffle == "blocks":
        corpus.sort(key=lambda entry: splitmix64_of(case.seed, epoch, entry[0], entry[1]))
    if case.shuffle != "none":  # documents of one block stay together
        corpus.sort(key=lambda entry: splitmix64_of(case.seed, epoch, entry[0]))
    text = [token for _, _, tokens in corpus for token in tokens]
    text = [
        token._replace(piece_age=place % (case.piece_len or len(text)), following=following)
        for place, (token, following) in enumerate(
            zip(text, [*(token.id for token in text[1:]), -1], strict=True)
        )
    ]
    return in_pieces(case, epoch, text) if case.piece_len else text


def in_pieces(case: Case, epoch: int, text: list[Token]) -> list[Token]:
    """The text with its pieces shuffled inside groups, except the epoch's last piece."""
    assert case.piece_len is not None
    *pieces, last = batched(text, case.piece_len)
    per_group = max(1, PIECE_GROUP_TOKENS // case.piece_len)
    read = []
    for number, group in enumerate(batched(pieces, per_group)):
        start = number * per_group * case.piece_len
        hashes = [splitmix64_of(case.seed, epoch, start, place) for place in range(len(group))]
        read += [group[place] for place in sorted(range(len(group)), key=hashes.__getitem__)]
    return [token for piece in [*read, last] for token in piece]


def batched(items: list[Any], size: int) -> list[list[Any]]:
    return [items[first : first + size] for first in range(0, len(items), size)]


def expected_lane(case: Case, lane: int, num_positions: int) -> list[tuple[int, int, int, int]]:
    """(input, target, age, document) at every lane position from 0 on."""
    lane_tokens = sum(map(sum, case.blocks)) // case.num_lanes
    rows: list[tuple[int, int, int, int]] = []
    epoch = 0
    while len(rows) < num_positions:
        order = epoch_tokens(case, epoch)
        slice_tokens = order[lane * lane_tokens : (lane + 1) * lane_tokens]
        for offset, token in enumerate(slice_tokens):
            target = token.following if offset + 1 < len(slice_tokens) else -1
            age = min(offset, token.piece_age)
            age = min(age, token.document_age) if case.reset == "document" else age
            rows.append((token.id, target, age, token.document))
        epoch += 1
    return rows[:num_positions]


# --- strategies ---------------------------------------------------------------------------------

documents = st.one_of(st.integers(1, 6), st.integers(20, 60))
corpora = st.lists(st.lists(documents, min_size=1, max_size=5), min_size=1, max_size=8)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    blocks = draw(corpora.filter(lambda blocks: sum(map(sum, blocks)) >= 2))
    num_lanes = draw(st.integers(1, min(7, sum(map(sum, blocks)) // 2)))
    return Case(
        blocks=blocks,
        num_lanes=num_lanes,
        tgt_len=draw(st.integers(1, 12)),
        reset=draw(st.sampled_from(["document", "stream"])),
        shuffle=draw(st.sampled_from(["blocks", "whole_blocks", "none"])),
        piece_len=draw(st.none() | st.integers(2, 13)),
        seed=draw(st.integers(0, 2**63 - 1)),
        chunk_tokens=draw(st.sampled_from([1, 4, 1000])),
    )


prefetches = st.integers(1, 9)
quickly = examples(150)


# --- promise 1 ----------------------------------------------------------------------------------


@quickly
@given(case=cases(), data=st.data())
def test_every_rank_reads_its_lanes_as_defined(case: Case, data: st.DataObject) -> None:
    num_ranks = data.draw(st.integers(1, case.num_lanes))
    rank = data.draw(st.integers(0, num_ranks - 1))
    position = data.draw(st.integers(0, 3 * case.plan.lane_tokens))
    num_segments, tgt_len = 5, case.tgt_len
    stop = position + num_segments * tgt_len

    lanes = case.plan.lanes_of_rank(rank, num_ranks)
    prefetch = data.draw(prefetches)
    read = case.segments(num_segments, rank, num_ranks, position=position, prefetch=prefetch)
    num_rows = case.plan.rows_per_rank(num_ranks)
    segments = [*in_turns(case.plan, lanes, num_rows=num_rows)(read)]
    assert {len(segment.input) for segment in segments} == {num_rows}, "the same on every rank"
    for row in range(num_rows):
        got = zip(
            *(np.concatenate([getattr(s, name)[row] for s in segments]) for name in FIELDS),
            strict=True,
        )
        if row < len(lanes):
            expected = expected_lane(case, lanes[row], stop)[position:]
            assert list(got) == [(i, t, a) for i, t, a, _ in expected]
        else:
            assert set(got) == {(0, -1, 0)}, "a row of padding"
    assert [s.position for s in segments] == list(range(position, stop, tgt_len))
    assert segments[-1].next_position == stop


@quickly
@given(case=cases(), prefetch=prefetches, stops=st.lists(st.integers(1, 6), max_size=4))
def test_the_last_target_of_a_step_is_the_first_input_of_the_next(
    case: Case, prefetch: int, stops: list[int]
) -> None:
    segments: list[Segment] = []
    for num_segments in [*stops, 3]:  # a resume after each
        position = segments[-1].next_position if segments else 0
        segments += case.segments(num_segments, position=position, prefetch=prefetch)

    for segment, following in pairwise(segments):
        assert following.position == segment.next_position
        offset = following.position % case.plan.lane_tokens
        if offset == 0:
            assert (segment.target[:, -1] == -1).all()
            assert (following.age[:, 0] == 0).all()
            continue
        for lane in range(case.num_lanes):
            if case.piece_len and (lane * case.plan.lane_tokens + offset) % case.piece_len == 0:
                assert following.age[lane, 0] == 0, "a piece begins without memory"
            else:
                assert segment.target[lane, -1] == following.input[lane, 0]


@pytest.mark.fault_row(39)
@quickly
@given(case=cases(), prefetch=prefetches)
def test_each_epoch_reads_every_token_once_except_the_remainder(case: Case, prefetch: int) -> None:
    lane_tokens, num_epochs = case.plan.lane_tokens, 3
    num_segments = -(-num_epochs * lane_tokens // case.tgt_len)
    segments = case.segments(num_segments, prefetch=prefetch)
    inputs = np.concatenate([segment.input for segment in segments], axis=1)
    for epoch in range(num_epochs):
        read = inputs[:, epoch * lane_tokens : (epoch + 1) * lane_tokens].ravel().tolist()
        assert len(set(read)) == len(read) == case.num_lanes * lane_tokens
        assert set(read) <= set(range(case.plan.num_tokens))


@quickly
@given(case=cases(), data=st.data())
def test_a_range_of_a_split_has_the_documents_true_ages(case: Case, data: st.DataObject) -> None:
    num_tokens = case.plan.num_tokens
    start = data.draw(st.integers(0, num_tokens))
    stop = data.draw(st.integers(start, num_tokens))
    corpus = epoch_tokens(replace(case, shuffle="none", piece_len=None), epoch=0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(segments, "CHUNK_TOKENS", case.chunk_tokens)
        tokens, document_age = read_range(case.source, start, stop)
    assert tokens.tolist() == [token.id for token in corpus[start:stop]]
    assert document_age.tolist() == [token.document_age for token in corpus[start:stop]]
