"""What a command with `--resume PATH` names, and what tells two commands apart (decision 43)."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from txl_dist.training.compatibility import trajectory_settings
from txl_dist.training.data import TrainingData
from txl_dist.training.job import TrainJob
from txl_dist.training.state import GivenCheckpoint

_CHANGES = "training.changes"


def named_checkpoint(job: TrainJob, data: TrainingData) -> GivenCheckpoint:
    """The PATH of a job, and its settings."""
    phase = data.phase
    corpora = [[corpus.name, corpus.digest, phase.shares[corpus.name]] for corpus in phase.corpora]
    settings = {**trajectory_settings(job.config), "data": corpora}
    # Links are not followed: their targets may differ from host to host.
    return GivenCheckpoint(path=str(Path(job.resume).absolute()), settings=settings)


def changed_settings(before: GivenCheckpoint, now: GivenCheckpoint, *, step: int) -> list[str]:
    """Keys of the settings that had another effect until `step`."""
    old, new = (_until(step, given.settings) for given in (before, now))
    return sorted(key for key in old.keys() | new.keys() if old.get(key) != new.get(key))


def _until(step: int, settings: Mapping[str, Any]) -> dict[str, Any]:
    changes = json.loads(settings.get(_CHANGES, "[]"))
    return {**settings, _CHANGES: [change for change in changes if change["step"] < step]}
