"""One rank of a run, from start to exit: the entry of every launcher.

`python -m txl_dist.training.rank` reads a TrainJob from standard input, and RANK, WORLD_SIZE,
LOCAL_RANK, MASTER_ADDR and MASTER_PORT from the environment. An error is returned to the launcher
as one JSON line on standard output, which contains nothing else. (A file could not be written on a
full disk.) The exit code is that of the error. The process also ends when standard input is closed,
which means that the launcher has died.
"""

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from data_pipeline.processes.parent import end_with_parent
from data_pipeline.processes.process_exit import exit_without_teardown
from data_pipeline.processes.stop_signals import StopSignals, print_unbuffered
from txl_dist.checkpoint.directory import resume_advice
from txl_dist.errors import LostRankError, PreemptedError, TxlError, error_to_json
from txl_dist.runtime.allocation import keep_freed_memory
from txl_dist.runtime.collective_watch import CollectiveWatch, lost_rank_error
from txl_dist.runtime.fault_injection import fault_point
from txl_dist.runtime.stop_request import STOPPING, StopRequest, exit_before_first_step
from txl_dist.runtime.world import World
from txl_dist.training.build import build_trainer
from txl_dist.training.job import TrainJob
from txl_dist.training.run_directory import RunDirectory
from txl_dist.training.state import TrainState

MAX_MESSAGE_LENGTH = 30_000
"""Of the error for the launcher. Fits into a pipe's buffer, so writing never blocks."""

log = logging.getLogger("txl_dist.training")


def train_rank(job: TrainJob, world: World, *, announce_stop: bool = False) -> TrainState:
    """Take part in a run until it ends. Errors are logged and raised.

    A stop signal before the first step ends the process immediately, with exit code 75. A later one
    is a request to stop after the step; `announce_stop` confirms it on standard error.
    """
    fault_point("start")
    keep_freed_memory()  # before the first large allocation
    directory = RunDirectory(job.run_path)
    directory.create()
    limit_seconds = job.config.training.rank_timeout_seconds
    with (
        _logging_to(directory.log(world.rank)),
        StopSignals(on_request=exit_before_first_step) as signals,
        CollectiveWatch(world.activity, rank=world.rank, limit_seconds=limit_seconds),
    ):
        try:
            with ExitStack() as stack:
                stop = StopRequest(signals, Path(job.stop_file) if job.stop_file else None)
                trainer = build_trainer(job, world, directory, stack, stop)
                # From here on there is a state to save, so a signal no longer ends the process.
                signals.on_request = lambda _: print_unbuffered(STOPPING) if announce_stop else None
                state = trainer.run()
            log.info("finished at step %d", state.step)
            return state
        except PreemptedError as request:
            log.info("%s", request)
            raise
        except TxlError as error:
            log.error("%s: %s", type(error).__name__, error)
            raise
        except Exception as error:
            log.exception("rank %d failed", world.rank)
            # If a collective has failed, the cause is on another rank: report that instead.
            lost = lost_rank_error(
                error, world.activity, rank=world.rank, limit_seconds=limit_seconds
            )
            if lost is None:
                raise
            lost = LostRankError(f"{lost}. {resume_advice(job.run_path)}")
            log.error("%s", lost)
            raise lost from error


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


def _take_standard_output() -> int:
    """A copy of standard output for the error line; prints of libraries go to standard error."""
    error_output = os.dup(1)
    os.dup2(2, 1)
    return error_output


def main() -> int:
    """Read the job, train, return the exit code."""
    error_output = _take_standard_output()
    try:
        job = TrainJob.from_json(sys.stdin.buffer.readline())
        world = World.from_environment()
        end_with_parent(0)  # the launcher holds the other end of this pipe
        train_rank(job, world)
        world.leave()
    except TxlError as error:
        os.write(error_output, error_to_json(error, max_chars=MAX_MESSAGE_LENGTH))
        return error.exit_code
    except Exception:
        log.exception("this rank failed")  # on standard error: the log file may not be open yet
        return 1
    return 0


if __name__ == "__main__":
    exit_without_teardown(main())
