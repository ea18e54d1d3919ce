"""Downloads the newest checkpoint of `training.checkpoint_url` before a run resumes.

So a run continues on a machine with an empty disk. The checkpoint is then one of the run directory
like any other.
"""

import json
import logging
from contextlib import suppress

from data_pipeline.processes.background_queue import BackgroundQueue
from data_pipeline.storage.remote_path import RemotePath
from txl_dist.checkpoint.directory import CheckpointDirectory
from txl_dist.checkpoint.manifest import MANIFEST_NAME
from txl_dist.checkpoint.mirror import unreachable
from txl_dist.checkpoint.remote import RemoteCheckpoints, abandoned_names, step_of
from txl_dist.errors import CheckpointError, ConfigError
from txl_dist.runtime.background_wait import wait_for_queues
from txl_dist.runtime.world import World
from txl_dist.training.data import TrainingData
from txl_dist.training.given_checkpoint import named_checkpoint
from txl_dist.training.job import TrainJob
from txl_dist.training.state import GivenCheckpoint

log = logging.getLogger(__name__)


def download_newest(job: TrainJob, data: TrainingData, world: World) -> None:
    """Download the newest complete checkpoint, if it is newer than the local ones. Collective.

    With `--resume PATH` one of the trajectory that this command began at PATH, or else PATH itself,
    if it is a checkpoint of this run.

    Raises ConfigError if `--resume never` finds checkpoints at the URL, CheckpointError if the URL
    cannot be read or, with `--strict`, if its newest checkpoint is damaged.
    """
    url = job.config.training.checkpoint_url
    if url is None:
        return
    # In a thread: the other ranks wait longer than the limit of a collective, if it takes longer.
    queue = BackgroundQueue("download")
    try:
        if world.is_rank_zero:
            queue.submit(lambda: _download_newest(job, data, RemoteCheckpoints(RemotePath(url))))
        wait_for_queues(world, queue)
    finally:
        queue.close(timeout_seconds=0)


def _download_newest(job: TrainJob, data: TrainingData, remote: RemoteCheckpoints) -> None:
    try:
        names = remote.complete()
    except OSError as error:
        raise unreachable(remote, error) from error
    if names and job.resume == "never":
        raise ConfigError(
            f"training.checkpoint_url={remote.url} holds a run up to step {step_of(names[-1])}, "
            "and --resume never would overwrite it. Choose another URL, or resume that run with "
            "--resume auto"
        )
    checkpoints = CheckpointDirectory(job.run_path)
    checkpoints.path.mkdir(parents=True, exist_ok=True)
    local, abandoned = checkpoints.steps(), abandoned_names(checkpoints)
    for name in reversed(_wanted(names, checkpoints, remote, job=job, data=data)):
        if local and step_of(name) <= local[-1]:
            return
        if name in abandoned:  # by a rollback, which a kill or the store kept from removing it
            continue
        try:
            # First: once the checkpoint is there, the next start downloads nothing.
            remote.download_run_files(checkpoints.run)
            path = remote.download(name, checkpoints)
        except CheckpointError as error:
            if job.strict:
                raise
            log.warning("%s. An older checkpoint is used instead", error)
            continue
        except OSError as error:  # the store or the disk fails: this says nothing about the copy
            raise CheckpointError(
                f"{remote.at(name)} cannot be downloaded to {checkpoints.path}: "
                f"{error.strerror or error}. Run it again, or train without the copies: "
                "training.checkpoint_url=null"
            ) from error
        log.info("downloaded %s from %s", path, remote.at(name))
        return


def _wanted(
    names: list[str],
    checkpoints: CheckpointDirectory,
    remote: RemoteCheckpoints,
    *,
    job: TrainJob,
    data: TrainingData,
) -> list[str]:
    """The copies from which this command may resume, the one to prefer last."""
    if job.resume == "auto":
        return names
    named = named_checkpoint(job, data)
    given = [name for name in names if str(checkpoints.at(step_of(name)).absolute()) == named.path]
    return [*given, *(name for name in names if _resumed_from(remote, name) == named)]


def _resumed_from(remote: RemoteCheckpoints, name: str) -> GivenCheckpoint | None:
    with suppress(ValueError, LookupError, TypeError):  # damaged or older
        manifest = json.loads((remote.at(name) / MANIFEST_NAME).read_bytes())
        return GivenCheckpoint.model_validate(manifest["state"]["resumed_from"])
    return None
