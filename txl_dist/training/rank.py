"""One rank of a run, from start to exit: called by every launcher in the process of the rank.

`StopDeadline` ends this process in time after a stop request, whatever its main thread does. The
training loop answers a request after its step, by saving. That can take too long: a slow disk, a
step of minutes, a compilation, a collective that waits for a rank that is gone. Schedulers kill the
process after a grace period (Slurm, Kubernetes), and then no message says what was lost. So a
thread ends the process itself:

    before this start has completed a step   immediately; there is nothing to save
    later                                    `grace_seconds` after the request

A checkpoint that is being written then stays incomplete, and is never chosen; the one before it
stays valid. Not covered: native code that holds Python's lock, and a stopped process. A launcher
kills such a rank a few seconds later.
"""

import gc
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Self

from data_pipeline.processes.stop_signals import StopSignals, end_now, print_unbuffered
from txl_dist.checkpoint.directory import CheckpointDirectory, resume_advice
from txl_dist.errors import LostRankError, PreemptedError, TxlError
from txl_dist.runtime.activity import Activity
from txl_dist.runtime.allocation import keep_freed_memory
from txl_dist.runtime.collective_watch import CollectiveWatch, lost_rank_error
from txl_dist.runtime.determinism import deterministic
from txl_dist.runtime.fault_injection import fault_point
from txl_dist.runtime.stop_request import NOTHING_TRAINED, STOPPING, StopRequest
from txl_dist.runtime.world import World
from txl_dist.training.job import TrainJob
from txl_dist.training.loop import Trainer
from txl_dist.training.run_directory import RunDirectory
from txl_dist.training.setup import build_trainer
from txl_dist.training.state import TrainState

POLL_SECONDS = 0.1
REPORT_SECONDS = 2.0
"""Time limit for the message: on a file system that does not respond, writing it may block."""

log = logging.getLogger("txl_dist.training")


def train_rank(
    job: TrainJob,
    world: World,
    *,
    announce_stop: bool = False,
    report_stop: Callable[[PreemptedError], None] = lambda error: None,
    evaluate_on: str = "processes",
) -> TrainState:
    """Take part in a run until it ends. Errors are logged and raised.

    A stop request before the first step ends the process immediately, with exit code 75. A later
    one asks to stop after the step; `announce_stop` confirms it on standard error. If that takes
    longer than `training.grace_seconds`, the process ends too. Whenever a request ends the process,
    `report_stop` is called with the reason first. `evaluate_on`: see `RankContext`.
    """
    fault_point("start")
    keep_freed_memory()  # before the first large allocation
    directory = RunDirectory(job.run_path)
    directory.create()
    limit_seconds = job.config.training.rank_timeout_seconds
    watch = CollectiveWatch(
        world.activity,
        rank=world.rank,
        num_ranks=world.num_ranks,
        limit_seconds=limit_seconds,
        run=directory.path,
        on_gpu=world.device.type == "cuda",
    )
    with (
        deterministic(enabled=job.config.training.deterministic),
        _logging_to(directory.log(world.rank)),
        StopSignals() as signals,
        watch,
        StopDeadline(
            stop := StopRequest(signals, Path(job.stop_file) if job.stop_file else None),
            world.activity,
            run=job.run_path,
            grace_seconds=job.config.training.grace_seconds,
            announce=announce_stop,
            report=report_stop,
        ) as deadline,
    ):
        try:
            log.info("rank %d is up", world.rank)
            state = _train(job, world, directory, stop, deadline, evaluate_on)
            log.info("finished at step %d", state.step)
            return state
        except PreemptedError as request:
            log.info("%s", request)
            raise
        except TxlError as error:
            log.error("%s: %s", type(error).__name__, error)
            raise
        except Exception as error:
            # If a collective has failed, the cause is on another rank: report that instead.
            lost = lost_rank_error(
                error,
                world.activity,
                rank=world.rank,
                limit_seconds=limit_seconds,
                others=watch.describe_others(),
            )
            if lost is None:
                log.exception("rank %d failed", world.rank)
                raise
            lost = LostRankError(f"{lost}. {resume_advice(job.run_path)}")
            reason = str(error).partition("\n")[0]
            log.error("%s (%s: %s)", lost, type(error).__name__, reason)
            raise lost from error


def _train(
    job: TrainJob,
    world: World,
    directory: RunDirectory,
    stop: StopRequest,
    deadline: "StopDeadline",
    evaluate_on: str,
) -> TrainState:
    """Build all parts of the run and train, once for each change of settings, to its end."""
    with ExitStack() as run_stack:
        tracker = None
        while True:
            world.activity.reset()
            with ExitStack() as stack:
                trainer = build_trainer(
                    job,
                    world,
                    directory,
                    stack,
                    stop,
                    run_stack=run_stack,
                    tracker=tracker,
                    evaluate_on=evaluate_on,
                )
                deadline.begin_steps(partial(_step_of, trainer))
                state, num_steps = trainer.run(), trainer.config.num_steps
                tracker = trainer.saver.tracker
            if state.step >= num_steps:
                return state
            # Settings change after this step (`training.changes`): resume from its checkpoint.
            deadline.begin_steps(lambda: 0)  # until the next first step nothing can be lost
            del trainer
            gc.collect()  # frees the old engine before the new one is built
            job = job.model_copy(update={"resume": "auto"})


def _step_of(trainer: Trainer) -> int:
    return trainer.state.step


@contextmanager
def _logging_to(path: Path) -> Iterator[None]:
    """Write the log of this project's packages to a file."""
    handler = logging.FileHandler(path)
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%H:%M:%S"))
    loggers = [logging.getLogger(name) for name in ("txl_dist", "data_pipeline", "cluster")]
    for logger in loggers:
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeHandler(handler)
        with suppress(OSError):  # a full disk must not hide the error that ended the run
            handler.close()


class StopDeadline:
    """Watches for a stop request while the context is open.

    `report` is called with the error that describes what was lost, right before this process ends.
    """

    def __init__(
        self,
        stop: StopRequest,
        activity: Activity,
        *,
        run: Path,
        grace_seconds: float,
        announce: bool = False,
        report: Callable[[PreemptedError], None] = lambda error: None,
    ) -> None:
        self._stop, self._activity, self._run = stop, activity, run
        self._grace_seconds, self._announce, self._report = grace_seconds, announce, report
        self._current_step: Callable[[], int] = lambda: 0
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="stop-deadline", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        self._thread.join()

    def begin_steps(self, current_step: Callable[[], int]) -> None:
        """Start-up is over. `current_step` returns the number of the last completed step."""
        self._current_step = current_step

    def _watch(self) -> None:
        while not self._stop:
            if self._closed.wait(POLL_SECONDS):
                return
        # Only this rank may have received the signal; the others may be in a long evaluation.
        self._stop.share()
        if not self._activity.num_steps:
            self._end(lambda: f"{NOTHING_TRAINED}. {resume_advice(self._run)}")
            return
        if self._announce:
            print_unbuffered(STOPPING)
        if not self._closed.wait(self._grace_seconds):
            self._end(self._describe_loss)

    def _describe_loss(self) -> str:
        step, activity = self._current_step(), self._activity.name
        saved = CheckpointDirectory(self._run).steps()
        since = f"the checkpoint of step {saved[-1]}" if saved else "the start"
        num_lost = step - (saved[-1] if saved else 0)
        lost = f"the {num_lost} steps since {since} are lost" if num_lost > 0 else "no step is lost"
        return (
            f"ended training.grace_seconds={self._grace_seconds:g} after the stop request, while "
            f"busy with: {activity}; {lost}. {resume_advice(self._run)}. If a step and a "
            "checkpoint take longer, raise training.grace_seconds, and with it the time that the "
            "scheduler grants"
        )

    def _end(self, describe: Callable[[], str]) -> None:
        def report() -> None:
            error = PreemptedError(describe())
            self._report(error)
            log.warning("%s", error)

        reporter = threading.Thread(target=report, name="stop-report", daemon=True)
        reporter.start()
        reporter.join(REPORT_SECONDS)
        end_now()
