"""Mixtures: exact shares, whole documents; tests/properties/test_phases.py has lanes and phases.

Every token of every corpus has its own number, so a lost or repeated token is detected.
"""

from collections import Counter
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_pipeline.errors import ConfigError
from data_pipeline.streams.lanes import LanePlan
from data_pipeline.streams.mixture import CyclicCorpus, MixedSource, tokens_per_epoch
from data_pipeline.streams.order import ORDERINGS
from data_pipeline.streams.segments import SegmentReader
from tests.support.hypothesis_examples import examples
from tests.support.token_sources import TextSource, numbered_sources

quickly = examples(80)


@dataclass(frozen=True)
class Case:
    """Corpora, given as document lengths by block, and a run over them."""

    corpora: dict[str, list[list[int]]]
    weights: dict[str, float]
    num_lanes: int
    tgt_len: int
    shuffle: Any
    seed: int

    @cached_property
    def sources(self) -> dict[str, TextSource]:
        return numbered_sources(self.corpora)

    @property
    def tokens(self) -> dict[str, int]:
        return {name: sum(map(sum, blocks)) for name, blocks in self.corpora.items()}

    @cached_property
    def share(self) -> dict[str, int]:
        return tokens_per_epoch(self.tokens, self.weights)

    def mixed(self) -> MixedSource:
        return MixedSource(
            [
                CyclicCorpus(
                    source, tokens_per_epoch=self.share[name], ordering=ORDERINGS[self.shuffle],
                    seed=self.seed, key=number,
                )
                for number, (name, source) in enumerate(self.sources.items())
            ]
        )  # fmt: skip

    def read_lanes(self, num_epochs: int) -> list[np.ndarray]:
        """Inputs and ages of all lanes, each [num_lanes, num_positions]."""
        num_tokens = sum(self.tokens.values())
        plan = LanePlan(num_tokens=num_tokens, num_lanes=self.num_lanes, tgt_len=self.tgt_len)
        reader = SegmentReader(
            self.mixed(), plan, lanes=range(self.num_lanes),
            reset="document", ordering=ORDERINGS[self.shuffle], seed=self.seed,
        )  # fmt: skip
        read = reader.read(0, -(-num_epochs * plan.lane_tokens // self.tgt_len))
        return [np.concatenate([getattr(x, name) for x in read], 1) for name in ("input", "age")]

    def read_epoch(self, epoch: int) -> list[int]:
        """Tokens of one epoch in the order of its parts, read directly from the source."""
        source = self.mixed().epoch(epoch)
        parts = [source.read(b, 0, int(n)) for b, n in enumerate(source.block_tokens)]
        return np.concatenate(parts).tolist()

    def corpus_of(self, token: int) -> str:
        ends = np.cumsum(list(self.tokens.values()))
        return list(self.corpora)[int(np.searchsorted(ends, token, side="right"))]


blocks = st.lists(st.integers(1, 9), min_size=1, max_size=4)
corpora = st.lists(st.lists(blocks, min_size=1, max_size=6), min_size=1, max_size=4)
weights = st.floats(0.01, 100.0)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    contents = dict(zip("abcd", draw(corpora.filter(_has_two_tokens)), strict=False))
    num_tokens = sum(sum(map(sum, lengths)) for lengths in contents.values())
    case = Case(
        corpora=contents,
        weights={name: draw(weights) for name in contents},
        num_lanes=draw(st.integers(1, min(5, num_tokens // 2))),
        tgt_len=draw(st.integers(1, 7)),
        shuffle=draw(st.sampled_from(["blocks", "none"])),
        seed=draw(st.integers(0, 2**63 - 1)),
    )
    try:
        assert case.share
    except ConfigError:  # a share of less than one token
        even = dict.fromkeys(contents, 1.0)
        case = replace(case, weights=even)
    return case


def _has_two_tokens(contents: list[list[list[int]]]) -> bool:
    return sum(sum(map(sum, lengths)) for lengths in contents) >= 2 * len(contents)


# --- the content of an epoch ---------------------------------------------------------------------


@quickly
@given(case=cases(), epoch=st.integers(0, 9))
def test_the_share_of_each_corpus_is_exact_to_one_token(case: Case, epoch: int) -> None:
    tokens = case.read_epoch(epoch)
    assert len(tokens) == sum(case.tokens.values())
    counts = Counter(map(case.corpus_of, tokens))
    for name, weight in case.weights.items():
        expected = len(tokens) * weight / sum(case.weights.values())
        assert abs(counts[name] - expected) < 1 + 1e-6 * expected
        assert counts[name] == case.share[name]


@quickly
@given(case=cases(), epoch=st.integers(0, 3))
def test_weights_equal_to_the_sizes_read_every_token_once_per_epoch(case: Case, epoch: int) -> None:
    weights = {name: 7.0 * tokens for name, tokens in case.tokens.items()}
    plain = replace(case, weights=weights)
    assert sorted(plain.read_epoch(epoch)) == list(range(sum(case.tokens.values())))
    num_blocks = sum(map(len, case.corpora.values()))
    assert len(plain.mixed().epoch(epoch).block_tokens) == num_blocks, "no block is cut"


@quickly
@given(case=cases(), epoch=st.integers(0, 3))
def test_documents_of_a_part_start_at_document_starts_or_at_the_cut(case: Case, epoch: int) -> None:
    source = case.mixed().epoch(epoch)
    true_starts = {doc[0] for each in case.sources.values() for doc in each.documents}
    for part, num_tokens in enumerate(source.block_tokens.tolist()):
        tokens = source.read(part, 0, num_tokens).tolist()
        expected = [i for i, token in enumerate(tokens) if i == 0 or token in true_starts]
        assert source.document_starts(part).tolist() == expected


def test_without_a_shuffle_corpora_alternate_evenly() -> None:
    lengths = {"a": [[2]] * 8, "b": [[2]] * 8}
    case = Case(lengths, {"a": 3.0, "b": 1.0}, 1, 1, "none", 0)
    read = "".join(case.corpus_of(token) for token in case.read_epoch(0)[::2])
    assert read.count("a") == 12
    assert all("b" in read[i : i + 5] and "aa" in read[i : i + 5] for i in range(12))


# --- lanes --------------------------------------------------------------------------------------


@quickly
@given(case=cases())
def test_memory_covers_consecutive_tokens_of_one_document_only(case: Case) -> None:
    inputs, ages = case.read_lanes(2)
    for row_inputs, row_ages in zip(inputs.tolist(), ages.tolist(), strict=True):
        for i, age in enumerate(row_ages):
            seen = row_inputs[i - age : i + 1]
            assert all(b == a + 1 for a, b in pairwise(seen)), "tokens are numbered in text order"


# --- limits -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("weights", "message"),
    [({"a": 1e-9, "b": 1.0}, "a.weight=1e-09 is not one token"),
     ({"a": 1e6, "b": 1.0}, "a.weight=1000000.0 would read its 2 tokens")],
)  # fmt: skip
def test_an_invalid_weight_is_refused(weights: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        tokens_per_epoch({"a": 2, "b": 10_000_000}, weights)
