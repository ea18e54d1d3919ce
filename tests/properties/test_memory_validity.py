"""Promise 2, memory validity: the loss and gradient of a document depend on that document only.

The test reads a corpus twice, the second time with all other documents changed. The nats and
gradients of the chosen document must be bit for bit the same. They would differ if any layer saw a
token of another document, because an invisible token has a weight of exactly 0.
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from data_pipeline.streams.lanes import LanePlan
from data_pipeline.streams.order import Ordering
from data_pipeline.streams.segments import Reset, Segment, SegmentReader
from tests.support.attention_implementations import TORCH_IMPLEMENTATIONS
from tests.support.hypothesis_examples import examples
from tests.support.running_mean import KINDS
from tests.support.small_models import VOCAB_SIZE, small_model
from tests.support.token_sources import OPENER, TextSource, random_corpus
from txl_dist.model.choices import DISTANCE_ENCODINGS


@dataclass(frozen=True)
class Case:
    """Document lengths per block, how the corpus is read, and options of the model."""

    lengths: list[list[int]]
    num_lanes: int
    tgt_len: int
    model: dict[str, Any]
    reset: Reset = "document"
    piece_len: int | None = None
    segments_per_step: int = 1

    def segments(self, source: TextSource) -> list[Segment]:
        """More segments than an epoch, so that they include the start of the next one."""
        num_tokens = sum(map(sum, self.lengths))
        plan = LanePlan(num_tokens=num_tokens, num_lanes=self.num_lanes, tgt_len=self.tgt_len)
        reader = SegmentReader(
            source,
            plan,
            lanes=range(self.num_lanes),
            reset=self.reset,
            ordering=Ordering.named("blocks", self.piece_len),
            seed=3,
        )
        return reader.read(0, plan.lane_tokens // self.tgt_len + 2)

    @property
    def numbered(self) -> TextSource:
        """The same corpus with the document's number as every token."""
        numbers = iter(range(1000))
        return TextSource(
            [[[next(numbers)] * length for length in block] for block in self.lengths]
        )

    def read(self, source: TextSource, document: int) -> tuple[list[Tensor], list[Tensor]]:
        """Nats of the document's tokens per segment, and the gradients of their sum."""
        model = small_model(**self.model)
        memory, nats = model.empty_memory(self.num_lanes), []
        segments = self.segments(source)
        size = self.segments_per_step
        for first in range(0, len(segments), size):
            step = segments[first : first + size]
            columns = (
                torch.from_numpy(np.concatenate([getattr(segment, name) for segment in step], 1))
                for name in ("input", "target", "age")
            )
            nats_BT, memory = model(*columns, memory, None, len(step))
            nats.extend(nats_BT.split(self.tgt_len, dim=1))
        numbers = self.segments(self.numbered)
        nats = [
            nats_BT[torch.from_numpy(number.input == document)]
            for nats_BT, number in zip(nats, numbers, strict=True)
        ]
        torch.cat(nats).sum().backward()
        # A step of one segment has no gradient of what is written for the next.
        gradients = [parameter.grad for parameter in model.parameters()]
        return nats, [gradient for gradient in gradients if gradient is not None]


def rewritten(source: TextSource, unchanged: int) -> TextSource:
    """Other tokens in all documents but one. Every document still begins with OPENER."""
    documents = iter(range(1000))
    return TextSource(
        [
            [
                text
                if next(documents) == unchanged
                else [OPENER, *(token % (VOCAB_SIZE - 1) + 1 for token in text[1:])]
                for text in block
            ]
            for block in source.blocks
        ]
    )


def equal_bits(these: list[Tensor], those: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(these, those, strict=True))


def unaffected(case: Case, document: int) -> list[bool]:
    """Whether nats and gradients of a document are the same among other documents."""
    source = random_corpus(case.lengths, vocab_size=VOCAB_SIZE, seed=1)
    original, other = case.read(source, document), case.read(rewritten(source, document), document)
    return [equal_bits(*pair) for pair in zip(original, other, strict=True)]


document_lengths = st.lists(
    st.lists(st.one_of(st.integers(1, 4), st.integers(8, 14)), min_size=1, max_size=4),
    min_size=1,
    max_size=3,
).filter(lambda lengths: sum(map(sum, lengths)) >= 6)


def legal(options: dict) -> dict:
    """With `clamp_len` where the encoding needs it; `same_length` with the paper's memory only."""
    facts = DISTANCE_ENCODINGS[options["distance_encoding"]]
    same_length = options["same_length"] and options["memory"] == "recurrent"
    more = {"clamp_len": 4} if facts.needs_clamp_len else {}
    return options | more | {"same_length": same_length}


@examples(60)
@given(
    case=st.builds(
        Case,
        lengths=document_lengths,
        num_lanes=st.integers(1, 3),
        tgt_len=st.integers(1, 6),
        segments_per_step=st.integers(1, 4),
        piece_len=st.none() | st.integers(2, 7),
        model=st.fixed_dictionaries(
            {
                "n_layer": st.integers(1, 3),
                "mem_len": st.integers(1, 12),
                "memory": st.sampled_from(KINDS),
                "pre_lnorm": st.booleans(),
                "same_length": st.booleans(),
                "attention": st.sampled_from(TORCH_IMPLEMENTATIONS),
                "distance_encoding": st.sampled_from(
                    [name for name, facts in DISTANCE_ENCODINGS.items() if facts.allows_memory]
                ),
            }
        ).map(legal),
    ),
    data=st.data(),
)
def test_no_document_sees_another(case: Case, data: st.DataObject) -> None:
    document = data.draw(st.integers(0, sum(map(len, case.lengths)) - 1), label="document")
    assert unaffected(case, document) == [True, True]


SHORT_DOCUMENTS = Case(
    lengths=[[3, 2, 4, 3, 5, 2]],
    num_lanes=1,
    tgt_len=4,
    model={"n_layer": 2, "mem_len": 9},  # reaches over three documents
)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("document", range(6))
@pytest.mark.parametrize("segments_per_step", [1, 3])
def test_no_document_sees_another_in_a_memory_of_several(
    document: int, kind: str, segments_per_step: int
) -> None:
    model = SHORT_DOCUMENTS.model | {"memory": kind}
    case = replace(SHORT_DOCUMENTS, model=model, segments_per_step=segments_per_step)
    assert unaffected(case, document) == [True, True]


@pytest.mark.slow
def test_no_document_sees_another_in_the_kernels_for_gpus() -> None:
    """In triton's interpreter. Its own test, because hypothesis would take minutes."""
    case = replace(SHORT_DOCUMENTS, model={"n_layer": 2, "mem_len": 5, "attention": "triton"})
    assert unaffected(case, document=3) == [True, True]


@pytest.mark.parametrize("kind", KINDS)
def test_without_document_ages_documents_see_one_another(kind: str) -> None:
    """Checks the test above: with `reset: stream`, losses and gradients do differ."""
    model = SHORT_DOCUMENTS.model | {"memory": kind}
    case = replace(SHORT_DOCUMENTS, model=model, reset="stream")
    for document in range(6):
        assert unaffected(case, document) == [False, False]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("reset", ["document", "stream"])
def test_a_lane_sees_nothing_of_the_epoch_before(reset: Reset, kind: str) -> None:
    """The second epoch has the same nats as with an empty memory."""
    model = {"mem_len": 6, "memory": kind}
    case = Case([[9], [7]], num_lanes=2, tgt_len=4, model=model, reset=reset)
    segments = case.segments(random_corpus(case.lengths, vocab_size=VOCAB_SIZE, seed=1))
    model = small_model(**case.model)
    epoch_start = 2  # a slice of 8 tokens is two segments
    nats_from = {}
    for first in (0, epoch_start):
        memory, nats_from[first] = model.empty_memory(2), []
        for segment in segments[first:]:
            columns = map(torch.from_numpy, (segment.input, segment.target, segment.age))
            nats_BT, memory = model(*columns, memory)
            nats_from[first].append(nats_BT)
    assert equal_bits(nats_from[0][epoch_start:], nats_from[epoch_start])
    assert len(nats_from[epoch_start]) == 2
