"""Segments: an example with every number written out, invalid arguments, and names of documents.

That the right tokens are read in every case is tests/properties/test_contiguity.py.
"""

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_array_equal

from data_pipeline.shards.manifest import ShardManifest, open_tokenizer
from data_pipeline.shards.shard_reader import TokenSource, open_split
from data_pipeline.streams.cursor import read_range
from data_pipeline.streams.lanes import LanePlan
from data_pipeline.streams.mixture import CyclicCorpus, MixedSource
from data_pipeline.streams.order import ORDERINGS
from data_pipeline.streams.segment_stream import SegmentStream
from data_pipeline.streams.segments import IGNORED, SegmentReader, documents_of_lanes
from tests.data_pipeline.streams.numbered_stream import stream_of
from tests.support.token_sources import NumberedSource, TextSource


def test_two_lanes_of_one_epoch_have_these_numbers() -> None:
    source = NumberedSource([3, 2], [5, 3])  # 13 tokens: lanes read 0 .. 5 and 6 .. 11
    with stream_of(source, num_rows=3, shuffle="none") as stream:
        first, second = itertools.islice(stream, 2)

    assert_array_equal(first.input, [[0, 1, 2, 3], [6, 7, 8, 9], [0, 0, 0, 0]])
    assert_array_equal(first.target, [[1, 2, 3, 4], [7, 8, 9, 10], [IGNORED] * 4])
    assert_array_equal(first.age, [[0, 1, 2, 0], [0, 1, 2, 3], [0, 0, 0, 0]])
    assert (first.position, first.next_position) == (0, 4)

    assert_array_equal(second.input, [[4, 5, 0, 1], [10, 11, 6, 7], [0, 0, 0, 0]])
    assert_array_equal(second.target, [[5, IGNORED, 1, 2], [11, IGNORED, 7, 8], [IGNORED] * 4])
    assert_array_equal(second.age, [[1, 0, 0, 1], [0, 1, 0, 1], [0, 0, 0, 0]])
    assert second.next_position == stream.position == 8


def test_reset_stream_counts_age_from_the_slice_only() -> None:
    with stream_of(NumberedSource([3, 2], [5, 3]), reset="stream") as stream:
        first, second = itertools.islice(stream, 2)
    assert_array_equal(first.age, [[0, 1, 2, 3]] * 2)
    assert_array_equal(second.age, [[4, 5, 0, 1]] * 2)


def test_arrays_have_the_dtypes_and_layout_that_torch_needs() -> None:
    with stream_of(NumberedSource([40])) as stream:
        segment = next(stream)
    for array, dtype in ((segment.input, "int64"), (segment.target, "int64"), (segment.age, "i4")):
        assert array.dtype == np.dtype(dtype)
        assert array.flags.c_contiguous
        assert array.flags.writeable


@pytest.mark.parametrize("shuffle", ["blocks", "none"])
def test_an_epoch_of_real_shards_contains_every_document_uncut(
    dataset: tuple[Path, ShardManifest], shuffle: Any
) -> None:
    directory, manifest = dataset
    source = open_split(directory, "train", manifest=manifest)
    tokens, document_age = read_range(source, 0, source.num_tokens)
    assert (tokens[document_age == 0] == manifest.end_of_document).all()

    plan = LanePlan(num_tokens=source.num_tokens, num_lanes=1, tgt_len=64)
    with SegmentStream(source, plan, lanes=range(1), ordering=ORDERINGS[shuffle]) as stream:
        read = list(itertools.islice(stream, -(-source.num_tokens // 64)))
    read_tokens = np.concatenate([s.input[0] for s in read])[: source.num_tokens]
    read_age = np.concatenate([s.age[0] for s in read])[: source.num_tokens]
    stored = documents_of(tokens, document_age)
    streamed = documents_of(read_tokens, read_age)
    assert sorted(streamed) == sorted(stored)
    assert (streamed == stored) is (shuffle == "none")


def documents_of(tokens: np.ndarray, age: np.ndarray) -> list[list[int]]:
    return [part.tolist() for part in np.split(tokens, np.flatnonzero(age == 0)[1:])]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lanes": range(1, 3)}, "lanes="),
        ({"num_rows": 1}, "num_rows=1"),
        ({"position": -4}, "position=-4"),
        ({"prefetch_segments": 0}, "prefetch_segments=0"),
    ],
)
def test_invalid_arguments_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        stream_of(NumberedSource([1000]), **options)


def test_a_plan_for_other_data_is_refused() -> None:
    plan = LanePlan(num_tokens=999, num_lanes=2, tgt_len=4)
    with pytest.raises(ValueError, match=r"plan for 999 tokens, source of 1,000"):
        SegmentStream(NumberedSource([1000]), plan, lanes=range(2))


LENGTHS = {"a": [[3, 5, 2], [9], [1, 1, 4]], "b": [[6, 2], [4, 3, 5]]}
POSITIONS = ((0, 3), (3, 9), (5, 17), (20, 29))


def numbered(lengths: list[list[int]], first: int) -> tuple[TextSource, list[tuple[int, str]]]:
    """A source whose tokens are numbers of documents, and the name of each number."""
    names: list[tuple[int, str]] = []
    blocks: list[list[list[int]]] = []
    for block, documents in enumerate(lengths):
        blocks.append([])
        for document, length in enumerate(documents):
            blocks[-1].append([first + len(names)] * length)
            names.append((0, f"block {block}, document {document}"))
    return TextSource(blocks), names


@pytest.mark.parametrize("shuffle", ["blocks", "none"])
@pytest.mark.parametrize("is_mixture", [False, True])
def test_documents_are_those_of_the_tokens_that_segments_hold(
    shuffle: str, is_mixture: bool
) -> None:
    source: TokenSource | MixedSource
    text_a, names = numbered(LENGTHS["a"], 0)
    source = text_a
    if is_mixture:
        text_b, names_b = numbered(LENGTHS["b"], len(names))
        names += [(1, name) for _, name in names_b]
        # Other shares than tokens: parts begin inside documents and blocks.
        shares = zip((text_a, text_b), (31, 14), strict=True)
        source = MixedSource(
            [
                CyclicCorpus(
                    text, tokens_per_epoch=share, ordering=ORDERINGS[shuffle], seed=5, key=key
                )
                for key, (text, share) in enumerate(shares)
            ]
        )
    plan = LanePlan(num_tokens=45 if is_mixture else 25, num_lanes=2, tgt_len=1)
    order: Any = {"ordering": ORDERINGS[shuffle], "seed": 5}
    reader = SegmentReader(source, plan, lanes=(0, 1), num_rows=2, reset="document", **order)
    for start, stop in POSITIONS:
        documents = documents_of_lanes(source, plan, lanes=(0, 1), start=start, stop=stop, **order)
        expected = np.concatenate([s.input for s in reader.read(start, stop - start)], axis=1)
        for lane in (0, 1):
            named = [d for d in documents if d.lane == lane]
            tokens = [(d.corpus, d.id) for d in named for _ in range(d.num_tokens)]
            assert tokens == [names[number] for number in expected[lane]]
            lengths = [d.num_tokens for d in named]
            assert [d.position for d in named] == [
                start + sum(lengths[:place]) for place in range(len(lengths))
            ]
            for document in named:
                (part,) = plan.epoch_ranges(document.position, document.position + 1)
                assert document.epoch == part.epoch


def test_ids_of_a_dataset_belong_to_the_text_at_their_positions(
    dataset: tuple[Path, ShardManifest],
) -> None:
    """One lane reads a whole epoch; every document begins with the number in its file's name."""
    directory, manifest = dataset
    source, tokenizer = open_split(directory, "train"), open_tokenizer(directory, manifest)
    plan = LanePlan(num_tokens=source.num_tokens, num_lanes=1, tgt_len=source.num_tokens)
    order: Any = {"ordering": ORDERINGS["blocks"], "seed": 1}
    reader = SegmentReader(source, plan, lanes=(0,), num_rows=1, reset="document", **order)
    (segment,) = reader.read(0, 1)
    documents = documents_of_lanes(
        source, plan, lanes=(0,), start=0, stop=plan.lane_tokens, **order
    )
    assert len(documents) == source.entry.documents > 3
    for document in documents:
        tokens = segment.input[0, document.position : document.position + document.num_tokens]
        name = Path(document.id).stem
        assert tokenizer.decode(tokens[1:]).startswith(f"[{int(name)}] ")
