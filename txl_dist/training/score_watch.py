"""ScoreWatch: the part of training in `evaluation.on: workers`, on rank 0.

It starts `txl eval --watch RUN`, starts it again when it dies, and announces the scores that it
finds in RUN/evaluations to the observers of the run. Nothing here ends training.
"""

import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial

import torch

from data_pipeline.system.signals import PARENT_VARIABLE
from txl_dist.runtime.world import World
from txl_dist.training.context import Beginning, RankContext
from txl_dist.training.observer import Observer, Observers
from txl_dist.training.run_directory import RunDirectory
from txl_dist.training.scores import FOLDER, ScoreTable, StepScore
from txl_dist.training.state import TrainState
from txl_dist.training.step import StepResult

POLL_SECONDS = 1.0
"""Between two looks at the files of the process, and two collectives of ranks that wait for it."""
NOTICE_SECONDS = 10.0
"""Between two lines about the scores that the end of a run waits for."""
MAX_STARTS = 3
"""Of the process, which scores in a worker of its own and so dies rarely."""
CLOSE_TIMEOUT_SECONDS = 5.0
NICENESS = 5
"""Niceness of the process, so that training gets the CPU cores first."""

log = logging.getLogger("txl_dist.training")


class ScoreWatch(Observer):
    """Waits for the scores of the steps whose checkpoints a process scores.

    `on` is that of `txl eval`. `announce` is called with each score and its gain.
    """

    def __init__(
        self,
        directory: RunDirectory,
        table: ScoreTable,
        *,
        on: str,
        timeout_seconds: float,
        announce: Callable[[StepScore, float | None], None],
    ) -> None:
        self._directory, self._table, self._on = directory, table, on
        self._timeout_seconds, self._announce = timeout_seconds, announce
        self._log = directory.logs / "evaluation.log"
        self._process: subprocess.Popen[bytes] | None = None
        self._num_starts = self._num_bytes = 0
        self._progressed_at = self._polled_at = self._noticed_at = time.monotonic()
        self._has_given_up = False

    def start(self, state: TrainState) -> None:
        self._start_process()

    def step(self, state: TrainState, result: StepResult) -> None:
        if time.monotonic() - self._polled_at >= POLL_SECONDS:
            self.poll()

    def poll(self) -> None:
        """Announce what is new, and start the process again if it has died."""
        self._polled_at = time.monotonic()
        for score, gain in self._table.refresh():
            self._announce(score, gain)
        if self._process is not None and (code := self._process.poll()) is not None:
            self._process = None
            if self._num_starts < MAX_STARTS:
                self._start_process()
            else:
                self._give_up(
                    f"the process that scores checkpoints has ended {MAX_STARTS} times, at last "
                    f"with code {code}; its output is in {self._log}"
                )

    def _give_up(self, reason: str) -> None:
        self._has_given_up = True
        log.warning(
            "evaluation | WARNING: no more scores, also not of steps %s: %s. The next start of the "
            "run computes them",
            ", ".join(map(str, self._table.waiting())),
            reason,
        )

    def is_over(self) -> bool:
        """Poll at the end of a run, whose checkpoints are written: whether none waits any more."""
        self.poll()
        waiting, now, num_bytes = self._table.waiting(), time.monotonic(), 0
        with suppress(OSError):  # scores and the sums of batches
            paths = (self._directory.path / FOLDER).iterdir()
            num_bytes = sum(path.stat().st_size for path in paths)
        if num_bytes != self._num_bytes:
            self._num_bytes, self._progressed_at = num_bytes, now
        if not waiting or self._has_given_up:
            return True
        if now - self._progressed_at > self._timeout_seconds:
            self._give_up(f"no progress in {self._timeout_seconds:g} s")
        elif now - self._noticed_at > NOTICE_SECONDS:
            self._noticed_at = now
            log.info("waiting for the scores of steps %s", ", ".join(map(str, waiting)))
        return self._has_given_up

    def _start_process(self) -> None:
        self._num_starts += 1
        environment = {
            **os.environ,
            PARENT_VARIABLE: "1",
            "OMP_NUM_THREADS": str(torch.get_num_threads()),  # may change the last bit of a score
        }
        if (device := _spare_device()) is not None:
            environment["CUDA_VISIBLE_DEVICES"] = device
        command = ["-m", "txl_dist", "eval", "--watch", str(self._directory.path), "--on", self._on]
        with self._log.open("ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, *command],
                stdin=subprocess.PIPE,  # closed when this process ends
                stdout=output,
                stderr=output,
                env=environment,
                start_new_session=True,  # Ctrl-C must reach only training, which ends this process
            )
        with suppress(OSError):  # refused in some containers
            os.setpriority(os.PRIO_PROCESS, self._process.pid, NICENESS)

    def close(self) -> None:
        """End the process. What is unfinished is scored after the next start."""
        if self._process is None:
            return
        self._process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(CLOSE_TIMEOUT_SECONDS)
        self._process.kill()
        self._process.wait()


def open_score_watch(
    rank: RankContext, beginning: Beginning, observers: Observers
) -> Callable[[object], bool] | None:
    """Start the process on rank 0; returns the wait for its scores. None: nothing is to be done."""
    if rank.data.evaluation is None or rank.config.evaluation.on != "workers":
        return None
    watch = None
    if beginning.scores is not None:
        watch = ScoreWatch(
            rank.directory,
            beginning.scores,
            on=rank.job.evaluate_on,
            timeout_seconds=rank.config.training.rank_timeout_seconds,
            announce=observers.score,
        )
        observers.all.append(watch)
        rank.stack.callback(watch.close)
    return partial(wait_for_scores, rank.world, watch)


def wait_for_scores(world: World, watch: ScoreWatch | None, stop: object) -> bool:
    """Wait until rank 0 expects no score; False if `stop` is true on any rank. Collective."""
    world.activity.name = "evaluation of the last checkpoints"
    while True:
        answers = world.all_gather((watch is None or watch.is_over(), bool(stop)))
        if any(is_stopped for _, is_stopped in answers):
            return False
        if all(is_over for is_over, _ in answers):
            return True
        time.sleep(POLL_SECONDS)


def _spare_device() -> str | None:
    """The GPU of the process: one that no rank on this host uses, or else that of rank 0."""
    num_devices = torch.cuda.device_count()
    if num_devices == 0:
        return None
    num_ranks = int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("WORLD_SIZE", "1"))
    index = num_ranks if num_ranks < num_devices else 0
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return visible.split(",")[index] if visible else str(index)
