"""The process of one rank: as `processes.py` starts it, or torchrun.

`python -m txl_dist.launch.rank_process` reads a TrainSpec from stdin, and RANK, WORLD_SIZE,
LOCAL_RANK, MASTER_ADDR and MASTER_PORT from the environment. An error is returned to the launcher
as one JSON line on standard output, which contains nothing else. (A file could not be written on a
full disk.) An error that is no TxlError is a line of text. The exit code is that of the error. The
process also ends when standard input is closed, which means that the launcher has died.

`torchrun -m txl_dist train CONFIG` calls `train_under_torchrun`.
"""

# torch is imported inside the functions: stop signals are handled before the slow imports.
import logging
import os
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, NoReturn

from data_pipeline.errors import printable
from data_pipeline.system.signals import StopSignals, end_with_parent, exit_without_teardown
from txl_dist.errors import ConfigError, PreemptedError, TxlError, error_to_json, print_error
from txl_dist.runtime.stop import exit_before_first_step

if TYPE_CHECKING:
    from txl_dist.training.spec import TrainSpec

MAX_MESSAGE_LENGTH = 30_000
"""Longest error message sent to the launcher. It fits into a pipe's buffer, so no write blocks."""
MAX_REASON_LENGTH = 300
"""Of an error that is no TxlError; the log of the rank has the rest."""

log = logging.getLogger("txl_dist.training")


def main() -> int:
    # The error line goes to standard output; prints of libraries go to standard error.
    error_output = os.dup(1)
    os.dup2(2, 1)
    with StopSignals(on_request=exit_before_first_step):
        try:
            from txl_dist.runtime.world import World
            from txl_dist.training.rank import train_rank
            from txl_dist.training.spec import TrainSpec

            spec = TrainSpec.from_json(sys.stdin.buffer.readline())
            world = World.from_environment()
            end_with_parent(0)  # the launcher holds the other end of this pipe
            train_rank(spec, world)
            world.leave()
        except TxlError as error:
            os.write(error_output, error_to_json(error, max_chars=MAX_MESSAGE_LENGTH))
            return error.exit_code
        except Exception as error:
            log.exception("this rank failed")  # on standard error: the log file may not be open yet
            reason = printable(f"{type(error).__name__}: {error}")[:MAX_REASON_LENGTH]
            os.write(error_output, f"{reason}\n".encode())
            return 1
        return 0


def train_under_torchrun(
    spec: "TrainSpec", options: Mapping[str, object], *, is_quiet: bool
) -> NoReturn:
    """Train as the rank that torchrun assigned to this process. Rank 0 prints its log, unless
    `is_quiet`.

    `options`: option of the command line -> value; None: not given. Raises ConfigError for those
    that torchrun decides: if they were ignored, the run would differ from them.
    """
    from txl_dist.runtime.world import World
    from txl_dist.tracking.process import wait_for_delivery
    from txl_dist.training.rank import train_rank

    world = World.from_environment()
    agreed = {"--ranks": str(world.num_ranks)}
    contradictions = [
        f"{option} {value}".rstrip()
        for option, value in options.items()
        if value not in (None, agreed.get(option))
    ]
    if contradictions:
        raise ConfigError(
            f"torchrun started this process as rank {world.rank} of {world.num_ranks}, which "
            f"contradicts {' and '.join(contradictions)}. Leave them out under torchrun, or run "
            "txl train without it"
        )
    if world.is_rank_zero and not is_quiet:
        print(
            f"rank 0 of {world.num_ranks}, started by torchrun "
            f"(run {os.environ['TORCHELASTIC_RUN_ID']})",
            flush=True,
        )
        logging.getLogger("txl_dist").addHandler(logging.StreamHandler(sys.stdout))
    try:
        train_rank(spec, world)
        world.leave()
        exit_code = 0
    except TxlError as error:
        print_error(error)
        exit_code = error.exit_code
    # Not after a stop request: torchrun grants a time that is not known here.
    if world.is_rank_zero and exit_code != PreemptedError.exit_code:
        with StopSignals() as signals:
            wait_for_delivery(spec.run_path, spec.config, signals, print)
    # Native threads abort a normal exit about once in 60 runs (data_pipeline/system/signals.py).
    exit_without_teardown(exit_code)


if __name__ == "__main__":
    exit_without_teardown(main())
