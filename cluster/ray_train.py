"""Train with Ray Train: it starts the ranks, and ends all of them when one fails.

    launcher: train_on_ray -> Supervisor (main thread)
                           -> _fit -> Ray Train's controller   (thread; once per start of the ranks)
    worker:   _train_loop -> train_rank

Ray Train's own restarts, resizes and checkpoints are not used: the supervisor decides, and ranks
resume from the newest good checkpoint of the run directory, as under every other launcher
(docs/decisions/0026-elastic-ranks-and-preemption.md). Ray Train runs a rank in a thread, where no
signal can be caught. So the launcher catches the stop signals and creates a stop file, which the
training loop checks after every step.
"""

import os
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch

from cluster.cluster_monitor import ClusterMonitor
from cluster.connection import ray_connection
from cluster.placement import Placement, num_threads, place_ranks
from cluster.rank_plan import RankPlan
from cluster.rank_starts import RanksEnd
from cluster.ray_log import ray_log
from cluster.supervisor import Supervisor
from cluster.workers import RayWorkers
from txl_dist.checkpoint.attempts import FOLDER, newest_record
from txl_dist.checkpoint.directory import resume_advice
from txl_dist.errors import DivergedError, FencedError, LostRankError, PreemptedError, TxlError
from txl_dist.launch.launch_files import LaunchFiles, RankLocation
from txl_dist.launch.launcher import OnLine
from txl_dist.launch.rank_range import RankRange
from txl_dist.launch.supervision import RestartBudget
from txl_dist.runtime.world import World
from txl_dist.training.job import TrainJob
from txl_dist.training.rank import train_rank
from txl_dist.training.run_directory import RunDirectory
from txl_dist.training.scoring_worker import LoggedWorkers


def train_on_ray(
    job: TrainJob,
    *,
    ranks: RankRange,
    address: str | None,
    on_line: OnLine,
    max_restarts: int | None = None,
) -> None:
    """Run `job` to its end. Raises the TxlError that ended it.

    `max_restarts` None: `ray.max_restarts` of the config.
    """
    directory = RunDirectory(job.run_path)
    directory.create()
    with directory.locked(force=job.force_unlock) as is_locked:
        if is_locked:
            LaunchFiles.remove_all(directory.path)  # of a killed launcher
    files = LaunchFiles(directory.path, job.launch_id)
    job = job.model_copy(update={"stop_file": str(files.stop), "saved_file": str(files.saved)})
    supervisor = Supervisor(
        directory,
        files,
        plan=RankPlan(ranks, growth_interval_seconds=job.config.ray.growth_interval_seconds),
        address=address,
        start_timeout_seconds=job.config.ray.start_timeout_seconds,
        grace_seconds=job.config.training.grace_seconds,
        budget=RestartBudget(job.config.ray.max_restarts if max_restarts is None else max_restarts),
        on_line=on_line,
    )

    def run_ray() -> None:
        # Ray starts a rank only if its CPUs are free, so a private Ray has enough for all.
        num_cpus = ranks.maximum * (job.config.ray.cpus_per_rank or 1)
        num_cpus += job.config.evaluation.on == "workers"  # its actor
        with ray_connection(address, num_cpus=max(num_cpus, os.cpu_count() or 1)):
            placement = place_ranks(job.config.ray, ranks.minimum, is_private=address is None)
            with (
                ray_log(directory.logs / "ray.log"),
                ClusterMonitor(
                    use_gpu=placement.use_gpu, placement=placement
                ) as supervisor.monitor,
            ):
                end = RanksEnd.NOT_STARTED
                while num_ranks := supervisor.starts.wait():
                    end = _fit(
                        job,
                        num_ranks,
                        address=address,
                        placement=placement,
                        is_elastic=ranks.is_elastic,
                    )
                    supervisor.starts.end(end)
                has_returned = end is RanksEnd.RETURNED
                supervisor.set_ended(None if has_returned else TxlError("the ranks failed"))

    try:
        supervisor.run(run_ray)
    finally:
        files.remove()


def _fit(
    job: TrainJob,
    num_ranks: int,
    *,
    address: str | None,
    placement: Placement,
    is_elastic: bool,
) -> RanksEnd:
    """Run Ray Train until the ranks have ended; returns how. Raises TxlError if a restart cannot
    help.

    If the resources of the ranks are not free within a minute, Ray Train waits on; with
    `is_elastic` it gives up, and fewer ranks may start.
    """
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer
    from ray.train.v2._internal.exceptions import WorkerGroupStartupTimeoutError
    from ray.train.v2.api.exceptions import ControllerError, TrainingFailedError

    from cluster.failure_callback import FailureCallback
    from cluster.network import NodeInterfaceTorchConfig

    trainer = TorchTrainer(
        _train_loop,
        train_loop_config={
            "job": job.to_json(),
            "working_directory": str(Path.cwd()),
            "address": address,
        },
        scaling_config=ScalingConfig(num_workers=num_ranks, **placement.scaling_options()),
        torch_config=NodeInterfaceTorchConfig(
            backend="nccl" if placement.use_gpu else "gloo",
            timeout_s=int(job.config.training.rank_timeout_seconds),
        ),
        run_config=RunConfig(
            name="ray",  # Ray Train keeps its own state in RUN/ray
            storage_path=str(job.run_path.resolve()),
            failure_config=FailureConfig(
                max_failures=0,
                max_preemption_failures=0,
                controller_failure_limit=0 if is_elastic else -1,
            ),
            callbacks=[FailureCallback(job.run_path.resolve(), job.launch_id)],
        ),
    )
    try:
        trainer.fit()
    except ControllerError as error:
        if isinstance(error.controller_failure, WorkerGroupStartupTimeoutError):
            return RanksEnd.NOT_STARTED
        raise TxlError(
            f"Ray Train ended the run: {error}. Logs of all ranks: "
            f"{RunDirectory(job.run_path).logs}. {resume_advice(job.run_path)}"
        ) from error
    except TrainingFailedError:  # of ranks; FailureCallback has recorded it
        return RanksEnd.FAILED
    return RanksEnd.RETURNED


def _scoring_actor(address: str | None, log: Path) -> LoggedWorkers:
    """The actor of `evaluation.on: workers`, with a CPU, or a GPU if the ranks have GPUs."""
    actor = RayWorkers(1, address=address, use_gpus=torch.cuda.is_available(), is_connected=True)
    return LoggedWorkers(actor, log)


def _train_loop(settings: dict[str, Any]) -> None:
    """One rank, inside a Ray worker. An error that is raised makes Ray end all ranks."""
    import ray.train

    os.chdir(settings["working_directory"])  # the config may have relative paths
    context = ray.train.get_context()
    world = World(context.get_world_rank(), context.get_world_size(), context.get_local_rank())
    job = TrainJob.from_json(settings["job"])
    node_id = ray.get_runtime_context().get_node_id()
    node = next(node for node in ray.nodes() if node["NodeID"] == node_id)
    torch.set_num_threads(
        num_threads(
            ranks_on_node=context.get_local_world_size(),
            cpus_per_rank=job.config.ray.cpus_per_rank,
            ray_cpus=node["Resources"].get("CPU", 0.0),
        )
    )
    directory = RunDirectory(job.run_path)
    files = LaunchFiles(directory.path, job.launch_id)
    location = RankLocation(node_id, ray.util.get_node_ip_address(), os.getpid())
    files.write_location(world.rank, location)
    try:
        train_rank(
            files.job_after_restart(job),
            world,
            report_stop=partial(files.write_error, world.rank),
            open_workers=partial(_scoring_actor, settings["address"]),
        )
    except LostRankError:
        raise  # caused by another rank; a restart can help
    except FencedError as error:
        # A rank that was cut off may be fenced by the ranks that have replaced it in this launch.
        newest = newest_record(directory.path / FOLDER)
        if newest is None or newest.launch_id != job.launch_id:
            files.write_error(world.rank, error)
        raise
    except TxlError as error:
        with suppress(OSError):  # a full disk; Ray then transports the error itself
            files.write_error(world.rank, error)
        # If only this rank failed, raising makes Ray end the other ranks. Stops and divergence end
        # all ranks at the same step instead.
        if not isinstance(error, PreemptedError | DivergedError):
            raise
