"""The segment stream: its position, its thread's lifetime, errors in the thread, and a pipeline."""

import gc
import itertools
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import webdataset as wds

from data_pipeline.errors import DataError
from data_pipeline.streams.segment_stream import pipeline
from data_pipeline.streams.segments import Segment
from tests.data_pipeline.streams.numbered_stream import stream_of
from tests.support.token_sources import NumberedSource


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "segment-stream"]


@pytest.fixture(autouse=True)
def _every_thread_ends() -> Iterator[None]:
    yield
    gc.collect()
    assert threads() == []


def test_position_counts_consumed_segments_not_prefetched_ones() -> None:
    with stream_of(NumberedSource([1000]), prefetch_segments=64, position=12) as stream:
        assert stream.position == 12
        for step in range(1, 4):
            segment = next(stream)
            assert stream.position == segment.next_position == 12 + 4 * step


@pytest.mark.parametrize("prefetch_segments", [1, 2, 7])
def test_at_most_twice_prefetch_segments_are_prefetched(prefetch_segments: int) -> None:
    source = NumberedSource(*[[4]] * 1000)
    with stream_of(
        source, num_lanes=1, shuffle="none", prefetch_segments=prefetch_segments
    ) as stream:
        next(stream)
        time.sleep(0.05)
        # One block a segment, and the one that holds the last target.
        assert len(source.reads) <= 2 * prefetch_segments + 1


def test_an_error_in_the_thread_is_raised_by_every_next_call() -> None:
    source = NumberedSource([8], [8], [8], broken_block=2)
    with stream_of(source, num_lanes=1, shuffle="none", prefetch_segments=1) as stream:
        read = [next(stream) for _ in range(3)]
        for _ in range(2):
            with pytest.raises(DataError, match="block 2 is broken"):
                next(stream)
        assert stream.position == read[-1].next_position == 12
        while threads():
            time.sleep(0.001)


@pytest.mark.parametrize("num_segments", [0, 1, 5])
def test_close_ends_the_thread_and_keeps_the_position(num_segments: int) -> None:
    stream = stream_of(NumberedSource([1000]), prefetch_segments=2)
    list(itertools.islice(stream, num_segments))
    start = time.monotonic()
    stream.close()
    stream.close()
    assert time.monotonic() - start < 1
    assert threads() == []
    assert stream.position == 4 * num_segments
    with pytest.raises(ValueError, match="closed"):
        next(stream)


def test_close_wakes_a_waiting_consumer() -> None:
    waits = threading.Event()

    class Slow(NumberedSource):
        def read(self, block: int, start: int, stop: int) -> np.ndarray:
            assert waits.wait(5)
            return super().read(block, start, stop)

    stream = stream_of(Slow([1000]))
    with ThreadPoolExecutor(1) as pool:
        consumed = pool.submit(deque, stream, maxlen=0)
        threading.Timer(0.05, waits.set).start()
        stream.close()
        with pytest.raises(ValueError, match="closed"):
            consumed.result(5)


def test_close_during_the_start_of_the_thread_has_effect(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = stream_of(NumberedSource([1000]))
    start = threading.Thread.start

    def close_and_start(thread: threading.Thread) -> None:
        stream.close()
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", close_and_start)
    with pytest.raises(ValueError, match="closed"):
        next(stream)


@pytest.mark.parametrize("num_segments", [0, 1, 3])
def test_the_segments_before_a_position_are_the_last_ones_that_were_read(num_segments: int) -> None:
    """Not the one that follows: a replay of it would put the future into the memory."""
    source = NumberedSource(*[[7]] * 30)
    with stream_of(source) as stream:
        read = list(itertools.islice(stream, 5))
    with stream_of(source, position=stream.position) as stream:
        before = stream.segments_before(num_segments)
    assert len(before) == num_segments
    for segment, expected in zip(before, read[5 - num_segments :], strict=True):
        assert segment.next_position == expected.next_position
        for name in ("input", "target", "age"):
            np.testing.assert_array_equal(getattr(segment, name), getattr(expected, name))


def test_garbage_collection_ends_the_thread() -> None:
    stream = stream_of(NumberedSource([1000]))
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
from tests.data_pipeline.streams.numbered_stream import NumberedSource, stream_of
stream = stream_of(NumberedSource(*[[60, 40]] * 500), prefetch_segments=3)
print(sum(1 for _ in itertools.islice(stream, 10)))
"""
    ended = subprocess.run(
        [sys.executable, "-c", program, str(Path(__file__).parents[3])],
        check=False,
        capture_output=True,
        text=True,
        timeout=20,
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "10\n", "")


def test_a_new_pipeline_continues_at_the_streams_position() -> None:
    def shifted(segments: Iterator[Segment]) -> Iterator[tuple[int, int]]:
        for segment in segments:
            yield segment.position, int(segment.input[0, 0]) + 1

    stages = shifted, wds.map(lambda pair: pair)
    with stream_of(NumberedSource([1000]), num_lanes=1) as stream:
        first = pipeline(stream, *stages)
        assert list(itertools.islice(first, 3)) == [(0, 1), (4, 5), (8, 9)]
        repeated = pipeline(stream, *stages)
        assert list(itertools.islice(repeated, 2)) == [(12, 13), (16, 17)]
