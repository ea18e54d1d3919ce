"""Train with Ray Train: it starts the ranks, and restarts them when one dies.

    launcher: train_on_ray -> Supervisor (main thread)
                           -> _fit -> Ray Train's controller   (thread)
    worker:   _train_loop -> train_rank

Ray Train's own checkpoints are not used. Restarted ranks resume from the newest good checkpoint of
the run directory, as under every other launcher. Ray Train runs a rank in a thread, where no signal
can be caught. So the launcher catches the stop signals and creates a stop file, which the training
loop checks after every step.
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
from cluster.ray_log import ray_log
from cluster.supervisor import Supervisor
from txl_dist.checkpoint.directory import resume_advice
from txl_dist.errors import DivergedError, LostRankError, PreemptedError, TxlError
from txl_dist.launch.launch_files import LaunchFiles, RankLocation
from txl_dist.launch.launcher import OnLine
from txl_dist.launch.supervision import RestartBudget
from txl_dist.runtime.world import World
from txl_dist.training.job import TrainJob
from txl_dist.training.rank import train_rank
from txl_dist.training.run_directory import RunDirectory


def train_on_ray(
    job: TrainJob,
    *,
    num_ranks: int,
    address: str | None,
    on_line: OnLine,
    max_restarts: int | None = None,
) -> None:
    """Run `job` to its end. Raises the TxlError that ended it.

    `max_restarts` None: `ray.max_restarts` of the config.
    """
    directory = RunDirectory(job.run_path)
    directory.create()
    with directory.locked():
        LaunchFiles.remove_all(directory.path)  # of a killed launcher
    files = LaunchFiles(directory.path, job.launch_id)
    job = job.model_copy(update={"stop_file": str(files.stop), "saved_file": str(files.saved)})
    supervisor = Supervisor(
        directory,
        files,
        num_ranks=num_ranks,
        address=address,
        start_timeout_seconds=job.config.ray.start_timeout_seconds,
        grace_seconds=job.config.training.grace_seconds,
        budget=RestartBudget(job.config.ray.max_restarts if max_restarts is None else max_restarts),
        on_line=on_line,
    )

    def run_ray() -> None:
        # Ray starts a rank only if its CPUs are free, so a private Ray has enough for all.
        num_cpus = num_ranks * (job.config.ray.cpus_per_rank or 1)
        with ray_connection(address, num_cpus=max(num_cpus, os.cpu_count() or 1)):
            placement = place_ranks(job.config.ray, num_ranks, is_private=address is None)
            with (
                ray_log(directory.logs / "ray.log"),
                ClusterMonitor(
                    use_gpu=placement.use_gpu, restrictions=placement.restrictions
                ) as supervisor.monitor,
            ):
                supervisor.set_ended(_fit(job, num_ranks, placement))

    try:
        supervisor.run(run_ray)
    finally:
        files.remove()


def _fit(job: TrainJob, num_ranks: int, placement: Placement) -> TxlError | None:
    """Run Ray Train until the ranks have ended; returns its error if it gave up."""
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer
    from ray.train.v2.api.exceptions import TrainingFailedError

    from cluster.failure_callback import FailureCallback
    from cluster.network import NodeInterfaceTorchConfig

    trainer = TorchTrainer(
        _train_loop,
        train_loop_config={
            "job": job.to_json(),
            "working_directory": str(Path.cwd()),
        },
        scaling_config=ScalingConfig(num_workers=num_ranks, **placement.scaling_options()),
        torch_config=NodeInterfaceTorchConfig(
            backend="nccl" if placement.use_gpu else "gloo",
            timeout_s=int(job.config.training.rank_timeout_seconds),
        ),
        run_config=RunConfig(
            name="ray",  # Ray Train keeps its own state in RUN/ray
            storage_path=str(job.run_path.resolve()),
            failure_config=FailureConfig(max_failures=-1),  # the supervisor counts
            callbacks=[FailureCallback(job.run_path.resolve(), job.launch_id)],
        ),
    )
    try:
        trainer.fit()
    except TrainingFailedError as error:
        return TxlError(
            f"Ray Train ended the run: {error}. Logs of all ranks: "
            f"{RunDirectory(job.run_path).logs}. {resume_advice(job.run_path)}"
        )
    return None


def _train_loop(settings: dict[str, Any]) -> None:
    """One rank, inside a Ray worker. An error that is raised makes Ray restart all ranks."""
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
    if files.error() is not None:
        return  # the launcher raises it
    location = RankLocation(node_id, ray.util.get_node_ip_address(), os.getpid())
    files.write_location(world.rank, location)
    try:
        train_rank(
            files.job_after_restart(job),
            world,
            report_stop=partial(files.write_error, world.rank),
        )
    except LostRankError:
        raise  # caused by another rank; a restart can help
    except TxlError as error:
        with suppress(OSError):  # a full disk; Ray then transports the error itself
            files.write_error(world.rank, error)
        # If only this rank failed, raising makes Ray end the other ranks; restarted, they find the
        # recorded error and return. Stops and divergence end all ranks at the same step instead.
        if not isinstance(error, PreemptedError | DivergedError):
            raise
