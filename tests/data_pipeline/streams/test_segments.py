"""Segments: an example with every number written out, and invalid arguments.

That the right tokens are read in every case is tests/properties/test_contiguity.py.
"""

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_array_equal

from data_pipeline.shards.manifest import ShardManifest
from data_pipeline.shards.shard_reader import open_split
from data_pipeline.streams.cursor import read_range
from data_pipeline.streams.lanes import LanePlan
from data_pipeline.streams.order import ORDERINGS
from data_pipeline.streams.segment_stream import SegmentStream
from data_pipeline.streams.segments import IGNORED
from tests.data_pipeline.streams.numbered_stream import stream_of
from tests.support.token_sources import NumberedSource


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
