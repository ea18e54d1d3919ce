"""The log of rank 0: followed while a run trains, and read afterwards with RUN/events.

RUN/logs/rank-0.log has the lines of all starts, one after the other, with the time of day.
"""

import re
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

POLL_SECONDS = 0.2
FIRST_BATCH = "first batch"
"""The line of rank 0 before its first step."""
EVALUATION = "evaluation of split"
"""In the lines that say how far an evaluation is."""
RANK_IS_UP = "rank 0 is up"
"""The first line of rank 0, at each start."""
RESTART = "; restart"
"""In the line of the launcher that says why the ranks start again."""
_TIME_LEFT = re.compile(r" \| eta (\d+):(\d\d):(\d\d)")
_STEP = re.compile(r"^\S+ step (\d+) \| loss ")


class LogFollower:
    """Calls `on_line` with every line appended to `path` while the context is open."""

    def __init__(self, path: Path, on_line: Callable[[str], None]) -> None:
        self._path, self._on_line = path, on_line
        self._position = path.stat().st_size if path.exists() else 0
        self._incomplete = b""
        self._read_lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._follow, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self.flush()

    def flush(self) -> None:
        """Pass on the lines that were written since the last poll."""
        with self._read_lock:
            if not self._path.exists():
                return
            with self._path.open("rb") as file:
                file.seek(self._position)
                appended = file.read()
            self._position += len(appended)
            *lines, self._incomplete = (self._incomplete + appended).split(b"\n")
            for line in lines:
                self._on_line(line.decode(errors="replace"))

    def _follow(self) -> None:
        while not self._stop.wait(POLL_SECONDS):
            self.flush()


def step_of(line: str) -> int | None:
    """The step number of a step line; None for other lines."""
    match = _STEP.search(line)
    return int(match[1]) if match else None


def is_stop(line: str) -> bool:
    """Whether a line is the last word of a rank after a stop request."""
    return _STOPPED.match(line) is not None


def time_left(line: str) -> float | None:
    """The seconds until the end of the run that a step line expects."""
    match = _TIME_LEFT.search(line)
    return 3600.0 * int(match[1]) + 60 * int(match[2]) + int(match[3]) if match else None


_UP = re.compile(r"\S+ rank 0 is up")
_IS_UP = re.compile(r"\S+ rank \d+ is up")
_RESUMED = re.compile(r"resuming at step (\d+) from ")
_MACHINE = "machine | "
_ERROR = re.compile(r"\S+ (\w+Error: .*|rank \d+ failed.*)")
_STOPPED = re.compile(r"\S+ (stopped on request .*)")
_FINISHED = re.compile(r"\S+ finished at step (\d+)")
_ROLLBACK = re.compile(r"returned from step (\d+) to the checkpoint of step (\d+)")
_DIVERGED = re.compile(r"(?:loss|global gradient norm) of step (\d+) is ")
_LANES = re.compile(r"[\d,]+ lanes? of ")
_EVENT_FILE = re.compile(r"divergence-step-(\d+)-rank-\d+\.json")
TAIL_BYTES = 1 << 18
"""Of a log, in which the newest error is searched."""


@dataclass(frozen=True, slots=True)
class Start:
    """One start of the ranks."""

    time: str
    """Time of day."""
    step: int
    """Where it began; 0 for the beginning."""
    after: str
    """The last word of the start before it, empty for the first."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunLog:
    """The course of a run."""

    starts: tuple[Start, ...] = ()
    events: tuple[str, ...] = ()
    """The lines that are no step lines."""
    last_word: str = ""
    """How the last start ended: its error, a stop on request, or `finished at step N`."""
    machine: str = ""
    parameters: int | None = None
    ranks: str = ""
    """`2 ranks on cuda | ZeRO stage 1 | bf16 | triton`, of the last start."""
    divergences: tuple[int, ...] = ()
    """Steps that have diverged, ascending."""
    rollbacks: tuple[tuple[int, int], ...] = ()
    """(step that was reached, step of the checkpoint), in their order."""
    seconds_left: float | None = None
    """Of the newest step line."""
    has_stepped: bool = False
    """Whether the newest start has a step line."""


def parse_log(text: str, *, event_files: tuple[str, ...] = ()) -> RunLog:
    """Read the text of rank-0.log; `event_files` are the names in RUN/events."""
    starts: list[Start] = []
    events: list[str] = []
    last_word = machine = ranks = ""
    parameters = seconds_left = None
    has_stepped = False
    rollbacks: list[tuple[int, int]] = []
    divergences = {int(match[1]) for match in map(_EVENT_FILE.fullmatch, event_files) if match}
    for line in text.splitlines():
        if step_of(line) is not None:
            seconds_left, has_stepped = time_left(line), True
            continue
        if line:
            events.append(line)
        if _UP.match(line):
            if starts:
                last_word = last_word or "no last word: killed, or lost with its machine"
            starts.append(Start(line.partition(" ")[0], 0, last_word))
            last_word, has_stepped = "", False
        elif starts and (match := _RESUMED.search(line)):
            starts[-1] = Start(starts[-1].time, int(match[1]), starts[-1].after)
        if " parameters | " in line:
            parameters, ranks = _of_start_line(line)
        elif _MACHINE in line:
            machine = line.partition(_MACHINE)[2]
        elif match := _ROLLBACK.search(line):
            rollbacks.append((int(match[1]), int(match[2])))
        elif "divergence.policy=" in line and (match := _DIVERGED.search(line)):
            divergences.add(int(match[1]))
        elif match := _ERROR.match(line) or _STOPPED.match(line):
            last_word = match[1]
        elif _FINISHED.match(line):
            last_word = line.partition(" ")[2]
    return RunLog(
        starts=tuple(starts),
        events=tuple(events),
        last_word=last_word,
        machine=machine,
        parameters=parameters,
        ranks=ranks,
        divergences=tuple(sorted(divergences)),
        rollbacks=tuple(rollbacks),
        seconds_left=seconds_left,
        has_stepped=has_stepped,
    )


def read_log(run: Path) -> RunLog:
    """The log of a run directory; empty without one. Raises OSError if it cannot be read."""
    folder, log = run / "events", run / "logs" / "rank-0.log"
    names = tuple(path.name for path in folder.iterdir()) if folder.is_dir() else ()
    text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
    return parse_log(text, event_files=names)


def last_error(run: Path) -> tuple[str, Path] | None:
    """The newest error that a rank has logged, and its file.

    An error because other ranks were lost is the answer only if no rank has another one.
    """
    errors: list[tuple[bool, int, str, Path]] = []
    for path in sorted((run / "logs").glob("rank-*.log")):
        with suppress(OSError), path.open("rb") as log:
            log.seek(max(0, path.stat().st_size - TAIL_BYTES))
            lines = log.read().decode(errors="replace").splitlines()
            # Only of the newest start.
            begins = [n for n, line in enumerate(lines) if _IS_UP.match(line)]
            matches = (_ERROR.match(line) for line in lines[begins[-1] if begins else 0 :])
            if texts := [match[1] for match in matches if match]:
                is_consequence = texts[-1].startswith("LostRankError")
                errors.append((is_consequence, len(errors), texts[-1], path))
    if not errors:
        return None
    _, _, text, path = min(errors)
    return text, path


def _of_start_line(line: str) -> tuple[int | None, str]:
    """Parameters and ranks of `TIME a new run | 115,076 parameters | 1 rank on cpu | ...`."""
    fields = line.split(" | ")
    number = fields[1].removesuffix(" parameters").replace(",", "")
    is_lanes = [bool(_LANES.match(field)) for field in fields]
    stop = is_lanes.index(True) if True in is_lanes else len(fields)
    return int(number) if number.isdecimal() else None, " | ".join(fields[2:stop])
