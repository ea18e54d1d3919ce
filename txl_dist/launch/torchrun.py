"""A rank that torchrun started: `torchrun -m txl_dist train CONFIG`."""

import logging
import os
import sys

from data_pipeline.system.signals import StopSignals, exit_without_teardown
from txl_dist.errors import ConfigError, PreemptedError, TxlError, print_error
from txl_dist.runtime.world import World
from txl_dist.tracking.process import wait_for_delivery
from txl_dist.training.job import TrainJob
from txl_dist.training.rank import train_rank


def train_as_rank(
    job: TrainJob,
    *,
    on: str | None,
    ranks: str | None,
    max_restarts: int | None,
    dry_run: bool,
) -> None:
    """Train as the rank that torchrun assigned to this process. Rank 0 prints its log."""
    # Options that torchrun decides are refused, not ignored: the run would differ from them.
    world = World.from_environment()
    contradictions = [f"--on {on}"] if on is not None else []
    contradictions += [f"--ranks {ranks}"] if ranks not in (None, str(world.num_ranks)) else []
    # torchrun restarts the ranks that it starts.
    contradictions += [f"--max-restarts {max_restarts}"] if max_restarts is not None else []
    contradictions += ["--dry-run"] if dry_run else []
    if contradictions:
        raise ConfigError(
            f"torchrun started this process as rank {world.rank} of {world.num_ranks}, which "
            f"contradicts {' and '.join(contradictions)}. Leave them out under torchrun, or run "
            "txl train without it"
        )
    if world.is_rank_zero:
        run_id = os.environ["TORCHELASTIC_RUN_ID"]
        print(f"rank 0 of {world.num_ranks}, started by torchrun (run {run_id})", flush=True)
        logging.getLogger("txl_dist").addHandler(logging.StreamHandler(sys.stdout))
    try:
        train_rank(job, world, announce_stop=world.is_rank_zero)
        world.leave()
        exit_code = 0
    except TxlError as error:
        print_error(error)
        exit_code = error.exit_code
    # Not after a stop request: torchrun grants a time that is not known here.
    if world.is_rank_zero and exit_code != PreemptedError.exit_code:
        with StopSignals() as signals:
            wait_for_delivery(job.run_path, job.config, signals, print)
    # Native threads abort a normal exit about once in 60 runs (data_pipeline/system/signals.py).
    exit_without_teardown(exit_code)
