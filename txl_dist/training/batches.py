"""Opens the batches that a rank reads, and copies them to its device while a step is computed."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass, fields
from functools import partial
from typing import Self

import torch
from torch import Tensor

from data_pipeline.streams.segment_stream import SegmentStream, pipeline
from data_pipeline.streams.segments import Batch, Segment, in_turns
from txl_dist.config.run_config import RunConfig
from txl_dist.model.devices import to_device
from txl_dist.runtime.world import World
from txl_dist.training.data import TrainingData
from txl_dist.training.state import TrainState

DATA_TIMEOUT_SHARE = 0.9
"""Time limit for one read of the data, as a fraction of training.rank_timeout_seconds."""
PREFETCH_SEGMENTS = 16
"""Size of the queue of segments that a reader thread fills."""


class Batches:
    """The batches of `num_rows` rows of a rank's lanes. Close it: a thread reads ahead."""

    def __init__(
        self, data: TrainingData, config: RunConfig, world: World, *, num_rows: int
    ) -> None:
        self._data, self._config, self._device = data, config, world.device
        self._lanes = data.plan.lanes_of_rank(world.rank, world.num_ranks)
        self._num_rows = num_rows
        self._streams = ExitStack()  # at most one is open
        self._batches = DeviceBatches(iter(()), self._device, is_ready=lambda: False)

    def open_at(self, state: TrainState) -> None:
        """Continue with the batch that `state` reads next."""
        self.close()  # the stream of superseded steps
        stream, to_batches = self._open(state, turn=state.turn)
        self._streams.enter_context(closing(stream))
        self._batches = DeviceBatches(
            pipeline(stream, to_batches), self._device, is_ready=lambda: stream.has_segment
        )

    def close(self) -> None:
        self._streams.close()

    def read(self) -> "DeviceBatch":
        """The next batch. Raises the errors of `SegmentStream`."""
        return next(self._batches)

    def prefetch(self) -> None:
        """On a GPU, start to copy the next batch, if it has been read already."""
        if self._device.type != "cpu":
            self._batches.prefetch()

    def before(self, state: TrainState, *, num_segments: int) -> "list[DeviceBatch]":
        """The batches of the segments before the position of `state`, to replay them."""
        stream, to_batches = self._open(state, turn=0)
        with closing(stream):
            batches = to_batches(stream.segments_before(num_segments))
            return [DeviceBatch.of(batch, self._device) for batch in batches]

    def _open(
        self, state: TrainState, *, turn: int
    ) -> tuple[SegmentStream, Callable[[Iterable[Segment]], Iterator[Batch]]]:
        """The segments of the last phase of `state`, and the function that makes them batches."""
        config, phase = self._config, state.phases[-1]
        plan = self._data.plan_of(phase)
        stream = SegmentStream(
            self._data.source_of(phase, config),
            plan,
            lanes=self._lanes,
            reset=config.data.reset,
            ordering=config.data.ordering,
            seed=config.seed,
            position=state.position,
            prefetch_segments=PREFETCH_SEGMENTS,
            # Before the other ranks give up: then the error that ends the run names the file.
            timeout_seconds=DATA_TIMEOUT_SHARE * config.training.rank_timeout_seconds,
        )
        return stream, in_turns(plan, self._lanes, num_rows=self._num_rows, turn=turn)


@dataclass(frozen=True, slots=True, eq=False)
class DeviceBatch(Batch):
    """A batch whose input and ages are also on a device. Targets are used on the host only."""

    input_BT: Tensor
    age_BT: Tensor

    @classmethod
    def of(cls, batch: Batch, device: torch.device) -> Self:
        """Start the copies, for which the host does not wait; on a CPU, there are none."""
        return cls(
            **{field.name: getattr(batch, field.name) for field in fields(Batch)},
            input_BT=to_device(torch.from_numpy(batch.input), device),
            age_BT=to_device(torch.from_numpy(batch.age), device),
        )


class DeviceBatches:
    """The batches of `source` as DeviceBatches, the next one copied while a step is computed.

    `is_ready`: whether `next(source)` has a batch without waiting.
    """

    def __init__(
        self, source: Iterator[Batch], device: torch.device, *, is_ready: Callable[[], bool]
    ) -> None:
        self._source = map(partial(DeviceBatch.of, device=device), source)
        self._is_ready = is_ready
        self._next: DeviceBatch | Exception | None = None

    def prefetch(self) -> None:
        """Take the next batch and start its copies, if the stream has read it already."""
        if self._next is None and self._is_ready():
            try:
                self._next = next(self._source)
            except Exception as error:  # damaged data; the step that is running does not need it
                self._next = error

    def __next__(self) -> DeviceBatch:
        batch, self._next = self._next, None
        if isinstance(batch, Exception):
            raise batch
        return next(self._source) if batch is None else batch
