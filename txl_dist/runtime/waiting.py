"""What a rank waits for: heartbeats, the watch of a rank, and the watch of a launcher.

If a link is cut or a rank hangs, the other ranks wait inside a collective until its time limit, and
log nothing. So a thread (`CollectiveWatch`) samples the Python stack of the rank's main thread once
per second. The step itself is not wrapped and not slowed down. The thread

1. writes this rank's heartbeat every few seconds, also while the main thread computes or saves for
   a long time: such a rank is slow, but it does not hang;
2. logs a warning every `notice_seconds` if the main thread stays in one collective, with its name
   and the ranks that are not in a collective according to their heartbeats, and their stacks. With
   NCCL that is all: its own watchdog aborts the process at the time limit;
3. on rank 0, logs every few seconds how far an evaluation is.

After the time limit, `lost_rank_error` reads the collective's name from the traceback in the same
way. Covered: calls of torch.distributed, waits for its asynchronous work inside DeepSpeed, and on
GPUs, where a collective returns immediately, the calls that wait for its result.

    RUN/.heartbeats/rank-N.json       what rank N is doing, rewritten every few seconds

The ranks read each other's heartbeats (`Peers`). Nobody waits for the only rank of a run, or if all
ranks hang at the same time: so the launcher reads them too (`HangWatch`). Files, because a rank
that waits in a collective cannot use another collective, and every rank sees the run directory.
Readers decide by the number of a heartbeat, which changes as long as the rank lives, and by their
own monotonic clock; clocks of different hosts are never compared.
"""

import contextlib
import linecache
import logging
import os
import re
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterable
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Self

from pydantic import ValidationError

from data_pipeline.errors import counted
from data_pipeline.system.files import overwrite_page
from data_pipeline.system.strict import StrictModel
from txl_dist.errors import LostRankError
from txl_dist.runtime.process import PACKAGES, Span

if TYPE_CHECKING:
    from txl_dist.runtime.world import World

BEAT_SECONDS = 5.0
"""Between two heartbeats of a rank; less if `training.rank_timeout_seconds` is short."""
SILENT_BEATS = 3
"""A rank does not respond if its heartbeat has not changed for this many intervals."""
NUM_READERS = 8
"""Only this many ranks read the heartbeats of all others; the rest reads theirs. This limits the
load of the storage."""
MAX_NAMED = 4
"""Ranks that one message describes."""
HANG_POLL_SECONDS = 2.0
MARGIN_SECONDS = 10.0
"""A launcher gives ranks this much longer than `training.rank_timeout_seconds`: ranks that wait for
others know more about them."""
START_SECONDS = 600.0
"""Time limit for the first heartbeat of any rank. Imports from a busy file server take minutes."""
NOTICE_SECONDS = 10.0
EVALUATION_SECONDS = 8.0
POLL_SECONDS = 1.0
NOTICE_SHARE = 0.8
"""The first notice comes at this share of the time limit, or before."""
NUM_CALLS = 5
MAX_CHARS = 200
"""Longest text of one call: a heartbeat has to fit into a page."""
GPU_WAIT = "a GPU synchronisation"
"""Reported as the collective: on a GPU, a collective and a slow kernel look the same."""
_COLLECTIVES = "torch/distributed/distributed_c10d.py"
_DEEPSPEED = "/deepspeed/"
_WRAPPER = "wrapped_fn"
"""Name of DeepSpeed's profiling decorator, which wraps most of its functions."""
_WAITS_FOR_GPU = re.compile(
    r"\.(item|tolist|cpu|copy_|_?(cuda_)?synchronize)\("
    # Copies of a number to the GPU, where DeepSpeed checks a norm (deepspeed/runtime/utils.py).
    r"|torch\.tensor\(.*device="
)
_TIMED_OUT = re.compile(r"timed out|time-?out", re.IGNORECASE)
_DISCONNECTED = re.compile(
    r"connection (was )?(closed|reset|refused)|broken pipe|socket closed|unhandled system error",
    re.IGNORECASE,
)
_ROOT = str(Path(__file__).parents[2]) + os.sep
_OURS = tuple(_ROOT + package + os.sep for package in PACKAGES)

StackFrames = list[tuple[str, int, str]]
"""(file, line, function) of each call, outermost first."""

log = logging.getLogger("txl_dist.training")


# --- heartbeats -----------------------------------------------------------------------------------


class Heartbeat(StrictModel):
    rank: int
    host: str
    pid: int
    number: int
    """Counts the heartbeats of a process."""
    time: float
    """Wall clock, for people."""
    activity: str
    span: str
    collective: str | None
    """The collective in which the rank waits for others; None: it does its own work."""
    seconds: float
    """How long it has been in this collective or span."""
    stack: tuple[str, ...]
    """Innermost calls of its main thread: `txl_dist/training/loop.py:118 in _read`."""

    @property
    def process(self) -> str:
        """`rank 1 (host a, pid 42)`."""
        return f"rank {self.rank} (host {self.host}, pid {self.pid})"

    @property
    def place(self) -> str:
        """`step 12, data wait`."""
        return self.activity if self.activity == self.span else f"{self.activity}, {self.span}"


def heartbeat_path(run: Path, rank: int) -> Path:
    return run / ".heartbeats" / f"rank-{rank}.json"


def write_heartbeat(run: Path, beat: Heartbeat) -> None:
    # On a full disk the others see a rank without a heartbeat.
    with contextlib.suppress(OSError):
        path = heartbeat_path(run, beat.rank)
        path.parent.mkdir(exist_ok=True)  # somebody may have cleaned up
        overwrite_page(path, beat.model_dump_json())


def remove_heartbeat(run: Path, rank: int) -> None:
    """Remove the heartbeat of a rank that has ended."""
    with contextlib.suppress(OSError):
        heartbeat_path(run, rank).unlink()


def _read(path: Path) -> Heartbeat | None:
    """Return a heartbeat; None if there is none, or it is being written."""
    try:
        return Heartbeat.model_validate_json(path.read_bytes())
    except (OSError, ValidationError):
        return None


def read_heartbeats(run: Path) -> dict[int, Heartbeat]:
    beats = map(_read, sorted(run.glob(".heartbeats/rank-*.json")))
    return {beat.rank: beat for beat in beats if beat is not None}


class Peers:
    """The heartbeats of the other ranks, as a rank reads them that waits for these."""

    def __init__(self, run: Path, *, rank: int, num_ranks: int, beat_seconds: float) -> None:
        self._run, self._silent_seconds = run, SILENT_BEATS * beat_seconds
        readable = range(num_ranks if rank < NUM_READERS else NUM_READERS)
        self._others = [other for other in readable if other != rank]
        self._reader_activity, self._read_at = "", 0.0
        self._beats: dict[int, Heartbeat] = {}
        self._changed_at: dict[int, float] = {}
        """When this heartbeat of a rank was first read."""

    def read(self, activity: str) -> None:
        """Read the heartbeats during this rank's `activity`. Call again at intervals."""
        self._read_at, self._reader_activity = time.monotonic(), activity
        for rank in self._others:
            beat = _read(heartbeat_path(self._run, rank))
            if beat is not None and beat != self._beats.get(rank):
                self._beats[rank], self._changed_at[rank] = beat, self._read_at

    def describe(self, activity: str) -> str:
        """Name the ranks that do not respond, or else those that are not in a collective.

        Empty if there are none, or if nothing was read in this activity.
        """
        if activity != self._reader_activity:
            return ""
        lines = [
            f"rank {rank} has no heartbeat" for rank in self._others if rank not in self._beats
        ]
        for rank, beat in self._beats.items():
            silent_seconds = self._read_at - self._changed_at[rank]
            if silent_seconds > self._silent_seconds:
                lines.append(
                    f"{beat.process} has not responded for {silent_seconds:.0f} s (last in "
                    f"{beat.place})"
                )
        if not lines:  # ranks that work are a consequence of a rank that does not respond
            lines = [
                f"{beat.process} has been in {beat.place} for {beat.seconds:.0f} s"
                + (f": {', called by '.join(beat.stack)}" if beat.stack else "")
                for beat in self._beats.values()
                if beat.collective is None
            ]
        if len(lines) > MAX_NAMED:
            lines[MAX_NAMED:] = [f"and {counted(len(lines) - MAX_NAMED, 'more rank')}"]
        return "; ".join(lines)


class HangWatch:
    """Watches the heartbeats of ranks while the context is open; open it before they start.

    Files are read in a thread, because their file system may not respond.
    """

    def __init__(self, run: Path) -> None:
        self._run = run
        self._beats: dict[int, Heartbeat] = {}
        self.silent_seconds = 0.0
        """Since the last change of any heartbeat, or since the start of the ranks."""
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="hang-watch", daemon=True)

    def __enter__(self) -> Self:
        with contextlib.suppress(OSError):
            for rank in read_heartbeats(self._run):  # of earlier processes
                remove_heartbeat(self._run, rank)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()

    def hang(self, *, timeout_seconds: float) -> str | None:
        """What is known about the ranks if all of them hang, else None."""
        has_begun = bool(self._beats)  # before the seconds: the thread sets them in the other order
        seconds = self.silent_seconds
        if not has_begun:
            is_late = seconds > START_SECONDS
            return f"no rank has begun within {START_SECONDS:.0f} s" if is_late else None
        if seconds <= timeout_seconds + MARGIN_SECONDS:
            return None
        last_seen = "; ".join(
            f"{beat.process} in {beat.place}" for _, beat in sorted(self._beats.items())
        )
        return (
            f"no rank has responded for {seconds:.0f} s (training.rank_timeout_seconds); last "
            f"seen: {last_seen}"
        )

    def _watch(self) -> None:
        while not self._closed.wait(HANG_POLL_SECONDS):
            # Count polls instead of reading a clock, so that time spent suspended (Ctrl-Z) is not
            # blamed on the ranks.
            self.silent_seconds += HANG_POLL_SECONDS
            with contextlib.suppress(OSError):  # the directory cannot be listed for a moment
                beats = self._beats | read_heartbeats(self._run)
                if beats != self._beats:
                    self.silent_seconds, self._beats = 0.0, beats


# --- stacks ---------------------------------------------------------------------------------------


def frames_of(frame: FrameType | None) -> StackFrames:
    """The calls of a thread whose innermost frame is `frame`. Line 0: not known."""
    return [
        # A running frame has no line number between two lines.
        (inner.f_code.co_filename, line or 0, inner.f_code.co_name)
        for inner, line in (reversed(list(traceback.walk_stack(frame))) if frame else ())
    ]


def innermost_calls(frames: StackFrames) -> tuple[str, ...]:
    """The innermost calls of this project's code, innermost first."""
    calls = [
        f"{file.removeprefix(_ROOT)}:{line} in {function}"[:MAX_CHARS]
        for file, line, function in reversed(frames)
        if file.startswith(_OURS)
    ]
    return tuple(calls[:NUM_CALLS])


def collective_name(frames: Iterable[tuple[str, int, str]], *, on_gpu: bool = False) -> str | None:
    """The collective in which a stack of (file, line, function), outermost first, waits.

    That is the outermost function of torch.distributed, or else the DeepSpeed function that waits
    for an asynchronous collective, or else, with `on_gpu`, GPU_WAIT. None for any other stack.
    """
    stack = list(frames)
    for file, _, function in stack:
        if file.endswith(_COLLECTIVES):
            return function
    # The innermost call of a failed wait is often that of the decorator.
    stack = [call for call in stack if call[2] != _WRAPPER]
    if not stack:
        return None
    file, line, function = stack[-1]
    source = linecache.getline(file, line)
    if _DEEPSPEED in file and (function == "wait" or ".wait(" in source):
        names = [name for file, _, name in reversed(stack) if _DEEPSPEED in file]
        return next((name for name in names if name != "wait"), "wait")
    return GPU_WAIT if on_gpu and _WAITS_FOR_GPU.search(source) else None


# --- the watch of a rank --------------------------------------------------------------------------


class CollectiveWatch:
    """Watches the thread that enters the context until it exits the context.

    `run` is the run directory.
    """

    def __init__(
        self,
        world: "World",
        *,
        run: Path,
        limit_seconds: float,
        notice_seconds: float = NOTICE_SECONDS,
    ) -> None:
        self._activity, self._rank = world.activity, world.rank
        self._on_gpu = world.device.type == "cuda" and world.num_ranks > 1
        self._limit_seconds = limit_seconds
        self._notice_seconds = min(notice_seconds, NOTICE_SHARE * limit_seconds)
        # Several intervals have to pass before a rank counts as silent.
        self._beat_seconds = min(BEAT_SECONDS, self._notice_seconds / 2, limit_seconds / 8)
        self._run = run
        # Of a killed process, before other ranks can wait for this one.
        remove_heartbeat(run, world.rank)
        self._peers = Peers(
            run, rank=world.rank, num_ranks=world.num_ranks, beat_seconds=self._beat_seconds
        )
        self._num_beats = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="collective-watch", daemon=True)

    def __enter__(self) -> Self:
        self._watched = threading.get_ident()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        remove_heartbeat(self._run, self._rank)

    def lost_rank_error(self, error: Exception) -> LostRankError | None:
        """The LostRankError for an `error` in a collective to which other ranks did not respond;
        None for any other error.
        """
        name = collective_name(
            (frame.filename, frame.lineno or 0, frame.name)
            for frame in traceback.extract_tb(error.__traceback__)
        )
        if name is None:
            return None
        location = f"in {name} ({self._activity.name})"
        others = self._peers.describe(self._activity.name)
        if _TIMED_OUT.search(str(error)):
            cause = others or "one of them hangs or is very slow, or the network is cut"
            return LostRankError(
                f"rank {self._rank} waited training.rank_timeout_seconds={self._limit_seconds:g} "
                f"for the other ranks {location}: {cause}. The logs of the ranks show what each "
                "was doing"
            )
        if _DISCONNECTED.search(str(error)):
            cause = f": {others}" if others else ""
            return LostRankError(
                f"rank {self._rank} lost the connection to another rank {location}{cause}"
            )
        return None

    def _watch(self) -> None:
        previous: tuple[object, ...] | None = None
        since = next_notice = next_beat = next_line = time.monotonic()
        poll_seconds = min(POLL_SECONDS, self._beat_seconds / 2)
        while not self._stop.wait(poll_seconds):
            now = time.monotonic()
            frame = sys._current_frames().get(self._watched)
            frames = frames_of(frame)
            name = collective_name(frames, on_gpu=self._on_gpu)
            # Between two short waits in the same collective, World counts; DeepSpeed's differ by
            # frame. A frame alone would not do: the next call may get the same address.
            place = (self._activity.num_collectives, id(frame)) if name else None
            del frame  # it references the tensors of that call
            current = (self._activity.name, self._activity.span, name, place)
            if current != previous:
                previous, since = current, now
                next_notice = now + self._notice_seconds
            if now >= next_beat:
                next_beat = now + self._beat_seconds
                self._beat(frames, name, seconds=now - since)
                if name:
                    self._peers.read(self._activity.name)
            if name and now >= next_notice:
                next_notice = now + self._notice_seconds
                self._warn(name, seconds=now - since)
            if self._activity.span is not Span.EVALUATION:
                next_line = now + EVALUATION_SECONDS
            elif self._rank == 0 and now >= next_line:
                next_line = now + EVALUATION_SECONDS
                log.info("%s", self._activity.name)

    def _warn(self, name: str, *, seconds: float) -> None:
        others = self._peers.describe(self._activity.name)
        log.warning(
            f"{self._activity.name} | rank {self._rank} has waited {seconds:.0f} s for the other "
            f"ranks in {name}; the limit is training.rank_timeout_seconds={self._limit_seconds:g}"
            f"{f'; {others}' if others else ''}"
        )

    def _beat(self, frames: StackFrames, name: str | None, *, seconds: float) -> None:
        self._num_beats += 1
        beat = Heartbeat(
            rank=self._rank,
            host=socket.gethostname(),
            pid=os.getpid(),
            number=self._num_beats,
            time=time.time(),
            activity=self._activity.name[:MAX_CHARS],
            span=self._activity.span.value,
            collective=name,
            seconds=seconds,
            stack=innermost_calls(frames),
        )
        write_heartbeat(self._run, beat)
