"""WorkerStatus: what each worker is doing, for the progress display."""

import time
from dataclasses import dataclass


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
