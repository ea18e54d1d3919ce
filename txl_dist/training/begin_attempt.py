"""Begins the next attempt of a run, which ends older ones (`txl_dist/checkpoint/attempts.py`)."""

import logging
from contextlib import suppress

from data_pipeline.system.remote_path import RemotePath
from txl_dist.checkpoint.attempts import (
    FOLDER,
    Attempt,
    AttemptRecord,
    newest_number,
    newest_of_launch,
)
from txl_dist.checkpoint.directory import CheckpointDirectory
from txl_dist.checkpoint.manifest import load_checkpoint_manifest
from txl_dist.checkpoint.mirror import unreachable
from txl_dist.checkpoint.remote import RemoteCheckpoints
from txl_dist.errors import CheckpointError
from txl_dist.runtime.world import World
from txl_dist.training.job import TrainJob
from txl_dist.training.resume_point import ResumePoint, run_id_of
from txl_dist.training.run_directory import RunDirectory

log = logging.getLogger(__name__)


def begin_attempt(
    job: TrainJob, directory: RunDirectory, world: World, point: ResumePoint | None
) -> Attempt:
    """Record the next attempt in the run directory. Collective.

    The attempt is recorded at `training.checkpoint_url` later, by `CheckpointMirror.open`: until
    then this start may be refused. Raises StoreError if the URL cannot be read, except at a restart
    by the same launch, and ConfigError if it has checkpoints of another run.
    """
    attempts: list[Attempt] = []

    def begin() -> None:
        run_id = run_id_of(point, directory.checkpoints)
        number = 1 + _newest_number(job, directory.checkpoints, run_id)
        record = AttemptRecord.of_this_process(number=number, launch_id=job.launch_id)
        folder = directory.path / FOLDER
        attempts.append(Attempt(record, folder, newest_of_launch(folder, job.launch_id)))
        attempts[0].add()
        log.info("%s", record)

    world.run_on_rank_zero(begin)
    attempt: Attempt = world.broadcast(attempts[0] if attempts else None)
    return attempt


def _newest_number(job: TrainJob, checkpoints: CheckpointDirectory, run_id: str) -> int:
    """The highest attempt number in the run directory, in its newest checkpoint and at the URL."""
    numbers = [newest_number(checkpoints.run / FOLDER)]
    if (step := checkpoints.newest_step()) is not None:
        with suppress(CheckpointError):  # damaged; the resume reports it
            numbers.append(load_checkpoint_manifest(checkpoints.at(step)).attempt)
    if url := job.config.training.checkpoint_url:
        remote = RemoteCheckpoints(RemotePath(url))
        try:
            remote.require_run(run_id)
            numbers.append(newest_number(remote.attempts))
        except OSError as error:
            # At a restart, an attempt elsewhere is found when this one is recorded at the URL.
            if newest_of_launch(checkpoints.run / FOLDER, job.launch_id) is None:
                raise unreachable(remote, error) from error
    return max(numbers)
