"""One rank inside a Ray worker: what `trainer.train_loop` calls."""

import os
import socket
from contextlib import suppress
from functools import partial
from typing import Any

import torch

from cluster.nodes import num_threads, use_interface_of
from data_pipeline.system.signals import blocked_signals
from txl_dist.checkpoint.attempts import FOLDER, newest_of_launch
from txl_dist.errors import (
    OUTAGES,
    DivergedError,
    FencedError,
    LostRankError,
    PreemptedError,
    TxlError,
)
from txl_dist.launch.launch_files import LaunchFiles, RankLocation
from txl_dist.runtime.world import World
from txl_dist.training.job import TrainJob
from txl_dist.training.rank import train_rank
from txl_dist.training.run_directory import RunDirectory


def run_rank(settings: dict[str, Any]) -> None:
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
    host = ray.util.get_node_ip_address()
    files.write_location(world.rank, RankLocation(node_id, host, os.getpid()))
    job = files.job_after_restart(job)
    variables, resume = _agree(world, host, job.resume, context.get_local_world_size())
    os.environ |= variables
    use_interface_of(host)
    try:
        # A private Ray blocks stop signals in its workers. One that reaches only this one counts.
        with blocked_signals(files.stop.touch):
            train_rank(
                job.model_copy(update={"resume": resume}),
                world,
                report_stop=partial(files.write_error, world.rank),
                # An actor scores checkpoints: with a CPU, or a GPU if the ranks have GPUs.
                evaluate_on=ray.get_runtime_context().gcs_address,
            )
    except LostRankError:
        raise  # caused by another rank; a restart can help
    except FencedError as error:
        # A rank that was cut off may be fenced by the ranks that have replaced it in this launch.
        if newest_of_launch(directory.path / FOLDER, job.launch_id) is None:
            files.write_error(world.rank, error)
        raise
    except TxlError as error:
        if isinstance(error, OUTAGES) and files.saved.exists():
            raise  # the launch has trained: a restart can help
        with suppress(OSError):  # a full disk; Ray then transports the error itself
            files.write_error(world.rank, error)
        # If only this rank failed, raising makes Ray end the other ranks. Stops and divergence end
        # all ranks at the same step instead.
        if not isinstance(error, PreemptedError | DivergedError):
            raise


def _agree(world: World, host: str, resume: str, ranks_on_node: int) -> tuple[dict[str, str], str]:
    """Wait for all ranks. Returns the variables of torchrun, which `World.join` and DeepSpeed read,
    and `resume` of rank 0: the ranks look for a checkpoint of this launch at different moments.
    """
    from ray.train.collective import broadcast_from_rank_zero

    # Rank 0 listens at this port as soon as all ranks have it: it is unlikely to be taken before.
    own = (host, _free_port(host), resume) if world.is_rank_zero else None
    main_host, port, resume = broadcast_from_rank_zero(own)
    variables = {
        "RANK": str(world.rank),
        "WORLD_SIZE": str(world.num_ranks),
        "LOCAL_RANK": str(world.local_rank),
        "LOCAL_WORLD_SIZE": str(ranks_on_node),
        "MASTER_ADDR": main_host,
        "MASTER_PORT": str(port),
    }
    return variables, resume


def _free_port(host: str) -> int:
    """A free port of this node."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])
