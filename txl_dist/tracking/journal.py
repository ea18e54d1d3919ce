"""The local journal: every metric of a run, one JSON object per line of RUN/metrics.jsonl.

Training writes its metrics only here, so this file is complete if a tracking server
fails. A line is `{"step": int, "tokens": int, "time": seconds since the epoch, <metric>: number,
...}`; the steps of a metric never decrease. NaN and the infinities, which JSON lacks, are written
as the strings "nan", "inf" and "-inf", and `read_metrics` returns them as floats. `sender.py` sends
the lines.
"""

import errno
import itertools
import json
import logging
import math
import os
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO

from data_pipeline.system.files import write_file
from txl_dist.tracking.tracker import Recorded, points_of

JOURNAL = "metrics.jsonl"
SUPERSEDED = "logs/metrics-superseded.jsonl"
MAX_HELD_LINES = 10_000
"""Lines that wait while the disk is full. Beyond that the oldest are lost."""
READ_BYTES = 1 << 19

_log = logging.getLogger("txl_dist.tracking")
_NOT_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


class MetricsJournal(AbstractContextManager["MetricsJournal"]):
    """Appends to a run's metrics.jsonl.

    Each line is one write, so a killed process leaves at most one incomplete line, which the next
    open removes. A full disk causes one warning and no error: lines wait until there is room.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._held: deque[bytes] = deque(maxlen=MAX_HELD_LINES)
        self._has_warned = False
        self._file = self._open()

    def write(self, line: Mapping[str, float]) -> None:
        """Append the line of one step: `step`, `tokens`, `time` and its metrics.

        The steps of a metric must not decrease: the sender skips lower ones. Other metrics may
        have higher steps already, as training goes on while a worker scores a checkpoint.
        """
        values = {name: _to_json(value) for name, value in line.items()}
        self._held.append(json.dumps(values, allow_nan=False).encode() + b"\n")
        self._write_held(sync=False)

    def sync(self) -> None:
        """Wait until all lines are on disk, so that a checkpoint and its metrics both survive.

        Retries lines that did not fit on a full disk. Like `write`, it warns and never raises.
        """
        self._write_held(sync=True)

    def _write_held(self, *, sync: bool) -> None:
        try:
            while self._held:
                self._append(self._held[0])
                self._held.popleft()
            if sync:
                os.fsync(self._file.fileno())
        except OSError as error:
            if not self._has_warned:
                _log.warning(
                    "%s cannot be written (%s): training continues, and its metrics wait until "
                    "there is room. Free some space there.",
                    self.path,
                    error.strerror,
                )
            self._has_warned = True

    def _append(self, line: bytes) -> None:
        # One write per line, so that a kill cuts at most this line.
        size, written = os.fstat(self._file.fileno()).st_size, 0
        try:
            written = self._file.write(line)
        finally:
            if written != len(line):  # a disk that becomes full takes a part of the line
                self._file.truncate(size)
        if written != len(line):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def truncate_after(
        self, step: int, *, redone: Mapping[int, str] = MappingProxyType({})
    ) -> None:
        """Remove the lines of later steps, which a resume from `step` writes again.

        `redone`: of these steps too, the line that has this metric is removed. Removed lines are
        first appended to RUN/logs/metrics-superseded.jsonl; the journal is replaced atomically.
        Lines that are not JSON objects, which a disk failure can leave, are dropped.
        """
        path = self.path.parent / SUPERSEDED
        path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("rb") as journal, path.open("ab") as superseded:

            def kept() -> Iterator[bytes]:
                for raw in journal:
                    if (line := parse_line(raw)) is None:
                        continue
                    if line["step"] > step or redone.get(line["step"]) in line:
                        superseded.write(raw)
                    else:
                        yield raw
                superseded.flush()
                os.fsync(superseded.fileno())  # before the new journal replaces this one

            write_file(self.path, kept())
        self.close()
        self._file = self._open()

    def close(self) -> None:
        """Close the file. May be called more than once."""
        self._file.close()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open(self) -> BinaryIO:
        """Open the file. Text after its last line end is removed, or completed by that alone."""
        file = self.path.open("ab+", buffering=0)
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - READ_BYTES))
        torn = file.read().rpartition(b"\n")[2]
        if torn and parse_line(torn) is not None:
            file.write(b"\n")
        elif torn:
            file.truncate(size - len(torn))
        return file


class JournalTail:
    """Reads the complete lines of a journal while it is written, from its beginning.

    If `is_replaced` (a resume discarded steps), `rewind` starts again with the new file. A journal
    that does not exist yet is created.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file, self._offset = path.open("ab+"), 0

    def lines(self) -> Iterator[dict[str, Any]]:
        """The lines since the last call, at most READ_BYTES of them; none only at the end."""
        while data := os.pread(self._file.fileno(), READ_BYTES, self._offset):
            end = data.rfind(b"\n") + 1  # training may be in the middle of a line
            if not end and len(data) == READ_BYTES:
                end = READ_BYTES  # no line is so long: a disk failure can leave NULs
            self._offset += end
            lines = [*filter(None, map(parse_line, data[:end].split(b"\n")))]
            yield from lines
            if lines or not end:
                return

    def rewind(self) -> None:
        """Start again from the beginning of the file that has the path now."""
        self._file.close()
        self._file, self._offset = self._path.open("ab+"), 0

    def is_replaced(self) -> bool:
        """Whether the file was shortened or replaced since it was opened. Raises OSError."""
        opened = os.fstat(self._file.fileno())
        is_other = not os.path.samestat(opened, self._path.stat())
        return is_other or opened.st_size < self._offset


def read_metrics(path: Path, *, newest: bool = False) -> Iterator[dict[str, Any]]:
    """Every complete line of a journal, in order; NaN and infinities as floats.

    `newest`: only those in its last READ_BYTES. A journal that does not exist has no lines.
    """
    try:
        with path.open("rb") as journal:
            if newest:
                journal.seek(max(0, path.stat().st_size - READ_BYTES))
            yield from filter(None, map(parse_line, journal))
    except FileNotFoundError:
        return


def last_trained_step(path: Path) -> int:
    """The step that training had reached by the end of a journal; 0 if it has no line."""
    return max((line["step"] for line in read_metrics(path, newest=True)), default=0)


# --- what a server should have --------------------------------------------------------------------


def journal_metrics(run_dir: Path) -> set[str]:
    """Names of every metric in the journal and in the lines that resumes have superseded."""
    lines = itertools.chain(read_metrics(run_dir / JOURNAL), read_metrics(run_dir / SUPERSEDED))
    return {name for line in lines for name in line} - {"step", "time"}


def first_step_not_in_journal(run_dir: Path, recorded: Mapping[str, Recorded]) -> int | None:
    """The first step with a recorded point that the journal does not have; None if it has all.

    Points are compared by metric, step and time: a step that was trained again has another time.
    """
    missing = {metric: set(points) for metric, points in recorded.items()}
    for line in read_metrics(run_dir / JOURNAL):
        for point in points_of(line):
            missing.get(point.metric, set()).discard((point.step, point.milliseconds))
    return min((step for points in missing.values() for step, _ in points), default=None)


# --- lines ----------------------------------------------------------------------------------------


def parse_line(raw: bytes) -> dict[str, Any] | None:
    """The JSON object of one line; None if it is not an object with a step."""
    try:
        line = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    if not isinstance(line, dict) or type(line.get("step")) is not int:
        return None
    return {
        name: _NOT_FINITE.get(value, value) if isinstance(value, str) else value
        for name, value in line.items()
    }


def _to_json(value: float) -> float | str:
    number = value if isinstance(value, (bool, int)) else float(value)
    return number if math.isfinite(number) else str(number)
