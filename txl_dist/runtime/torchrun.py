"""Detect whether torchrun started this process as a rank.

RANK or MASTER_ADDR alone are not sufficient, because they often remain set in shells, notebooks and
job scripts. A process is a rank only if it has the complete set of variables that torchrun gives to
its workers. A job script that starts the ranks itself sets them too (`cluster/deploy/slurm.sh`).
"""

import os
from collections.abc import Mapping

TORCHRUN_VARIABLES = (
    "RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
    "LOCAL_RANK", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RUN_ID",
)  # fmt: skip


def is_torchrun(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether this process has the complete set."""
    return all(environment.get(name) for name in TORCHRUN_VARIABLES)


def stray_variables(environment: Mapping[str, str] = os.environ) -> list[str]:
    """Variables of an incomplete set: they are set, but torchrun did not start this process."""
    if is_torchrun(environment):
        return []
    return [name for name in TORCHRUN_VARIABLES if environment.get(name)]


def without_torchrun(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment for processes whose rank another launcher sets."""
    return {
        name: value
        for name, value in environment.items()
        if name not in TORCHRUN_VARIABLES and not name.startswith("TORCHELASTIC_")
    }
