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
from typing import Literal, get_args

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
    "upload",  # rank 0 copies the files of a checkpoint to training.checkpoint_url
]
POINTS: tuple[FaultPoint, ...] = get_args(FaultPoint)

FAULT_VARIABLE = "TXL_FAULT"
TRACE_VARIABLE = "TXL_FAULT_TRACE"
_SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "terminate": signal.SIGTERM}
_FAULT = re.compile(
    rf"(?P<point>{'|'.join(POINTS)}):(?P<action>kill|stop|terminate|raise|sleep=\d+(\.\d+)?)"
    r"(:(?P<nth>[1-9]\d*)(:(?P<rank>\d+))?)?",
    re.ASCII,
)
_num_reached: Counter[FaultPoint] = Counter()
"""How often this process has reached each point."""


class InjectedError(TxlError):
    """The error of action `raise`."""


def fault_point(point: FaultPoint) -> None:
    """Fail here if TXL_FAULT says so. Raises ConfigError if TXL_FAULT is invalid."""
    faults, trace = os.environ.get(FAULT_VARIABLE, ""), os.environ.get(TRACE_VARIABLE)
    if not faults and not trace:
        return
    rank = os.environ.get("RANK", "0")
    _num_reached[point] += 1
    if trace:
        # One write in append mode: lines of several processes do not mix.
        line = f"{time.monotonic():.6f} {os.getpid()} {rank} {point}\n"
        with open(trace, "ab", buffering=0) as file:  # noqa: PTH123  # once per step
            file.write(line.encode())
    for text in filter(None, faults.split(",")):
        fault = _FAULT.fullmatch(text)
        if fault is None:
            raise ConfigError(
                f"{FAULT_VARIABLE}: {text!r} is not POINT:ACTION[:NTH[:RANK]] with a point of "
                f"{', '.join(POINTS)} and an action of kill, stop, terminate, raise, "
                f"sleep=SECONDS. For a run without injected faults: unset {FAULT_VARIABLE}"
            )
        is_now = fault["point"] == point and int(fault["nth"] or 1) == _num_reached[point]
        if is_now and fault["rank"] in (None, rank):
            _act(fault["action"])


def _act(action: str) -> None:
    if action in _SIGNALS:
        os.kill(os.getpid(), _SIGNALS[action])
    elif action == "raise":
        raise InjectedError(f"an error injected by {FAULT_VARIABLE}")
    else:
        time.sleep(float(action.removeprefix("sleep=")))
