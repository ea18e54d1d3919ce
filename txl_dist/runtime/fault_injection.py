"""Fault injection: a rank fails at a named point of a run. Off unless TXL_FAULT is set.

    TXL_FAULT=POINT:ACTION[:NTH[:RANK]]     several, separated by commas
    TXL_FAULT_TRACE=FILE                    append a line to FILE whenever a rank reaches a point

ACTION is `kill` (SIGKILL), `stop` (SIGSTOP: the rank hangs), `terminate` (SIGTERM: a request to
stop), `raise` (an error) or `sleep=SECONDS`. It happens when the rank reaches the point for the
NTH time in this process, 1 by default; without RANK, on every rank. Example: kill rank 1 when it
begins its third checkpoint:

    TXL_FAULT=save/files:kill:3:1 txl train configs/tiny.yaml --on processes --ranks 2

A point is the beginning of a part of a run, which lasts until the rank reaches the next point.
"""

import os
import re
import signal
import time
from collections import Counter
from dataclasses import dataclass
from functools import cache
from typing import Literal, cast, get_args

from txl_dist.errors import ConfigError, TxlError

FaultPoint = Literal[
    "start",  # a rank begins
    "engine",  # it has met the other ranks, and builds model and engine
    "resume",  # it loads a checkpoint
    "replay",  # it fills the memory after a change of lanes
    "step",  # before the forward pass
    "evaluation",
    "score",  # a worker scores a batch of chunks
    "save/files",  # every rank writes its files
    "save/manifest",  # rank 0: all files are written, and the manifest is not
    "save/latest",  # rank 0: the checkpoint is complete, and LATEST names the previous one
    "upload",  # a rank copies its files of a checkpoint to training.checkpoint_url
]
POINTS: tuple[FaultPoint, ...] = get_args(FaultPoint)

_SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "terminate": signal.SIGTERM}
_FAULT = re.compile(
    r"(?P<point>[^:]+):(?P<action>kill|stop|terminate|raise|sleep=\d+(\.\d+)?)"
    r"(:(?P<nth>[1-9]\d*)(:(?P<rank>\d+))?)?",
    re.ASCII,
)

FAULT_VARIABLE = "TXL_FAULT"
TRACE_VARIABLE = "TXL_FAULT_TRACE"


class InjectedError(TxlError):
    """The error of action `raise`."""


def fault_point(point: FaultPoint) -> None:
    """Fail here if TXL_FAULT says so. Raises ConfigError if TXL_FAULT is invalid."""
    injector = _injector(os.environ.get(FAULT_VARIABLE, ""), os.environ.get(TRACE_VARIABLE, ""))
    if injector is not None:
        injector.reach(point, rank=int(os.environ.get("RANK", "0")))


@dataclass(frozen=True, slots=True)
class Fault:
    """One entry of TXL_FAULT."""

    point: FaultPoint
    action: str
    nth: int
    rank: int | None

    def act(self) -> None:
        """Fail."""
        if self.action in _SIGNALS:
            os.kill(os.getpid(), _SIGNALS[self.action])
        elif self.action == "raise":
            raise InjectedError(f"an error injected by {FAULT_VARIABLE}")
        else:
            time.sleep(float(self.action.removeprefix("sleep=")))


class Injector:
    """Counts how often this process reaches each point, and acts at the chosen ones."""

    def __init__(self, faults: list[Fault], *, trace: str) -> None:
        self._faults, self._trace = faults, trace
        self._count: Counter[FaultPoint] = Counter()

    def reach(self, point: FaultPoint, *, rank: int) -> None:
        self._count[point] += 1
        if self._trace:
            # One write in append mode: lines of several processes do not mix.
            line = f"{time.monotonic():.6f} {os.getpid()} {rank} {point}\n"
            with open(self._trace, "ab", buffering=0) as file:  # noqa: PTH123  # once per step
                file.write(line.encode())
        for fault in self._faults:
            is_here = fault.point == point and fault.nth == self._count[point]
            if is_here and fault.rank in (None, rank):
                fault.act()


@cache
def _injector(faults: str, trace: str) -> Injector | None:
    if not faults and not trace:
        return None
    return Injector([parse_fault(text) for text in faults.split(",") if text], trace=trace)


def parse_fault(text: str) -> Fault:
    """Read `POINT:ACTION[:NTH[:RANK]]`. Raises ConfigError."""
    match = _FAULT.fullmatch(text)
    if match is None or match["point"] not in POINTS:
        raise ConfigError(
            f"{FAULT_VARIABLE}: {text!r} is not POINT:ACTION[:NTH[:RANK]] with a point of "
            f"{', '.join(POINTS)} and an action of kill, stop, terminate, raise, sleep=SECONDS. "
            f"For a run without injected faults: unset {FAULT_VARIABLE}"
        )
    rank = None if match["rank"] is None else int(match["rank"])
    return Fault(cast(FaultPoint, match["point"]), match["action"], int(match["nth"] or 1), rank)
