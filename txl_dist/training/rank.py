"""One rank of a run, from beginning to end: the entry of every launcher.

`python -m txl_dist.training.rank` reads a TrainJob from standard input and its place in the world
from RANK and its kin. It ends with the run's exit code, and at once if standard input closes: that
is the launcher having died, and ranks must not outlive it.
"""

import logging
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from txl_dist.allocation import keep_freed_memory
from txl_dist.checkpoint.manifest import TrainState
from txl_dist.errors import TxlError
from txl_dist.training.build import RankBuilder
from txl_dist.training.job import TrainJob
from txl_dist.training.run_directory import RunDirectory
from txl_dist.world import World

log = logging.getLogger("txl_dist.training")


def train_rank(job: TrainJob, world: World) -> TrainState:
    """Take part in a run until it ends; errors are logged and recorded for the launcher."""
    keep_freed_memory()
    directory = RunDirectory(job.run_path)
    directory.create()
    with _logging_to(directory.log(world.rank)):
        try:
            with ExitStack() as stack:
                state = RankBuilder(job, world, directory, stack).training().run()
            log.info("finished at step %d", state.step)
            return state
        except TxlError as error:
            log.error(
                "stopped by %s; see failure-%s-*.json here", type(error).__name__, job.attempt
            )
            directory.record_failure(job.attempt, world.rank, error)
            raise
        except Exception:
            log.exception("rank %d failed", world.rank)
            raise


@contextmanager
def _logging_to(path: Path) -> Iterator[None]:
    """Send this project's log to the rank's file while the rank runs."""
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
        with suppress(OSError):  # a full disk must not replace the error that is on its way
            handler.close()


def _die_with_launcher() -> None:
    """When the other end of standard input is gone, so is whoever wanted this run."""
    # Not through sys.stdin: its lock would be held when the interpreter shuts down.
    while os.read(0, 4096):
        pass
    os._exit(1)


def main() -> int:
    """Read the job, train, return the exit code."""
    try:
        job = TrainJob.from_json(sys.stdin.buffer.readline())
        world = World.from_environment()
    except TxlError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return error.exit_code
    threading.Thread(target=_die_with_launcher, daemon=True).start()
    try:
        train_rank(job, world)
    except TxlError as error:
        return error.exit_code
    except Exception:  # logged with its traceback
        return 1
    finally:
        world.leave()
    return 0


if __name__ == "__main__":
    sys.exit(main())
