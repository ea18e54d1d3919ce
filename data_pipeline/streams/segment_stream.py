"""SegmentStream: the endless stream of segments of one rank, prefetched by one thread.

The source of a WebDataset pipeline, whose last stage makes the batches of training:

    lanes = plan.lanes_of_rank(rank, num_ranks)
    stream = SegmentStream(source, plan, lanes=lanes, ...)
    for batch in pipeline(stream, in_turns(plan, lanes, ...)): ...

The complete reading state is `stream.position`, the lane position after the last segment that the
consumer received. Prefetched segments that were not consumed do not count.

A thread, not a process: zstd releases the GIL while it decodes, and segments are not copied between
processes.
"""

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from queue import Empty, SimpleQueue
from typing import Any, Self

from data_pipeline.errors import UnreadableError
from data_pipeline.shards.shard_files import file_read_by, what_to_check
from data_pipeline.shards.shard_reader import TokenSource
from data_pipeline.streams.lanes import LanePlan
from data_pipeline.streams.mixture import MixedSource
from data_pipeline.streams.order import ORDERINGS, Ordering
from data_pipeline.streams.segments import Reset, Segment, SegmentReader

GROUP_TOKENS = 1 << 16
"""Tokens that the thread reads in one call: enough to amortize the call, small enough for the CPU's
cache."""
CLOSE_TIMEOUT_SECONDS = 5.0
"""How long `close` waits for a hanging read. After that the daemon thread ends with the process."""


class SegmentStream(Iterator[Segment]):
    """Segments of some lanes from `position` on, without end, prefetched by one thread.

    `prefetch_segments` limits the number of prefetched segments; it changes no value. An exception
    in the thread is raised by `next`, at the segment that could not be read or a few before it; so
    is an UnreadableError if the thread takes `timeout_seconds` (None: no limit), because a file
    system may never answer. The thread ends with `close`, which also happens at the end of a `with`
    block, on garbage collection and at process exit. Iterating again continues at `position`, as a
    pipeline with repetitions needs.
    For one consumer; several streams may share a `source` that is thread-safe.
    """

    def __init__(
        self,
        source: TokenSource | MixedSource,
        plan: LanePlan,
        *,
        lanes: Sequence[int],
        reset: Reset = "document",
        ordering: Ordering = ORDERINGS["blocks"],
        seed: int = 0,
        position: int = 0,
        prefetch_segments: int = 4,
        timeout_seconds: float | None = None,
    ) -> None:
        if position < plan.start or prefetch_segments < 1:
            raise ValueError(
                f"{position=} must be at least {plan.start}, {prefetch_segments=} at least 1"
            )
        self._reader = SegmentReader(
            source, plan, lanes=lanes, reset=reset, ordering=ordering, seed=seed
        )
        self.position, self._tgt_len = position, plan.tgt_len
        """Lane position of the segment that `next` will return."""
        self._timeout_seconds = timeout_seconds
        # One segment per call for long segments, several for short ones: a call has a fixed cost.
        segment_tokens = max(1, len(lanes)) * plan.tgt_len
        self._group_segments = max(1, min(GROUP_TOKENS // segment_tokens, prefetch_segments))
        self._channel = _Channel(num_groups=prefetch_segments // self._group_segments)
        self._group: list[Segment] = []
        self._end_thread = weakref.finalize(self, self._channel.close)

    @property
    def has_segment(self) -> bool:
        """Whether `next` returns without waiting."""
        return bool(self._group) or not self._channel.filled.empty()

    def segments_before(self, num_segments: int) -> list[Segment]:
        """The segments before `position`, to replay them. Call it before the first `next`."""
        assert self._channel.thread is None, "the thread uses the reader"
        start = self.position - num_segments * self._tgt_len
        return self._reader.read(start, num_segments) if num_segments else []

    def __call__(self) -> Self:
        """`wds.DataPipeline` calls its source to open it."""
        return self

    def __next__(self) -> Segment:
        if not self._group:
            self._group = self._next_group()
        segment = self._group.pop()
        self.position = segment.next_position
        return segment

    def _next_group(self) -> list[Segment]:
        """The segments of the thread's next call, the first one at the end, for `pop`."""
        channel = self._channel
        if channel.closed:
            raise ValueError("the segment stream is closed; open another at its position")
        if channel.thread is None:
            # The thread must not reference the stream, or it would never be collected.
            channel.thread = threading.Thread(
                target=_prefetch,
                args=(self._reader, self.position, self._group_segments, channel),
                name="segment-stream",
                daemon=True,
            )
            channel.thread.start()
        try:
            group = channel.filled.get(timeout=self._timeout_seconds)
        except Empty:
            group = self._stalled_error(channel.thread.ident)
        if isinstance(group, BaseException):
            channel.filled.put(group)  # for the next call
            raise group
        channel.free.put(None)
        return group[::-1]

    def _stalled_error(self, thread: int | None) -> UnreadableError:
        file = file_read_by(thread)
        place = f"{file} could not be read" if file else "no tokens could be read"
        causes = what_to_check(file) if file else "the disk or the network"
        return UnreadableError(
            f"{place} within {self._timeout_seconds:g} s (lane position {self.position:,}). Check "
            f"{causes}, then run it again: nothing was changed."
        )

    def close(self) -> None:
        """End the thread. `next` then raises ValueError; `position` remains valid."""
        self._group = []
        self._end_thread()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class _Channel:
    """What the reading thread and the consumer share. `free` has an item per group to prefetch.

    Not one bounded Queue: `SimpleQueue.put` is reentrant, and the garbage collector may run the
    finalizer while the same thread is inside another call to the queue.
    """

    def __init__(self, num_groups: int) -> None:
        self.filled: SimpleQueue[list[Segment] | BaseException] = SimpleQueue()
        self.free: SimpleQueue[None] = SimpleQueue()
        self.thread: threading.Thread | None = None
        self.closed = False
        for _ in range(num_groups):
            self.free.put(None)

    def close(self) -> None:
        """End the thread, and a `next` that waits for it."""
        self.closed = True
        self.free.put(None)  # wakes the thread
        self.filled.put(ValueError("the segment stream was closed while it was read"))
        # The collector may run in the reading thread; a thread without ident has not begun.
        if self.thread and self.thread.ident not in (None, threading.get_ident()):
            self.thread.join(CLOSE_TIMEOUT_SECONDS)


def _prefetch(reader: SegmentReader, position: int, num_segments: int, channel: _Channel) -> None:
    try:
        while True:
            channel.free.get()
            if channel.closed:
                return
            group = reader.read(position, num_segments)
            position = group[-1].next_position
            channel.filled.put(group)
    except BaseException as error:  # `next` raises it in the consumer's thread
        channel.filled.put(error)


def pipeline(stream: SegmentStream, *stages: Callable[..., Any]) -> Iterator[Any]:
    """Iterate `wds.DataPipeline(stream, *stages)`; a stage maps an iterable of segments to another.

    A stage may change the content of segments, but not their number or order, except to divide each
    as `in_turns` does: the last one that the pipeline returned is the run's reading state.
    """
    # Imported here: webdataset imports torch, which plain data commands do not need.
    import webdataset as wds

    return iter(wds.DataPipeline(stream, *stages))
