"""Training under Ray Train: it starts the ranks, and starts them again when one dies.

What the ranks compute, and where they go on after a restart, is the project's own: the run
directory's newest good checkpoint. Ray Train runs ranks in threads, where no signal can be caught;
so the launcher catches the stop signals and leaves a stop file, which the ranks look for
(`supervisor.py`).
"""

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from cluster.attempt import AttemptFiles, Place
from cluster.ray_log import ray_log
from cluster.session import ray_session, uses_gpus
from cluster.supervisor import Supervisor
from cluster.watch import ClusterWatch
from txl_dist.checkpoint.directory import resume_advice
from txl_dist.errors import DivergedError, LostRankError, PreemptedError, TxlError
from txl_dist.launch.launcher import OnLine
from txl_dist.runtime.world import World
from txl_dist.training.job import TrainJob
from txl_dist.training.rank import train_rank
from txl_dist.training.run_directory import RunDirectory


def train_on_ray(job: TrainJob, *, num_ranks: int, address: str | None, on_line: OnLine) -> None:
    """Run `job` to its end. Raises the TxlError that ended it."""
    directory = RunDirectory(job.run_path)
    directory.create()
    with directory.locked():
        AttemptFiles.remove_all(directory.path)  # of a launcher that was killed
    files = AttemptFiles(directory.path, job.attempt)
    job = job.model_copy(update={"stop_file": str(files.stop), "saved_file": str(files.saved)})
    supervisor = Supervisor(
        directory,
        files,
        num_ranks=num_ranks,
        address=address,
        start_timeout_seconds=job.config.ray.start_timeout_seconds,
        on_line=on_line,
    )

    def work() -> None:
        with ray_session(address, num_cpus=max(num_ranks, os.cpu_count() or 1)):
            use_gpu = uses_gpus(num_ranks)
            with (
                ray_log(directory.logs / "ray.log"),
                ClusterWatch(use_gpu=use_gpu) as supervisor.watch,
            ):
                supervisor.ended(_fit(job, num_ranks, use_gpu=use_gpu))

    try:
        supervisor.run(work)
    finally:
        files.remove()


def _fit(job: TrainJob, num_ranks: int, *, use_gpu: bool) -> TxlError | None:
    """Run Ray Train; returns what ended it, if it was a failure."""
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer
    from ray.train.v2.api.exceptions import TrainingFailedError

    from cluster.failures import FailureRecorder
    from cluster.network import NodeInterfaceTorchConfig

    trainer = TorchTrainer(
        _train_loop,
        train_loop_config={
            "job": job.to_json(),
            "working_directory": str(Path.cwd()),
            "num_threads": max(1, (os.cpu_count() or 1) // num_ranks),
        },
        scaling_config=ScalingConfig(num_workers=num_ranks, use_gpu=use_gpu),
        torch_config=NodeInterfaceTorchConfig(
            backend="nccl" if use_gpu else "gloo",
            timeout_s=int(job.config.training.rank_timeout_seconds),
        ),
        run_config=RunConfig(
            name="ray",
            storage_path=str(job.run_path.resolve()),
            failure_config=FailureConfig(max_failures=job.config.ray.max_restarts),
            callbacks=[FailureRecorder(job.run_path.resolve(), job.attempt)],
        ),
    )
    try:
        trainer.fit()
    except TrainingFailedError as error:
        return TxlError(
            f"the ranks failed more than ray.max_restarts={job.config.ray.max_restarts} times; the "
            f"last time: {error}. Their logs: {RunDirectory(job.run_path).logs}. "
            f"{resume_advice(job.run_path)}"
        )
    return None


def _train_loop(settings: dict[str, Any]) -> None:
    """One rank, inside a Ray worker. Returns normally when a restart could not help."""
    import ray.train

    # Paths of the config are relative to where the command was given.
    os.chdir(settings["working_directory"])
    torch.set_num_threads(settings["num_threads"])
    context = ray.train.get_context()
    world = World(context.get_world_rank(), context.get_world_size(), context.get_local_rank())
    job = TrainJob.from_json(settings["job"])
    directory = RunDirectory(job.run_path)
    files = AttemptFiles(directory.path, job.attempt)
    if files.end() is not None:
        return
    place = Place(
        ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address(), os.getpid()
    )
    files.write_place(world.rank, place)
    if files.saved.exists():
        # A restart: what this attempt saved comes before what the command line named.
        job = job.model_copy(update={"resume": "auto"})
    # An error of one rank makes Ray end the others; the next attempt finds it recorded and returns.
    # Errors that all ranks raise at the same step need no such round.
    try:
        train_rank(job, world)
    except LostRankError:
        raise  # the others' fault: Ray starts the ranks again
    except TxlError as error:
        with suppress(OSError):  # a full disk; Ray then carries the error itself
            files.write_end(world.rank, error)
        if not isinstance(error, PreemptedError | DivergedError):
            raise
