"""Segments: an endless stream of the tokens each step reads, starting at any lane position.

`SegmentReader` cuts segments for some lanes of a plan, on call. `SegmentStream` does so ahead of
its consumer, in one thread, and is the source of a WebDataset pipeline:

    stream = SegmentStream(source, plan, lanes=plan.lanes_of_rank(rank, num_ranks), ...)
    for segment in wds.DataPipeline(stream, *stages): ...

The whole reading state is `segment.next_position`: what was consumed, whatever was read ahead.

Source: segment-level recurrence, Dai et al. 2019, arXiv:1901.02860, section 3.2. The paper's code
lets a lane's memory run on into the next document (`reset: stream`); `age` is what prevents it.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from data_pipeline.streams.cursor import LaneCursor, rising_ages
from data_pipeline.streams.lanes import LanePlan, Span
from data_pipeline.streams.mixture import MixedSource, source_of_epoch
from data_pipeline.streams.order import EpochOrder, Shuffle

if TYPE_CHECKING:
    from data_pipeline.shards.shard_reader import TokenSource

Reset = Literal["document", "stream"]

IGNORED = -1
"""A target that is not scored."""
GROUP_TOKENS = 1 << 16
"""About what is read in one go: enough to pay for the calls, small enough for the CPU's cache."""
CLOSE_TIMEOUT_SECONDS = 5.0
"""How long `close` waits for a read that hangs; its thread then dies with the process."""


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """What one step reads: B rows (lanes, then padding) of T = tgt_len tokens."""

    input: NDArray[np.int64]
    """[B, T] token ids; 0 in rows of padding."""
    target: NDArray[np.int64]
    """[B, T] the next token of the lane; IGNORED at a slice's end and in rows of padding."""
    age: NDArray[np.int32]
    """[B, T] tokens since the latest of the start of the lane's slice and, under reset `document`,
    of the document. Key j is visible to query i only if i - j <= age(i)."""
    position: int
    """Lane position of the first token."""
    next_position: int
    """Lane position of the next segment; all there is to save."""


class _Epoch(NamedTuple):
    source: TokenSource
    order: EpochOrder


class SegmentReader:
    """Cuts segments of some lanes. Moving forwards is fast, a jump costs one chunk a lane."""

    def __init__(
        self,
        source: TokenSource | MixedSource,
        plan: LanePlan,
        *,
        lanes: Sequence[int],
        num_rows: int,
        reset: Reset,
        shuffle: Shuffle,
        seed: int,
    ) -> None:
        num_tokens = int(source_of_epoch(source, plan.first_epoch).block_tokens.sum())
        if plan.num_tokens != num_tokens:
            raise ValueError(f"plan for {plan.num_tokens:,} tokens, source of {num_tokens:,}")
        if not all(0 <= lane < plan.num_lanes for lane in lanes) or num_rows < len(lanes):
            raise ValueError(
                f"lanes={lanes} must be in 0 .. {plan.num_lanes - 1} and fit num_rows={num_rows}"
            )
        self._source, self._plan = source, plan
        self._reset, self._shuffle, self._seed = reset, shuffle, seed
        self.num_rows = num_rows
        self._starts = [plan.slice_start(lane) for lane in lanes]
        self._cursors = [LaneCursor() for _ in lanes]
        self._epochs: dict[int, _Epoch] = {}

    def read(self, position: int, num_segments: int) -> list[Segment]:
        """The next `num_segments` segments from lane position `position` on.

        One pass over the lanes for all of them: most of a short segment's cost is the calls.
        """
        num_rows, tgt_len = self.num_rows, self._plan.tgt_len
        stop = position + num_segments * tgt_len
        shape_KBT = (num_segments, num_rows, tgt_len)
        shape_KT = (num_segments, tgt_len)
        input_KBT, target_KBT = np.empty(shape_KBT, np.int64), np.empty(shape_KBT, np.int64)
        age_KBT = np.empty(shape_KBT, np.int32)

        slice_age_KT = self._slice_age(position, stop).reshape(shape_KT)
        # One token more than the inputs, for the last target.
        spans = self._plan.spans(position, stop + 1)
        epochs = self._epochs_of(spans)
        for row in range(len(self._cursors)):
            tokens, document_age = self._read_lane(row, spans, epochs)
            input_KBT[:, row] = tokens[:-1].reshape(shape_KT)
            target_KBT[-1, row, -1] = tokens[-1]
            if self._reset == "document":
                np.minimum(document_age[:-1].reshape(shape_KT), slice_age_KT, out=age_KBT[:, row])
            else:
                age_KBT[:, row] = slice_age_KT

        # Shifted whole: to widen the tokens a second time would cost more than the copy.
        target_KBT[:, :, :-1] = input_KBT[:, :, 1:]
        target_KBT[:-1, :, -1] = input_KBT[1:, :, 0]
        ends = np.asarray(self._plan.slice_ends(position, stop), np.int64) - position
        target_KBT[ends // tgt_len, :, ends % tgt_len] = IGNORED
        padding = slice(len(self._cursors), None)
        input_KBT[:, padding], target_KBT[:, padding], age_KBT[:, padding] = 0, IGNORED, 0
        return [
            Segment(input_BT, target_BT, age_BT, first, first + tgt_len)
            for input_BT, target_BT, age_BT, first in zip(
                input_KBT, target_KBT, age_KBT, range(position, stop, tgt_len), strict=True
            )
        ]

    def _read_lane(
        self, row: int, spans: list[Span], epochs: list[_Epoch]
    ) -> tuple[NDArray[Any], NDArray[np.int32]]:
        """Tokens and document ages of one row's lane, over neighbouring spans."""
        cursor, slice_start = self._cursors[row], self._starts[row]
        runs = [
            cursor.read(*epoch, slice_start + span.start, slice_start + span.stop)
            for span, epoch in zip(spans, epochs, strict=True)
        ]
        if len(runs) == 1:
            return runs[0]
        tokens, ages = zip(*runs, strict=True)
        return np.concatenate(tokens), np.concatenate(ages)

    def _slice_age(self, start: int, stop: int) -> NDArray[np.int32]:
        """Tokens since the slice's start at lane positions [start, stop), the same in all lanes."""
        ages = [rising_ages(span.start, span.stop) for span in self._plan.spans(start, stop)]
        return ages[0] if len(ages) == 1 else np.concatenate(ages)

    def _epochs_of(self, spans: list[Span]) -> list[_Epoch]:
        """The epoch of each span. Keeps those it returns, mostly one, for the next call."""
        self._epochs = {
            span.epoch: self._epochs.get(span.epoch) or self._open_epoch(span.epoch)
            for span in spans
        }
        return list(self._epochs.values())

    def _open_epoch(self, epoch: int) -> _Epoch:
        source = source_of_epoch(self._source, epoch)
        order = EpochOrder.of(
            source.block_tokens, seed=self._seed, epoch=epoch, shuffle=self._shuffle
        )
        return _Epoch(source, order)


class SegmentStream:
    """Segments of some lanes from `position` on, for ever, read ahead by one thread.

    `num_rows` (default: one a lane) adds rows of padding. `prefetch_segments` bounds what is read
    ahead; it changes no number. An exception of the thread is raised by `next`, at the segment it
    prevented or a few before. The thread ends with `close`, which also happens when the stream
    leaves a `with`, is garbage collected or the process exits. Iterating again, as a pipeline with
    repetitions does, goes on where it stopped. For one consumer; `source` may be shared if it says
    so.
    """

    def __init__(
        self,
        source: TokenSource | MixedSource,
        plan: LanePlan,
        *,
        lanes: Sequence[int],
        num_rows: int | None = None,
        reset: Reset = "document",
        shuffle: Shuffle = "blocks",
        seed: int = 0,
        position: int = 0,
        prefetch_segments: int = 4,
    ) -> None:
        if position < plan.start or prefetch_segments < 1:
            raise ValueError(
                f"{position=} must be at least {plan.start}, {prefetch_segments=} at least 1"
            )
        self._reader = SegmentReader(
            source,
            plan,
            lanes=lanes,
            num_rows=len(lanes) if num_rows is None else num_rows,
            reset=reset,
            shuffle=shuffle,
            seed=seed,
        )
        self._position = position
        segment_tokens = max(1, self._reader.num_rows) * plan.tgt_len
        self._group_segments = max(1, min(GROUP_TOKENS // segment_tokens, prefetch_segments))
        self._channel = _Channel(num_groups=prefetch_segments // self._group_segments)
        self._group: list[Segment] = []
        self._failure: BaseException | None = None
        self._finalizer: weakref.finalize | None = None

    @property
    def position(self) -> int:
        """Lane position of the segment that `next` returns, whatever was read ahead of it."""
        return self._position

    def __iter__(self) -> Self:
        return self

    def __call__(self) -> Self:
        """What `wds.DataPipeline` calls to open its source."""
        return self

    def __next__(self) -> Segment:
        if not self._group:
            self._group = self._next_group()
        segment = self._group.pop()
        self._position = segment.next_position
        return segment

    def _next_group(self) -> list[Segment]:
        if self._failure is not None:
            raise self._failure
        if self._channel.closed:
            raise ValueError("the segment stream is closed; open another at its position")
        if self._finalizer is None:
            self._start()
        group = self._channel.filled.get()
        self._channel.free.put(None)
        if isinstance(group, BaseException):
            self._failure = group
            raise group
        return group[::-1]

    def _start(self) -> None:
        # The thread must hold no reference to the stream, or the stream would never be collected.
        thread = threading.Thread(
            target=_read_ahead,
            args=(self._reader, self._position, self._group_segments, self._channel),
            name="segment-stream",
            daemon=True,
        )
        thread.start()
        self._finalizer = weakref.finalize(self, _end_thread, thread, self._channel)
        if self._channel.closed:  # by another thread or a signal handler, too early to see it
            self._finalizer()

    def close(self) -> None:
        """End the thread. `next` then raises ValueError; `position` still says where to go on."""
        self._group = []
        self._channel.closed = True
        if self._finalizer is not None:
            self._finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class _Channel:
    """What the reading thread and the consumer share.

    Two SimpleQueues and a flag rather than one bounded Queue: their `put` may be called while the
    same thread is inside another call to them, as a finalizer run by the garbage collector does.
    """

    def __init__(self, num_groups: int) -> None:
        self.filled: SimpleQueue[list[Segment] | BaseException] = SimpleQueue()
        self.free: SimpleQueue[None] = SimpleQueue()
        self.closed = False
        for _ in range(num_groups):
            self.free.put(None)


def _read_ahead(reader: SegmentReader, position: int, num_segments: int, channel: _Channel) -> None:
    try:
        while True:
            channel.free.get()
            if channel.closed:
                return
            group = reader.read(position, num_segments)
            position = group[-1].next_position
            channel.filled.put(group)
    except BaseException as error:  # raised again where someone can see it
        channel.filled.put(error)


def _end_thread(thread: threading.Thread, channel: _Channel) -> None:
    channel.closed = True
    channel.free.put(None)  # wakes the thread
    channel.filled.put(ValueError("the segment stream was closed while it was read"))
    if thread is not threading.current_thread():
        thread.join(CLOSE_TIMEOUT_SECONDS)
