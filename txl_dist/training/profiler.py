"""`training.profile_steps`: a trace of some steps by torch.profiler, in RUN/profile.

    rank-0-step-100.json   for chrome://tracing or https://ui.perfetto.dev; one file for each part
                           of a range that a resume or a change of settings divides
    rank-0-step-100.txt    the operations that took most of the time

A trace covers everything the rank does from the first of these steps to the last one: data, step,
report and checkpoints. Profiling slows these steps down; other steps are not affected.
"""

import logging
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from data_pipeline.system.files import write_file

ROWS = 40
"""Operations in the table."""

log = logging.getLogger(__name__)


class StepProfiler:
    """Call `before_step` before every step of the run, and `close` after the last one."""

    def __init__(self, directory: Path, *, rank: int, first_step: int, last_step: int) -> None:
        self._directory, self._rank = directory, rank
        self._first_step, self._last_step = first_step, last_step
        self._path = directory
        self._profile: profile | None = None

    def before_step(self, step: int) -> None:
        """Start before the first step of the range; write the files after the last one."""
        is_inside = self._first_step <= step <= self._last_step
        if is_inside and self._profile is None:
            self._path = self._directory / f"rank-{self._rank}-step-{step}.json"
            self._profile = profile(activities=_activities())
            self._profile.start()
        elif not is_inside:
            self.close()

    def close(self) -> None:
        """Stop and write the files, if a trace is being recorded."""
        recorded, self._profile = self._profile, None
        if recorded is None:
            return
        recorded.stop()
        order = "self_cuda_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
        table = recorded.key_averages().table(sort_by=order, row_limit=ROWS)
        try:
            self._path.parent.mkdir(exist_ok=True)
            unfinished = self._path.with_suffix(".unfinished")
            recorded.export_chrome_trace(str(unfinished))
            unfinished.replace(self._path)
            write_file(self._path.with_suffix(".txt"), table.encode())
        except (OSError, RuntimeError) as error:  # a full disk must not end the run
            log.warning("the profile %s could not be written: %s", self._path, error)
        else:
            log.info("profile | %s", self._path)


def _activities() -> list[ProfilerActivity]:
    activities = [ProfilerActivity.CPU]
    return [*activities, ProfilerActivity.CUDA] if torch.cuda.is_available() else activities
