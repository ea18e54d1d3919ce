"""Segments on the device: the same ones in the same order, however they are prefetched."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from data_pipeline.errors import DataError
from data_pipeline.streams.segments import Segment
from txl_dist.training.device_segments import DeviceSegments

CPU = torch.device("cpu")


def stream(num_segments: int) -> Iterator[Segment]:
    for position in range(num_segments):
        row = np.full((2, 3), position)
        yield Segment(row, row + 1, row.astype(np.int32), position, position + 1)
    raise DataError("damaged")


@pytest.mark.parametrize("calls", [(0, 0, 0), (1, 1, 1), (2, 0, 1)], ids=str)
def test_no_segment_is_lost_or_read_twice(calls: tuple[int, ...]) -> None:
    """`calls` of prefetch before each segment."""
    segments = DeviceSegments(stream(3), CPU, is_ready=lambda: True)
    for position, num_calls in enumerate(calls):
        for _ in range(num_calls):
            segments.prefetch()
        segment = next(segments)
        assert segment.position == position
        assert torch.equal(segment.input_BT, torch.from_numpy(segment.input))
        assert torch.equal(segment.age_BT, torch.from_numpy(segment.age))


def test_a_segment_that_is_not_ready_is_not_waited_for() -> None:
    taken: list[int] = []

    def recorded() -> Iterator[Segment]:
        for segment in stream(2):
            taken.append(segment.position)
            yield segment

    segments = DeviceSegments(recorded(), CPU, is_ready=lambda: False)
    segments.prefetch()
    assert taken == []
    assert next(segments).position == 0


def test_an_error_of_the_stream_is_raised_at_its_segment() -> None:
    segments = DeviceSegments(stream(1), CPU, is_ready=lambda: True)
    assert next(segments).position == 0
    segments.prefetch()  # the step that is running must not fail
    with pytest.raises(DataError, match="damaged"):
        next(segments)
