"""RankTrainer: Ray Train with what the ranks need, and without what they do not use.

It imports Ray Train, which takes seconds, so others import it late. It does not import torch, which
neither the launcher needs nor Ray Train's controller, a process that starts before the ranks.
"""

import os
from dataclasses import dataclass
from typing import Any

import ray
from ray.train._internal.base_worker_group import BaseWorkerGroup
from ray.train.backend import Backend, BackendConfig
from ray.train.v2._internal.callbacks.datasets import DatasetsCallback
from ray.train.v2._internal.callbacks.placement_group_callback import PlacementGroupCleanerCallback
from ray.train.v2._internal.execution.callback import RayTrainCallback
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

NODE_DEATH_SECONDS = 20.0
"""Ray considers a node dead after 15 s without response."""
UNUSED_CALLBACKS = (
    # An actor that removes the placement group of a dead controller. Ray does that itself when the
    # launcher ends, and the launcher ends when the controller dies. Without a dashboard, as in a
    # private Ray, the actor needs 12 s to stop, and the ranks are restarted so much later.
    PlacementGroupCleanerCallback,
    # An actor for Ray Data, which every rank then imports. The ranks read their shards themselves.
    DatasetsCallback,
)


def train_loop(settings: dict[str, Any]) -> None:
    """One rank, inside a Ray worker: what Ray Train calls."""
    # Imported there only: the launcher, which names this function, would need seconds for torch.
    from cluster.rank_worker import run_rank

    run_rank(settings)


class RankTrainer(DataParallelTrainer):
    """Starts the ranks of one start, and ends all of them when one fails."""

    def _create_default_callbacks(self) -> list[RayTrainCallback]:
        callbacks: list[RayTrainCallback] = super()._create_default_callbacks()
        return [callback for callback in callbacks if not isinstance(callback, UNUSED_CALLBACKS)]


@dataclass
class RankBackendConfig(BackendConfig):
    """Prepares the processes of the ranks. They create the process group (`World.join`)."""

    use_gpu: bool

    @property
    def backend_cls(self) -> type[Backend]:
        return _RankBackend


class _RankBackend(Backend):
    share_cuda_visible_devices = True  # NCCL reaches the other GPUs of a node by their numbers

    def on_start(self, worker_group: BaseWorkerGroup, backend_config: RankBackendConfig) -> None:
        """Ray Train calls this before the ranks import torch."""
        if not backend_config.use_gpu:
            worker_group.execute(hide_gpus)

    def on_shutdown(self, worker_group: BaseWorkerGroup, backend_config: RankBackendConfig) -> None:
        """Ray Train calls this before it ends the ranks: wait until each responds or is dead.

        Else the ranks of the next start could be placed on a node that is dead, unknown to Ray.
        """
        responses = worker_group.execute_async(os.getpid)
        ray.wait(responses, num_returns=len(responses), timeout=NODE_DEATH_SECONDS)


def hide_gpus() -> None:
    """Make the ranks use CPUs. Ray does not hide GPUs from a process that has reserved none."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
