"""Distribute work units to workers, and count the finished and the reused ones."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from data_pipeline.preparation.work_units import Task, Unit, run_task
from data_pipeline.system.files import StagedDirectory
from data_pipeline.system.progress import Progress
from data_pipeline.system.workers import Workers


class UnitRunner:
    """Runs the work units of one staging directory. `staging` is its absolute path."""

    def __init__(
        self,
        staged: StagedDirectory,
        staging: Path,
        fingerprint: str,
        workers: Workers,
        progress: Progress,
    ) -> None:
        self.staged, self.staging = staged, staging
        self.progress = progress
        self.finished = self.reused = 0
        self._fingerprint, self._workers = fingerprint, workers

    def run(
        self, phase: str, units: Iterable[Unit], total_bytes: int
    ) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield (number, result) of every unit in the order in which they finish.

        Reports progress in bytes under the name `phase`.
        """
        sizes: dict[int, int] = {}

        def tasks() -> Iterator[Task]:
            for number, unit in enumerate(units):
                sizes[number] = unit.size
                yield Task(unit, self.staging, self._fingerprint)

        done_bytes = 0
        self.progress(phase, 0, total_bytes)
        for number, outcome in self._workers.map(run_task, tasks()):
            self.count(reused=outcome.reused)
            size = sizes.pop(number)
            # Reused units lower the total instead of raising the rate, which is of real work.
            if outcome.reused:
                total_bytes -= size
            else:
                done_bytes += size
            self.progress(phase, done_bytes, total_bytes)
            yield number, outcome.result

    def count(self, *, reused: bool) -> None:
        """Count one finished unit. From now on, staging is kept when the run is stopped."""
        self.staged.keep_staging = True
        self.finished += 1
        self.reused += reused
