"""Whether torchrun started this process, as one rank of a group.

RANK or MASTER_ADDR alone prove nothing: they stay behind in shells, notebooks and job scripts.
Only the whole set that torchrun's agent gives to each of its processes makes a rank.
"""

import os
from collections.abc import Mapping

RANK_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
TORCHRUN_VARIABLES = (*RANK_VARIABLES, "LOCAL_RANK", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RUN_ID")


def is_torchrun(environment: Mapping[str, str] = os.environ) -> bool:
    """True in a process that torchrun started."""
    return all(environment.get(name) for name in TORCHRUN_VARIABLES)


def stray_variables(environment: Mapping[str, str] = os.environ) -> list[str]:
    """Variables of a rank that are set although torchrun did not start this process."""
    if is_torchrun(environment):
        return []
    return [name for name in TORCHRUN_VARIABLES if environment.get(name)]


def without_torchrun(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment for processes whose rank is decided by somebody else than torchrun."""
    return {
        name: value
        for name, value in environment.items()
        if name not in TORCHRUN_VARIABLES and not name.startswith("TORCHELASTIC_")
    }
