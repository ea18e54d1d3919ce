"""Downloads checkpoints of `training.checkpoint_url` before a run resumes.

The newest one, so that a run continues on a machine with an empty disk, and those whose local files
are damaged. A downloaded checkpoint is one of the run directory like any other.
"""

import json
import logging
from collections.abc import Callable
from contextlib import suppress

from data_pipeline.system.remote_path import RemotePath
from data_pipeline.system.sources import shown
from data_pipeline.system.workers import BackgroundQueue
from txl_dist.checkpoint.attempts import FOLDER, newest_of_launch
from txl_dist.checkpoint.directory import CheckpointDirectory
from txl_dist.checkpoint.manifest import MANIFEST_NAME
from txl_dist.checkpoint.mirror import unreachable
from txl_dist.checkpoint.remote import (
    RemoteCheckpoints,
    abandoned_names,
    all_damaged,
    names_of,
    step_of,
)
from txl_dist.errors import CheckpointError, ConfigError, StoreError
from txl_dist.runtime.world import World, wait_for_queues
from txl_dist.training.compatibility import require_compatible
from txl_dist.training.data import TrainingData
from txl_dist.training.given_checkpoint import named_checkpoint
from txl_dist.training.job import TrainJob
from txl_dist.training.state import GivenCheckpoint, load_state

log = logging.getLogger(__name__)


def download_newest(job: TrainJob, data: TrainingData, world: World) -> None:
    """Download the newest complete checkpoint, if it is newer than the local ones. Collective.

    With `--resume PATH` one of the trajectory that this command began at PATH, or else PATH itself,
    if it is a checkpoint of this run.

    Nothing in the run directory changes if the copies belong to another run or do not fit the job.

    Raises ConfigError if they belong to another run than the local checkpoints, or if `--resume
    never` finds any; CheckpointError or DataError if the job cannot continue from them;
    CheckpointError if all copies are damaged, or with `--strict` the newest one; StoreError if the
    URL cannot be read, except at a restart by the same launch.
    """
    if url := job.config.training.checkpoint_url:
        remote = RemoteCheckpoints(RemotePath(url))
        _in_thread_of_rank_zero(lambda: _download_newest(job, data, remote), world)


def replace_by_copy(step: int, job: TrainJob, world: World) -> bool:
    """Replace the damaged checkpoint of a step by its copy; False without one. Collective."""
    url, replaced = job.config.training.checkpoint_url, []
    if url is None:
        return False

    def download() -> None:
        try:
            replaced.append(_replace_by_copy(step, job, RemoteCheckpoints(RemotePath(url))))
        except (CheckpointError, OSError) as error:
            log.warning("the copy of step %d at %s cannot be used: %s", step, shown(url), error)

    _in_thread_of_rank_zero(download, world)
    return world.broadcast(any(replaced))


def _in_thread_of_rank_zero(function: Callable[[], None], world: World) -> None:
    """Call it, while the other ranks wait longer than the limit of a collective if need be."""
    queue = BackgroundQueue("download")
    try:
        if world.is_rank_zero:
            queue.submit(function)
        wait_for_queues(world, queue, name="the download of a checkpoint")
    finally:
        queue.close(timeout_seconds=0)


def _replace_by_copy(step: int, job: TrainJob, remote: RemoteCheckpoints) -> bool:
    checkpoints = CheckpointDirectory(job.run_path)
    names = [name for name in remote.complete() if step_of(name) == step]
    # Unless its manifest is damaged, only the copy of this save: others are not of this trajectory.
    own = names_of([checkpoints.at(step)])
    abandoned = abandoned_names(checkpoints)
    usable = [name for name in names if name in own or (not own and name not in abandoned)]
    if usable:
        remote.download(usable[-1], checkpoints)  # the copy that LATEST names, if there are two
    return bool(usable)


def _download_newest(job: TrainJob, data: TrainingData, remote: RemoteCheckpoints) -> None:
    checkpoints = CheckpointDirectory(job.run_path)
    try:
        wanted = _usable_copies(checkpoints, remote, job=job, data=data)
    except OSError as error:
        if newest_of_launch(job.run_path / FOLDER, job.launch_id) is None:
            raise unreachable(remote, error) from error
        log.warning("%s does not respond; this launch has its checkpoints locally", remote.url)
        return
    checkpoints.path.mkdir(parents=True, exist_ok=True)
    local, damage = checkpoints.steps(), []
    for name in reversed(wanted):
        if local and step_of(name) <= local[-1]:
            return
        try:
            path = remote.download(name, checkpoints)
        except CheckpointError as error:
            if job.strict:
                raise
            damage.append(str(error))
            log.warning("%s. An older checkpoint is used instead", error)
            continue
        except OSError as error:  # the store or the disk fails: this says nothing about the copy
            raise StoreError(
                f"{remote.at(name)} cannot be downloaded to {checkpoints.path}: "
                f"{error.strerror or error}. Run it again, or train without the copies: "
                "training.checkpoint_url=null"
            ) from error
        log.info("downloaded %s from %s", path, remote.at(name))
        return
    if damage and not local:  # a new run would replace them
        raise all_damaged(remote, damage)


def _usable_copies(
    checkpoints: CheckpointDirectory,
    remote: RemoteCheckpoints,
    *,
    job: TrainJob,
    data: TrainingData,
) -> list[str]:
    """The copies from which this command may resume, the one to prefer last.

    Raises ConfigError, CheckpointError or DataError if they are not of this run or job, OSError if
    the store fails.
    """
    names = remote.complete()
    if names and job.resume == "never":
        raise ConfigError(
            f"training.checkpoint_url={remote.url} holds a run up to step {step_of(names[-1])}, "
            "and --resume never would overwrite it. Choose another URL, or resume that run with "
            "--resume auto"
        )
    wanted = _wanted(names, checkpoints, remote, job=job, data=data)
    if wanted:
        _require_own(wanted, checkpoints, remote, job=job, data=data)
    # A kill or the store may have kept a rollback from removing the copies of what it abandoned.
    abandoned = abandoned_names(checkpoints)
    return [name for name in wanted if name not in abandoned]


def _require_own(
    names: list[str],
    checkpoints: CheckpointDirectory,
    remote: RemoteCheckpoints,
    *,
    job: TrainJob,
    data: TrainingData,
) -> None:
    """Raise an error if the copies belong to another run, as far as that can be known."""
    if run_id := checkpoints.run_id():
        remote.require_run(run_id)
    elif not checkpoints.steps():
        name, manifest = remote.newest_manifest(names)
        path = remote.at(name)
        require_compatible(manifest, load_state(path, manifest), path, job=job, data=data)


def _wanted(
    names: list[str],
    checkpoints: CheckpointDirectory,
    remote: RemoteCheckpoints,
    *,
    job: TrainJob,
    data: TrainingData,
) -> list[str]:
    """The copies that belong to this command, the one to prefer last."""
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
