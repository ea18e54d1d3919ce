"""Reads the trace that txl_dist/runtime/fault_injection.py writes (TXL_FAULT_TRACE)."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Reached:
    """One line of a trace."""

    time: float
    """On the monotonic clock, which all processes of a machine share."""
    pid: int
    rank: int
    point: str


def read_trace(path: Path) -> list[Reached]:
    """The complete lines of a trace that may not exist yet."""
    if not path.exists():
        return []
    lines = path.read_text().rpartition("\n")[0].splitlines()
    words = (line.split() for line in lines)
    return [Reached(float(time), int(pid), int(rank), point) for time, pid, rank, point in words]
