"""AttemptFiles: how the launcher and the ranks of one start of a run speak to each other.

Small files in the run directory, which every node sees: a signal reaches the launcher only, and a
rank that dies cannot report where it was.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from data_pipeline.storage.atomic_files import write_file
from txl_dist.errors import TxlError, error_of


@dataclass(frozen=True)
class Place:
    """Where a rank runs."""

    node_id: str
    address: str
    pid: int


@dataclass(frozen=True)
class Failure:
    """What Ray Train said when it took the ranks down: one text for each rank it has one for."""

    died: tuple[int, ...]
    """Ranks whose process is gone. The others stopped because of them, or by an error of theirs."""
    errors: dict[int, str]


class AttemptFiles:
    """RUN/.attempt-ID.*; removed when the attempt ends, or by the next one."""

    def __init__(self, run: Path, attempt: str) -> None:
        self._base = run.resolve() / f".attempt-{attempt}"
        self.stop = self._base.with_suffix(".stop")
        """Exists once the ranks shall save and stop."""
        self.saved = self._base.with_suffix(".saved")
        """Exists once this attempt has saved a checkpoint."""
        self._failures = self._base.with_suffix(".failures")
        self._num_read = 0

    @staticmethod
    def remove_all(run: Path) -> None:
        """Remove those of every attempt; the run directory must be locked."""
        for path in run.glob(".attempt-*"):
            path.unlink(missing_ok=True)

    def remove(self) -> None:
        for path in self._base.parent.glob(f"{self._base.name}.*"):
            path.unlink(missing_ok=True)

    def write_place(self, rank: int, place: Place) -> None:
        """In a rank, when it begins."""
        path = self._base.with_suffix(f".rank-{rank}")
        temporary = path.with_name(f"{path.name}.tmp")
        temporary.write_text(json.dumps(asdict(place)))
        temporary.replace(path)

    def places(self, num_ranks: int) -> dict[int, Place]:
        """Where the ranks are that have begun and have not been given up."""
        paths = {rank: self._base.with_suffix(f".rank-{rank}") for rank in range(num_ranks)}
        return {
            rank: Place(**json.loads(path.read_text()))
            for rank, path in paths.items()
            if path.exists()
        }

    def forget_places(self, num_ranks: int) -> None:
        for rank in range(num_ranks):
            self._base.with_suffix(f".rank-{rank}").unlink(missing_ok=True)

    def write_end(self, rank: int, error: TxlError) -> None:
        """In a rank, for the launcher: what ended it, so that a restart could not help."""
        content = {"type": type(error).__name__, "message": str(error)}
        write_file(self._base.with_suffix(f".end-{rank:05d}"), json.dumps(content).encode())

    def end(self) -> TxlError | None:
        """What ended the lowest rank that has written it."""
        for path in sorted(self._base.parent.glob(f"{self._base.name}.end-*")):
            content = json.loads(path.read_text())
            return error_of(content["type"], content["message"])
        return None

    def append_failure(self, errors: Mapping[int, Exception], *, died: tuple[int, ...]) -> None:
        """In Ray Train's controller, on the launcher's node."""
        texts = {rank: str(error) or repr(error) for rank, error in errors.items()}
        line = json.dumps({"died": died, "errors": texts}) + "\n"
        descriptor = os.open(self._failures, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            os.write(descriptor, line.encode())
        finally:
            os.close(descriptor)

    def new_failures(self) -> list[Failure]:
        """Those appended since the last call."""
        if not self._failures.exists():
            return []
        lines = self._failures.read_text().splitlines()[self._num_read :]
        self._num_read += len(lines)
        read = [json.loads(line) for line in lines]
        return [
            Failure(
                died=tuple(one["died"]),
                errors={int(rank): text for rank, text in one["errors"].items()},
            )
            for one in read
        ]
