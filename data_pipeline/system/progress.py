"""Progress of long operations: a counter inside a unit of work, and what each worker is doing."""

import time
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

Progress = Callable[[str, int, int], None]
"""progress(phase, done_bytes, total_bytes), called often.

Both count only the work of this run. Work that was finished before is in neither of them, so the
total may decrease.
"""

_counter: Any = None
"""Has the bytes of the unit that this process is working on as its `value`. None: no unit."""


def count_bytes(num_bytes: int) -> None:
    """Count bytes of the current unit of work, such as one document of many gigabytes."""
    if _counter is not None:
        _counter.value += num_bytes


@contextmanager
def counting_bytes(counter: Any = None) -> Iterator[None]:
    """Count the bytes of a unit, in `counter.value` if it is given."""
    global _counter  # noqa: PLW0603 - one unit per process at a time
    _counter = types.SimpleNamespace(value=0) if counter is None else counter
    try:
        yield
    finally:
        _counter = None


def counted_bytes() -> int:
    """The bytes counted in the current unit of this process; 0 if there is none."""
    return getattr(_counter, "value", 0)


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """What one busy worker is doing."""

    name: str
    """`worker 2 (pid 812)`, on a cluster also its node."""
    unit: str
    busy_seconds: float
    """Time since it got its unit."""
    num_finished: int
    """Units that it has finished."""
    mean_seconds: float
    """Mean time of these units; 0 if there are none."""
    done_bytes: int = 0
    """Bytes done of the current unit, if the worker counts them."""

    def __str__(self) -> str:
        text = f"{self.name}: {self.unit}, {self.busy_seconds:,.0f} s"
        if self.num_finished:
            text += f"; {self.num_finished} finished, {self.mean_seconds:,.1f} s each"
        return text


@dataclass(slots=True, eq=False)
class WorkTimes:
    """Measures the units of one worker."""

    begin: float = 0.0
    total_seconds: float = 0.0
    num_finished: int = 0

    def start_unit(self) -> None:
        self.begin = time.monotonic()

    def finish_unit(self) -> None:
        self.total_seconds += time.monotonic() - self.begin
        self.num_finished += 1

    def status(self, name: str, unit: object, done_bytes: int = 0) -> WorkerStatus:
        return WorkerStatus(
            name,
            str(unit),
            time.monotonic() - self.begin,
            self.num_finished,
            self.total_seconds / max(self.num_finished, 1),
            done_bytes,
        )
