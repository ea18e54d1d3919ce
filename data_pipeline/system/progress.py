"""Progress of long operations: a counter inside a unit of work."""

import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

Progress = Callable[[str, int, int], None]
"""progress(label, done_bytes, total_bytes), called often.

Both count only the work of this run. Work that was finished before is in neither of them, so the
total may decrease.
"""


def clock(seconds: float) -> str:
    """`3:12:44`; of days, `75:12:44`."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}"


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
