"""Python stacks of a rank: where its main thread is, and a file with the stacks of all threads."""

import contextlib
import faulthandler
import os
import re
import traceback
from pathlib import Path
from types import FrameType

PACKAGES = ("txl_dist", "data_pipeline", "cluster")
NUM_CALLS = 5
MAX_CHARS = 200
"""Longest text of one call: a heartbeat has to fit into a page."""

StackFrames = list[tuple[str, int, str]]
"""(file, line, function) of each call, outermost first."""
_ROOT = str(Path(__file__).parents[2]) + os.sep
_OURS = tuple(_ROOT + package + os.sep for package in PACKAGES)
_NOT_IN_LABELS = re.compile(r"[^a-z0-9]+")


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


def label_of(activity: str) -> str:
    """`step 12` -> `step-12`, for file names."""
    return _NOT_IN_LABELS.sub("-", activity.lower()).strip("-")[:80]


def stack_file(run: Path, label: str, rank: int | str) -> Path:
    """The file for the stacks of a rank, in the directory of the logs."""
    return run / "logs" / f"stacks-{label}-rank-{rank}.txt"


def write_stacks(path: Path, title: str) -> None:
    """Append the stacks of all threads of this process to `path`, in the format of faulthandler."""
    with contextlib.suppress(OSError), path.open("ab") as file:
        file.write(f"{title}\n\n".encode())
        file.flush()  # faulthandler writes to the descriptor
        faulthandler.dump_traceback(file, all_threads=True)
        file.write(b"\n")
