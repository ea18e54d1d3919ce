"""The local journal: every metric of a run, one JSON object a line of RUN/metrics.jsonl.

Training writes here and nowhere else; whatever happens to a tracking server, this file is whole.
A line is `{"step": int, "tokens": int, "time": seconds since the epoch, <metric>: number, ...}`, in
the order of its steps. NaN and the infinities, which JSON lacks, are written as the strings "nan",
"inf" and "-inf"; `read_metrics` gives them back as floats. Sending is `sender.py`'s.
"""

import contextlib
import errno
import json
import logging
import math
import os
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from data_pipeline.storage.atomic_files import fsync_directory

JOURNAL = "metrics.jsonl"
SUPERSEDED = "logs/metrics-superseded.jsonl"
MAX_HELD_LINES = 10_000
"""Lines kept in memory while the disk takes none; beyond it the oldest are lost."""

BYTES_A_READ = 1 << 19

_log = logging.getLogger("txl_dist.tracking")
_NOT_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


class MetricsJournal:
    """Appends to a run's metrics.jsonl: one write a line, so a killed process tears at most one.

    Opening repairs what a kill left: a torn last line is cut off. A full disk is warned of once and
    never raised; lines wait in memory until it takes them.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._superseded = path.parent / SUPERSEDED
        path.parent.mkdir(parents=True, exist_ok=True)
        self._held: deque[bytes] = deque(maxlen=MAX_HELD_LINES)
        self._warned = False
        self._file = self._open()

    def write(self, line: Mapping[str, float]) -> None:
        """Journal one step: `step`, `tokens`, `time` and its metrics.

        Steps never go down: a later line of an earlier step is not sent to the tracking server.
        """
        values = {name: _to_json(value) for name, value in line.items()}
        self._held.append(json.dumps(values, allow_nan=False).encode() + b"\n")
        self._write_held(sync=False)

    def _write_held(self, *, sync: bool) -> None:
        try:
            while self._held:
                self._append(self._held[0])
                self._held.popleft()
            if sync:
                os.fsync(self._file)
        except OSError as error:
            if not self._warned:
                _log.warning(
                    "%s cannot be written (%s): training goes on and its metrics wait in memory. "
                    "Free some space there.",
                    self.path,
                    error.strerror,
                )
            self._warned = True

    def truncate_after(self, step: int, *, redone: str | None = None) -> None:
        """Take the lines of later steps out, as a resume from `step` writes them anew.

        So will it the line of `step` itself that has the metric `redone`, if that is given. They go
        to RUN/logs/metrics-superseded.jsonl first; then the journal is replaced in one motion.
        Lines that are no JSON object, left by a disk that failed, are dropped.
        """
        self._superseded.parent.mkdir(parents=True, exist_ok=True)
        aside = self.path.with_name(f".{self.path.name}.{os.getpid()}.tmp")
        try:
            with aside.open("wb") as kept, self._superseded.open("ab") as superseded:
                with self.path.open("rb") as journal:
                    for raw in journal:
                        line = parse_line(raw)
                        if line is not None:
                            again = line["step"] == step and redone in line
                            stays = line["step"] <= step and not again
                            (kept if stays else superseded).write(raw)
                for file in (superseded, kept):
                    file.flush()
                    os.fsync(file.fileno())
            aside.replace(self.path)
        finally:
            aside.unlink(missing_ok=True)
        fsync_directory(self.path.parent)
        self.close()
        self._file = self._open()

    def sync(self) -> None:
        """Wait until the lines are on disk, so that they outlive a power cut with a checkpoint.

        Tries again what a full disk refused; like `write` it warns and never raises.
        """
        self._write_held(sync=True)

    def close(self) -> None:
        """Close the file; a second time does nothing."""
        if self._file >= 0:
            os.close(self._file)
        self._file = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _open(self) -> int:
        descriptor = os.open(
            self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, mode=0o644
        )
        _repair_end(descriptor)
        return descriptor

    def _append(self, line: bytes) -> None:
        before = os.fstat(self._file).st_size
        written = 0
        try:
            written = os.write(self._file, line)
        finally:
            if written != len(line):  # a disk filling up takes part of a line
                os.ftruncate(self._file, before)
        if written != len(line):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class JournalTail:
    """The whole lines of a journal from its beginning, as they come.

    When `is_replaced` (a resume takes steps back), `rewind` to read the new file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor = -1
        self._offset = 0

    def lines(self) -> Iterator[dict[str, Any]]:
        """What is there and was not yet given, at most BYTES_A_READ of it."""
        if self._descriptor < 0:
            self.rewind()
        if self._descriptor < 0:
            return
        data = os.pread(self._descriptor, BYTES_A_READ, self._offset)
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        for raw in whole.split(b"\n"):
            line = parse_line(raw)
            if line is not None:
                yield line

    def rewind(self) -> None:
        """Begin again, with the file that has the name now."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor, self._offset = -1, 0
        with contextlib.suppress(FileNotFoundError):  # training has not written yet
            self._descriptor = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)

    def is_replaced(self) -> bool:
        """Whether the lines given so far are of a file that was cut or replaced by another."""
        if self._descriptor < 0:
            return False
        mine = os.fstat(self._descriptor)
        try:
            named = self._path.stat()
        except OSError:
            return False
        is_other = (named.st_dev, named.st_ino) != (mine.st_dev, mine.st_ino)
        return is_other or mine.st_size < self._offset


def read_metrics(path: Path) -> Iterator[dict[str, Any]]:
    """Every whole line of a journal, in order; NaN and infinities as floats."""
    with path.open("rb") as journal:
        for raw in journal:
            line = parse_line(raw)
            if line is not None:
                yield line


def parse_line(raw: bytes) -> dict[str, Any] | None:
    """The object of one journal line, or None if it is not one."""
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


def _repair_end(descriptor: int) -> None:
    size = os.fstat(descriptor).st_size
    tail, start = b"", size
    while start > 0 and b"\n" not in tail:
        step = min(start, 1 << 16)
        start -= step
        tail = os.pread(descriptor, step, start) + tail
    torn = tail[tail.rfind(b"\n") + 1 :]
    if not torn:
        return
    if parse_line(torn) is not None:  # whole but for its line end
        os.write(descriptor, b"\n")
    else:
        os.ftruncate(descriptor, size - len(torn))
