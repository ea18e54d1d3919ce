"""The process of one rank, as `processes.py` starts it: `python -m txl_dist.launch.rank_process`.

Reads a TrainJob from standard input, and RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT
from the environment. An error is returned to the launcher as one JSON line on standard output,
which contains nothing else. (A file could not be written on a full disk.) The exit code is that of
the error. The process also ends when standard input is closed, which means that the launcher has
died.
"""

# torch is imported inside `_train`: stop signals are handled before the slow imports.
import logging
import os
import sys
from collections.abc import Callable

from data_pipeline.system.signals import StopSignals, exit_without_teardown
from txl_dist.errors import TxlError, error_to_json
from txl_dist.runtime.stop import exit_before_first_step

MAX_MESSAGE_LENGTH = 30_000
"""Longest error message sent to the launcher. It fits into a pipe's buffer, so no write blocks."""

log = logging.getLogger("txl_dist.training")


def main() -> int:
    """Read the job, train, return the exit code."""
    error_output = _take_standard_output()
    with StopSignals(on_request=exit_before_first_step):

        def report(error: TxlError) -> None:
            os.write(error_output, error_to_json(error, max_chars=MAX_MESSAGE_LENGTH))

        try:
            _train(report)
        except TxlError as error:
            report(error)
            return error.exit_code
        except Exception:
            log.exception("this rank failed")  # on standard error: the log file may not be open yet
            return 1
        return 0


def _take_standard_output() -> int:
    """A copy of standard output for the error line; prints of libraries go to standard error."""
    error_output = os.dup(1)
    os.dup2(2, 1)
    return error_output


def _train(report: Callable[[TxlError], None]) -> None:
    from data_pipeline.system.signals import end_with_parent
    from txl_dist.runtime.world import World
    from txl_dist.training.job import TrainJob
    from txl_dist.training.rank import train_rank

    job = TrainJob.from_json(sys.stdin.buffer.readline())
    world = World.from_environment()
    end_with_parent(0)  # the launcher holds the other end of this pipe
    train_rank(job, world, report_stop=report)
    world.leave()


if __name__ == "__main__":
    exit_without_teardown(main())
