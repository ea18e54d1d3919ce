"""The segment stream: an example by hand, its thread's life, its errors, and what a seek costs.

That it reads the right tokens in every case is tests/properties/test_contiguity.py.
"""

import gc
import itertools
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import webdataset as wds
from numpy.testing import assert_array_equal

from data_pipeline.errors import DataError
from data_pipeline.shards.manifest import ShardManifest
from data_pipeline.shards.shard_reader import open_split
from data_pipeline.streams import cursor
from data_pipeline.streams.cursor import read_range
from data_pipeline.streams.lanes import LanePlan
from data_pipeline.streams.segment_stream import SegmentStream
from data_pipeline.streams.segments import IGNORED, Segment, SegmentReader


class MemorySource:
    """Tokens 0, 1, 2, ... in blocks of documents; counts what is read, fails where told to."""

    dtype = np.dtype(np.uint32)

    def __init__(self, *blocks: list[int], broken_block: int | None = None) -> None:
        self.blocks, self.broken_block = blocks, broken_block
        self.block_tokens = np.array([sum(block) for block in blocks], np.int64)
        self.first = np.cumsum(self.block_tokens) - self.block_tokens
        self.reads: list[tuple[int, int, int]] = []

    def document_starts(self, block: int) -> np.ndarray:
        return np.cumsum([0, *self.blocks[block][:-1]])

    def read(self, block: int, start: int, stop: int) -> np.ndarray:
        self.reads.append((block, start, stop))
        if block == self.broken_block:
            raise DataError(f"block {block} is broken")
        return np.arange(self.first[block] + start, self.first[block] + stop, dtype=self.dtype)


def plan_of(source: MemorySource, num_lanes: int, tgt_len: int) -> LanePlan:
    num_tokens = int(source.block_tokens.sum())
    return LanePlan(num_tokens=num_tokens, num_lanes=num_lanes, tgt_len=tgt_len)


def stream_of(
    source: MemorySource, *, num_lanes: int = 2, tgt_len: int = 4, **options: Any
) -> SegmentStream:
    options = {"lanes": range(num_lanes), **options}
    return SegmentStream(source, plan_of(source, num_lanes, tgt_len), **options)


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "segment-stream"]


@pytest.fixture(autouse=True)
def _no_thread_is_left_behind() -> Iterator[None]:
    yield
    gc.collect()
    assert threads() == []


# --- values -------------------------------------------------------------------------------------


def test_an_epoch_of_two_lanes_by_hand() -> None:
    source = MemorySource([3, 2], [5, 3])  # 13 tokens: lanes read 0 .. 5 and 6 .. 11
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
    with stream_of(MemorySource([3, 2], [5, 3]), reset="stream") as stream:
        first, second = itertools.islice(stream, 2)
    assert_array_equal(first.age, [[0, 1, 2, 3]] * 2)
    assert_array_equal(second.age, [[4, 5, 0, 1]] * 2)


def test_arrays_are_ready_for_torch() -> None:
    with stream_of(MemorySource([40])) as stream:
        segment = next(stream)
    for array, dtype in ((segment.input, "int64"), (segment.target, "int64"), (segment.age, "i4")):
        assert array.dtype == np.dtype(dtype)
        assert array.flags.c_contiguous
        assert array.flags.writeable


def test_a_range_of_the_split_keeps_ages_from_before_its_start() -> None:
    source = MemorySource([3, 2], [5, 3])
    tokens, document_age = read_range(source, 1, 9)
    assert tokens.tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
    assert document_age.tolist() == [1, 2, 0, 1, 0, 1, 2, 3]
    with pytest.raises(ValueError, match="not a range of 13 tokens"):
        read_range(source, 1, 14)


@pytest.mark.parametrize("shuffle", ["blocks", "none"])
def test_an_epoch_of_real_shards_is_every_document_whole(
    dataset: tuple[Path, ShardManifest], shuffle: Any
) -> None:
    directory, manifest = dataset
    source = open_split(directory, "train", manifest=manifest)
    tokens, document_age = read_range(source, 0, source.num_tokens)
    assert (tokens[document_age == 0] == manifest.end_of_document).all()

    plan = LanePlan(num_tokens=source.num_tokens, num_lanes=1, tgt_len=64)
    with SegmentStream(source, plan, lanes=range(1), shuffle=shuffle) as stream:
        read = list(itertools.islice(stream, -(-source.num_tokens // 64)))
    read_tokens = np.concatenate([s.input[0] for s in read])[: source.num_tokens]
    read_age = np.concatenate([s.age[0] for s in read])[: source.num_tokens]
    stored, found = documents_of(tokens, document_age), documents_of(read_tokens, read_age)
    assert sorted(found) == sorted(stored)
    assert (found == stored) is (shuffle == "none")


def documents_of(tokens: np.ndarray, age: np.ndarray) -> list[list[int]]:
    return [part.tolist() for part in np.split(tokens, np.flatnonzero(age == 0)[1:])]


# --- what a seek costs --------------------------------------------------------------------------


@pytest.mark.parametrize("shuffle", ["blocks", "none"])
def test_a_seek_anywhere_reads_a_block_a_lane(shuffle: Any) -> None:
    source = MemorySource(*[[60, 40]] * 500)
    plan = plan_of(source, num_lanes=3, tgt_len=8)
    reader = SegmentReader(
        source, plan, lanes=range(3), num_rows=3, reset="document", shuffle=shuffle, seed=1
    )
    for position in (0, 16_000, 90_000_003, 5):
        source.reads.clear()
        reader.read(position, 1)
        assert len(source.reads) <= 2 * plan.num_lanes, "a block, or two where a segment meets both"


def test_a_giant_document_is_read_in_bounded_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cursor, "CHUNK_TOKENS", 100)
    source = MemorySource([10_000])
    with stream_of(source, num_lanes=1, tgt_len=32, position=5_040) as stream:
        read = np.concatenate([s.input[0] for s in itertools.islice(stream, 100)])
    assert_array_equal(read, np.arange(5_040, 5_040 + 3_200))
    assert source.reads[0] == (0, 5_040, 5_100)
    assert max(stop - start for _, start, stop in source.reads) == 100
    assert len(source.reads) == len(set(source.reads)), "nothing is read twice"


def test_reading_on_reads_every_block_once() -> None:
    source = MemorySource(*[[60, 40]] * 50)
    with stream_of(source, num_lanes=1, tgt_len=8) as stream:
        list(itertools.islice(stream, 5000 // 8 - 10))
    blocks = [block for block, _, _ in source.reads]
    assert len(blocks) == len(set(blocks))


# --- the thread ---------------------------------------------------------------------------------


def test_position_is_what_was_consumed_not_what_was_read_ahead() -> None:
    with stream_of(MemorySource([1000]), prefetch_segments=64, position=12) as stream:
        assert stream.position == 12
        for step in range(1, 4):
            segment = next(stream)
            assert stream.position == segment.next_position == 12 + 4 * step


@pytest.mark.parametrize("prefetch_segments", [1, 2, 7])
def test_no_more_is_read_ahead_than_twice_what_was_asked(prefetch_segments: int) -> None:
    source = MemorySource(*[[4]] * 1000)
    with stream_of(
        source, num_lanes=1, shuffle="none", prefetch_segments=prefetch_segments
    ) as stream:
        next(stream)
        time.sleep(0.05)
        # One block a segment, and the one that holds the last target.
        assert len(source.reads) <= 2 * prefetch_segments + 1


def test_an_error_of_the_thread_is_raised_where_it_matters_and_again() -> None:
    source = MemorySource([8], [8], [8], broken_block=2)
    with stream_of(source, num_lanes=1, shuffle="none", prefetch_segments=1) as stream:
        read = [next(stream) for _ in range(3)]
        for _ in range(2):
            with pytest.raises(DataError, match="block 2 is broken"):
                next(stream)
        assert stream.position == read[-1].next_position == 12
        while threads():
            time.sleep(0.001)


@pytest.mark.parametrize("num_segments", [0, 1, 5])
def test_close_ends_the_thread_at_once_and_keeps_the_position(num_segments: int) -> None:
    stream = stream_of(MemorySource([1000]), prefetch_segments=2)
    list(itertools.islice(stream, num_segments))
    start = time.monotonic()
    stream.close()
    stream.close()
    assert time.monotonic() - start < 1
    assert threads() == []
    assert stream.position == 4 * num_segments
    with pytest.raises(ValueError, match="closed"):
        next(stream)


def test_closing_wakes_a_consumer_that_waits() -> None:
    waits = threading.Event()

    class Slow(MemorySource):
        def read(self, block: int, start: int, stop: int) -> np.ndarray:
            assert waits.wait(5)
            return super().read(block, start, stop)

    stream = stream_of(Slow([1000]))
    raised: list[BaseException] = []

    def consume() -> None:
        try:
            for _ in stream:
                pass
        except ValueError as error:
            raised.append(error)

    consumer = threading.Thread(target=consume, daemon=True)
    consumer.start()
    threading.Timer(0.05, waits.set).start()
    stream.close()
    consumer.join(5)
    assert "closed" in str(raised[0])


def test_closing_while_the_thread_starts_is_not_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = stream_of(MemorySource([1000]))
    start = threading.Thread.start

    def close_and_start(thread: threading.Thread) -> None:
        stream.close()
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", close_and_start)
    with pytest.raises(ValueError, match="closed"):
        next(stream)


def test_a_forgotten_stream_ends_its_thread() -> None:
    stream = stream_of(MemorySource([1000]))
    next(stream)
    stream.cycle = stream  # type: ignore[attr-defined]
    assert len(threads()) == 1
    del stream
    gc.collect()
    assert threads() == []


def test_a_process_exits_with_a_stream_open() -> None:
    program = """
import itertools, sys
sys.path.insert(0, sys.argv[1])
from test_segments import MemorySource, stream_of
stream = stream_of(MemorySource(*[[60, 40]] * 500), prefetch_segments=3)
print(sum(1 for _ in itertools.islice(stream, 10)))
"""
    here = __file__.rsplit("/", 1)[0]
    ended = subprocess.run(
        [sys.executable, "-c", program, here],
        check=False,
        capture_output=True,
        text=True,
        timeout=20,
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "10\n", "")


# --- as a WebDataset source ---------------------------------------------------------------------


def test_a_webdataset_pipeline_runs_from_it_and_goes_on_where_it_stopped() -> None:
    def shifted(segments: Iterator[Segment]) -> Iterator[tuple[int, int]]:
        for segment in segments:
            yield segment.position, int(segment.input[0, 0]) + 1

    stream = stream_of(MemorySource([1000]), num_lanes=1)
    pipeline = wds.DataPipeline(stream, shifted, wds.map(lambda pair: pair))
    assert list(itertools.islice(pipeline, 3)) == [(0, 1), (4, 5), (8, 9)]
    assert list(itertools.islice(pipeline, 2)) == [(12, 13), (16, 17)]
    pipeline.close()
    assert threads() == []


# --- refusals -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"lanes": range(1, 3)}, "lanes="),
        ({"num_rows": 1}, "num_rows=1"),
        ({"position": -4}, "position=-4"),
        ({"prefetch_segments": 0}, "prefetch_segments=0"),
    ],
)
def test_what_cannot_be_meant_is_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        stream_of(MemorySource([1000]), **options)


def test_a_plan_for_other_data_is_refused() -> None:
    plan = LanePlan(num_tokens=999, num_lanes=2, tgt_len=4)
    with pytest.raises(ValueError, match=r"plan for 999 tokens, source of 1,000"):
        SegmentStream(MemorySource([1000]), plan, lanes=range(2))
