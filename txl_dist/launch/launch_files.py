"""LaunchFiles: how the launcher and the ranks of one launch communicate.

A launch is one start of a run by a person; all starts of its ranks belong to it. The files are in
the run directory, which every node sees. Files, because a stop signal may reach only the launcher
or one rank, and a rank that died cannot report anything. Plain processes use `stop` and `saved`,
Ray all of them.
"""

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from data_pipeline.system.files import try_lock, wait_for_lock, write_file
from txl_dist.checkpoint.attempts import FOLDER, newest_of_launch
from txl_dist.errors import TxlError, error_from_json, error_to_json
from txl_dist.training.job import TrainJob

MAX_CHARS = 4000
"""Longest error text of a rank that is stored."""


@dataclass(frozen=True)
class RankLocation:
    """The process of a rank."""

    node_id: str
    address: str
    pid: int


@dataclass(frozen=True)
class RankFailure:
    """One failure as Ray Train reports it: it ends all ranks, with an error text for some."""

    died: tuple[int, ...]
    """Ranks whose process ended. The others stopped for that reason or because of an error."""
    errors: dict[int, str]
    is_preemption: bool = False
    """Ray attributes it to a node that is drained or reclaimed."""


class LaunchFiles:
    """RUN/.launch-ID.*; removed when the launch ends, or after it died by the next launch."""

    def __init__(self, run: Path, launch_id: str) -> None:
        self._base = run.resolve() / f".launch-{launch_id}"
        self.stop = self._base.with_suffix(".stop")
        """Created by the launcher, or a rank that received a signal: the ranks save and stop."""
        self._launcher = self._base.with_suffix(".launcher")
        """Locked by the launcher as long as it runs."""
        self.saved = self._base.with_suffix(".saved")
        """Created by rank 0 when this launch has saved its first checkpoint."""
        self._failures = self._base.with_suffix(".failures")
        self._num_failures_read = 0

    @contextmanager
    def held(self) -> Iterator[None]:
        """For the launcher: remove the files of dead launches now, and its own at the end."""
        descriptor = os.open(self._launcher, os.O_WRONLY | os.O_CREAT, 0o644)
        try:
            wait_for_lock(descriptor, timeout_seconds=1)  # another launcher may be testing it
            self._remove_of_dead_launches()
            yield
        finally:
            self._remove("*")
            os.close(descriptor)

    def _remove_of_dead_launches(self) -> None:
        """Another launch may run, even if its ranks do not have the lock of the directory yet."""
        for path in self._base.parent.glob(".launch-*.launcher"):
            try:
                descriptor = os.open(path, os.O_WRONLY)
            except FileNotFoundError:  # that launch has just ended
                continue
            try:
                if try_lock(descriptor, if_unsupported=False):
                    LaunchFiles(path.parent, path.stem.removeprefix(".launch-"))._remove("*")
            finally:
                os.close(descriptor)

    def _remove(self, pattern: str) -> None:
        # ..launch-*: temporary files of killed ranks (system/files.py).
        for name in (f"{self._base.name}.{pattern}", f".{self._base.name}.{pattern}.tmp"):
            for path in self._base.parent.glob(name):
                path.unlink(missing_ok=True)

    def job_after_restart(self, job: TrainJob) -> TrainJob:
        """The job of restarted ranks: this launch's checkpoints replace the command's --resume."""
        has_begun = self.saved.exists()
        if job.resume == "never" and not has_begun:
            # An attempt is recorded after the check that there was no run. A rank that was killed
            # before it created `saved` may have left a checkpoint.
            has_begun = newest_of_launch(self._base.parent / FOLDER, job.launch_id) is not None
        return job.model_copy(update={"resume": "auto"}) if has_begun else job

    def write_location(self, rank: int, location: RankLocation) -> None:
        """Called by a rank when it starts."""
        write_file(self._location_path(rank), json.dumps(asdict(location)).encode())

    def locations(self, num_ranks: int) -> dict[int, RankLocation]:
        """The ranks that have started since the last `remove_locations`."""
        paths = {rank: self._location_path(rank) for rank in range(num_ranks)}
        return {
            rank: RankLocation(**json.loads(path.read_text()))
            for rank, path in paths.items()
            if path.exists()
        }

    def remove_locations(self) -> None:
        self._remove("rank-*")

    def reset(self) -> None:
        """Remove stop request, errors and locations of ranks that have ended; others will start."""
        for pattern in ("stop", "error-*", "rank-*"):
            self._remove(pattern)

    def write_error(self, rank: int, error: TxlError) -> None:
        """Called by a rank: the error that ended it, which a restart would only repeat."""
        write_file(self._base.with_suffix(f".error-{rank:05d}"), error_to_json(error))

    def error(self) -> TxlError | None:
        """The error of the lowest rank that has written one."""
        for path in sorted(self._base.parent.glob(f"{self._base.name}.error-*")):
            return error_from_json(path.read_bytes())
        return None

    def append_failure(
        self, errors: Mapping[int, Exception], *, died: tuple[int, ...], is_preemption: bool = False
    ) -> None:
        """Called in Ray Train's controller, on the launcher's node."""
        texts = {rank: (str(error) or repr(error))[:MAX_CHARS] for rank, error in errors.items()}
        record = {"died": died, "errors": texts, "is_preemption": is_preemption}
        line = json.dumps(record) + "\n"
        descriptor = os.open(self._failures, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            os.write(descriptor, line.encode())
        finally:
            os.close(descriptor)

    def new_failures(self) -> list[RankFailure]:
        """Failures that were appended since the last call."""
        if not self._failures.exists():
            return []
        # Without the last line while it is being written.
        complete = self._failures.read_text().rpartition("\n")[0]
        lines = complete.splitlines()[self._num_failures_read :]
        self._num_failures_read += len(lines)
        records = [json.loads(line) for line in lines]
        return [
            RankFailure(
                died=tuple(record["died"]),
                errors={int(rank): text for rank, text in record["errors"].items()},
                is_preemption=record["is_preemption"],
            )
            for record in records
        ]

    def _location_path(self, rank: int) -> Path:
        return self._base.with_suffix(f".rank-{rank}")
