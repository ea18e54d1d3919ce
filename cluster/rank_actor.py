"""One rank as a Ray actor.

    locate    where the actor runs; with all locations the ranks are numbered (`order_ranks`)
    prepare   the environment of the rank; imports torch and the training code
    run       train_rank; returns the TxlError that ended it

It imports no torch at its top: Ray's thread of the launcher imports this module.
"""

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from cluster.connection import LOOPBACK
from cluster.nodes import num_threads, use_interface_of
from txl_dist.errors import PreemptedError, TxlError


@dataclass(frozen=True, slots=True)
class RankLocation:
    """The process of a rank, and what it has reserved there."""

    node_id: str
    address: str
    pid: int
    gpus: tuple[str, ...]
    node_cpus: float
    """CPUs that the node offers to Ray; 0: not known."""

    def __str__(self) -> str:
        return f"node {self.address}, pid {self.pid}"


def order_ranks(
    located: Sequence[tuple[RankLocation, Any]], *, own_node_id: str
) -> list[tuple[RankLocation, Any]]:
    """Actors in rank order: those of a node together, the launcher's node first."""

    def key(entry: tuple[RankLocation, Any]) -> tuple[object, ...]:
        location, _ = entry
        is_elsewhere = location.node_id != own_node_id
        return is_elsewhere, location.address, location.node_id, location.gpus, location.pid

    return sorted(located, key=key)


class RankActor:
    """The actor. A TxlError is returned, because Ray would wrap it if it were raised."""

    def locate(self) -> RankLocation:
        import ray

        context = ray.get_runtime_context()
        node = next(node for node in ray.nodes() if node["NodeID"] == context.get_node_id())
        return RankLocation(
            context.get_node_id(),
            ray.util.get_node_ip_address(),
            os.getpid(),
            tuple(context.get_accelerator_ids().get("GPU", ())),
            node["Resources"].get("CPU", 0.0),
        )

    def prepare(
        self, settings: dict[str, Any], rank: int, locations: Sequence[RankLocation]
    ) -> int:
        """Set what the rank reads from its environment; returns a free port of this node."""
        own = locations[rank]
        peers = [n for n, other in enumerate(locations) if other.node_id == own.node_id]
        gpus = [gpu for n in peers for gpu in locations[n].gpus[:1]]
        os.environ |= {
            "RANK": str(rank),
            "WORLD_SIZE": str(len(locations)),
            "LOCAL_RANK": str(peers.index(rank)),
            "LOCAL_WORLD_SIZE": str(len(peers)),
            "MASTER_ADDR": locations[0].address,
            # NCCL reaches the other GPUs of a node by their numbers. Ray does not hide GPUs from a
            # process that has reserved none.
            "CUDA_VISIBLE_DEVICES": ",".join(gpus) if settings["use_gpu"] else "",
        }
        use_interface_of(own.address)
        os.chdir(settings["working_directory"])  # the config may have relative paths
        self._settings, self._own, self._num_peers = settings, own, len(peers)

        import txl_dist.training.rank  # noqa: F401  # seconds, which all ranks spend at once

        with socket.socket(socket.AF_INET6 if ":" in own.address else socket.AF_INET) as probe:
            probe.bind((own.address, 0))
            return int(probe.getsockname()[1])

    def run(self, port: int) -> TxlError | None:
        """Train until the run ends; returns the error that ended it. `port` is that of rank 0."""
        import ray
        import torch

        from data_pipeline.system.signals import StopSignals, unblock_stop_signals
        from txl_dist.launch.launch_files import LaunchFiles
        from txl_dist.runtime.stop import NOTHING_TRAINED, exit_before_first_step
        from txl_dist.runtime.world import World
        from txl_dist.training.job import TrainJob
        from txl_dist.training.rank import train_rank

        os.environ["MASTER_PORT"] = str(port)
        evaluate_on = _where_to_evaluate(ray.get_runtime_context().gcs_address)
        job = TrainJob.from_json(self._settings["job"])
        job = job.model_copy(update={"evaluate_on": evaluate_on})
        files, world = LaunchFiles(job.run_path, job.launch_id), World.from_environment()
        torch.set_num_threads(
            num_threads(ranks_on_node=self._num_peers, ray_cpus=self._own.node_cpus)
        )

        def end_before_first_step(number: int) -> None:
            files.write_error(world.rank, PreemptedError(NOTHING_TRAINED))
            exit_before_first_step(number)

        with StopSignals(on_request=end_before_first_step):
            # A private Ray blocks stop signals in its processes. A signal that reaches only this
            # rank is a request to all.
            unblock_stop_signals()
            try:
                train_rank(job, world, report_stop=partial(files.write_error, world.rank))
            except TxlError as error:
                return error
        return None


def _where_to_evaluate(address: str) -> str:
    """`--on` of `txl eval --watch`: an actor of the cluster, or a process with a private Ray.

    A private Ray listens on loopback, where no other command can connect to it.
    """
    return "processes" if address.startswith(LOOPBACK) else address
