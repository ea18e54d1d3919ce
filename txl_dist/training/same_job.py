"""Verifies that all ranks run the same config on the same data with the same code.

Ranks on machines with different versions or data would otherwise train without any error, on
gradients of different computations.
"""

import hashlib
from importlib.metadata import version

from txl_dist.config.run_config import RunConfig
from txl_dist.errors import ConfigError
from txl_dist.runtime.process import LIBRARIES, source_digest
from txl_dist.runtime.world import World
from txl_dist.training.data import TrainingData


def require_same_job(config: RunConfig, data: TrainingData, world: World) -> None:
    """Raises ConfigError on every rank, listing what differs by rank. Collective."""
    local = {
        "txl-dist": version("txl-dist"),
        **{name: version(name) for name in LIBRARIES},
        "sources": source_digest()[:16],
        # The resolved config: overrides on the command line count too.
        "config": hashlib.sha256(config.model_dump_json().encode()).hexdigest()[:16],
        **data.digests,
    }
    jobs = world.all_gather(local)
    lines = []
    for name in dict.fromkeys(name for job in jobs for name in job):
        if len({job.get(name) for job in jobs}) > 1:
            values = (f"rank {rank} {job.get(name)}" for rank, job in enumerate(jobs))
            lines.append(f"\n  {name}: {', '.join(values)}")
    if lines:
        raise ConfigError(
            f"the ranks differ and would not train one model:{''.join(lines)}\nInstall the same "
            "version on all machines, and give every rank the same command and the same data "
            "(txl data verify DIR on each machine)"
        )
