"""Copies the next segment to a GPU while the GPU computes a step.

A thin stage between the stream of segments and the step. It exists only on GPUs: on a CPU, the step
reads the arrays of the stream itself.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from typing import Self

import torch
from torch import Tensor

from data_pipeline.streams.segments import Segment
from txl_dist.model.host_copies import to_device

# Shapes: B rows, T segment tokens


@dataclass(frozen=True, slots=True, eq=False)
class DeviceSegment(Segment):
    """A segment whose input and ages are also on a device. Targets are used on the host only."""

    input_BT: Tensor
    age_BT: Tensor

    @classmethod
    def of(cls, segment: Segment, device: torch.device) -> Self:
        """Start the copies; the host does not wait for them."""
        return cls(
            **{field.name: getattr(segment, field.name) for field in fields(Segment)},
            input_BT=to_device(torch.from_numpy(segment.input), device),
            age_BT=to_device(torch.from_numpy(segment.age), device),
        )


class DeviceSegments:
    """The segments of `source` as DeviceSegments. `is_ready`: whether `next(source)` has one."""

    def __init__(
        self, source: Iterator[Segment], device: torch.device, *, is_ready: Callable[[], bool]
    ) -> None:
        self._source, self._device, self._is_ready = source, device, is_ready
        self._next: DeviceSegment | Exception | None = None

    def prefetch(self) -> None:
        """Take the next segment and start its copies, if the stream has read it already."""
        if self._next is None and self._is_ready():
            try:
                self._next = self._take()
            except Exception as error:  # damaged data; the step that is running does not need it
                self._next = error

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> DeviceSegment:
        segment, self._next = self._next, None
        if isinstance(segment, Exception):
            raise segment
        return self._take() if segment is None else segment

    def _take(self) -> DeviceSegment:
        return DeviceSegment.of(next(self._source), self._device)
