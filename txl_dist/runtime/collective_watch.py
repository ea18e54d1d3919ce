"""CollectiveWatch: logs a warning if this rank waits long for the other ranks in a collective.

If a link is cut or a rank hangs, the other ranks wait inside a collective until its time limit, and
log nothing. So a thread samples the Python stack of the rank's main thread once per second. If that
thread stays in the same collective for `notice_seconds`, it logs the collective's name, and
again every `notice_seconds`. The step itself is not wrapped and not slowed down. After the time
limit, `lost_rank_error` reads the collective's name from the traceback in the same way.

Covered: calls of torch.distributed, and waits for its asynchronous work inside DeepSpeed.
Not covered: a rank whose own computation is slow, because it does not wait.
"""

import linecache
import logging
import re
import sys
import threading
import traceback
from collections.abc import Iterable
from dataclasses import dataclass
from types import FrameType
from typing import Self

from txl_dist.errors import LostRankError

NOTICE_SECONDS = 10.0
_COLLECTIVES = "torch/distributed/distributed_c10d.py"
_DEEPSPEED = "/deepspeed/"
_WRAPPER = "wrapped_fn"
"""Name of DeepSpeed's profiling decorator, which wraps most of its functions."""
_TIMED_OUT = re.compile(r"timed out|time-?out", re.IGNORECASE)
_DISCONNECTED = re.compile(
    r"connection (was )?(closed|reset|refused)|broken pipe|socket closed|unhandled system error",
    re.IGNORECASE,
)

log = logging.getLogger("txl_dist.training")


@dataclass(slots=True)
class Activity:
    """What a rank is doing: `start-up`, `step 12`, `checkpoint of step 12`, ..."""

    name: str = "start-up"


def collective_name(frames: Iterable[tuple[str, int, str]]) -> str | None:
    """The collective in which a stack of (file, line, function), outermost first, waits.

    That is the outermost function of torch.distributed, or else the DeepSpeed function that waits
    for an asynchronous collective. None if the stack contains neither.
    """
    in_deepspeed: list[tuple[str, int, str]] = []
    for file, line, function in frames:
        if file.endswith(_COLLECTIVES):
            return function
        if _DEEPSPEED not in file:
            in_deepspeed = []
        elif function != _WRAPPER:
            in_deepspeed.append((file, line, function))
    if not in_deepspeed:
        return None
    file, line, function = in_deepspeed[-1]
    if function != "wait" and ".wait(" not in linecache.getline(file, line):
        return None
    return next((name for _, _, name in reversed(in_deepspeed) if name != "wait"), "wait")


class CollectiveWatch:
    """Watches the thread that enters the context until it exits the context."""

    def __init__(
        self,
        activity: Activity,
        *,
        rank: int,
        limit_seconds: float,
        notice_seconds: float = NOTICE_SECONDS,
    ) -> None:
        self._activity, self._rank = activity, rank
        self._limit_seconds, self._notice_seconds = limit_seconds, notice_seconds
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="collective-watch", daemon=True)

    def __enter__(self) -> Self:
        self._watched = threading.get_ident()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        poll_seconds = min(1.0, self._notice_seconds / 4)
        previous: tuple[object, ...] | None = None
        waited = logged = 0.0
        while not self._stop.wait(poll_seconds):
            frame = sys._current_frames().get(self._watched)
            name = collective_name(_frames(frame))
            # Activity and frame differ between two short waits in the same collective.
            current = (self._activity.name, name, id(frame))
            waited = waited + poll_seconds if current == previous else 0.0
            logged = logged if current == previous else 0.0
            previous = current
            del frame  # it references the tensors of that call
            if name is not None and waited - logged >= self._notice_seconds:
                logged = waited
                log.warning(
                    "%s | rank %d has waited %.0f s for the other ranks in %s; the limit is "
                    "training.rank_timeout_seconds=%g",
                    self._activity.name,
                    self._rank,
                    waited,
                    name,
                    self._limit_seconds,
                )


def lost_rank_error(
    error: Exception, activity: Activity, *, rank: int, limit_seconds: float
) -> LostRankError | None:
    """The LostRankError for an `error` in a collective to which other ranks did not respond.

    None for any other error.
    """
    name = collective_name(
        (frame.filename, frame.lineno or 0, frame.name)
        for frame in traceback.extract_tb(error.__traceback__)
    )
    if name is None:
        return None
    location = f"in {name} ({activity.name})"
    if _TIMED_OUT.search(str(error)):
        return LostRankError(
            f"rank {rank} waited training.rank_timeout_seconds={limit_seconds:g} for the other "
            f"ranks {location}: one of them hangs or is very slow, or the network is cut. The logs "
            "of the ranks show what each was doing"
        )
    if _DISCONNECTED.search(str(error)):
        return LostRankError(f"rank {rank} lost the connection to another rank {location}")
    return None


def _frames(frame: FrameType | None) -> list[tuple[str, int, str]]:
    return [
        (inner.f_code.co_filename, line, inner.f_code.co_name)
        for inner, line in (reversed(list(traceback.walk_stack(frame))) if frame else ())
    ]
