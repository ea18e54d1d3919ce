"""World: which rank this process is, and the few things ranks say to one another.

Training knows ranks only through this class, so plain processes, torchrun and Ray Train all look
alike to it. Whoever starts the processes sets RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and
MASTER_PORT, or hands over a process group that is already there.
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Self, TypeVar

import torch
import torch.distributed as dist

from txl_dist.errors import ConfigError, TxlError
from txl_dist.runtime.collective_watch import Activity
from txl_dist.runtime.torchrun import RANK_VARIABLES

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class World:
    """This process among `num_ranks`; collectives are called by every rank in the same order."""

    rank: int
    num_ranks: int
    local_rank: int = 0
    activity: Activity = field(default_factory=Activity, compare=False, repr=False)
    """What this rank is doing, for messages about ranks that do not answer."""

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> Self:
        """The variables torchrun sets. Raises ConfigError if they are missing or no numbers."""
        missing = [name for name in RANK_VARIABLES if not environment.get(name)]
        if missing:
            raise ConfigError(
                f"{', '.join(missing)} not set: a rank is started by torchrun, by Ray or by "
                "`txl train CONFIG --on processes`, which set them"
            )
        try:
            rank, num_ranks = int(environment["RANK"]), int(environment["WORLD_SIZE"])
            return cls(rank, num_ranks, int(environment.get("LOCAL_RANK", rank)))
        except ValueError as error:
            raise ConfigError(f"RANK, WORLD_SIZE and LOCAL_RANK must be numbers: {error}") from None

    @property
    def is_rank_zero(self) -> bool:
        return self.rank == 0

    @property
    def device(self) -> torch.device:
        if torch.cuda.is_available():
            return torch.device("cuda", self.local_rank % torch.cuda.device_count())
        return torch.device("cpu")

    def join(self, *, timeout_seconds: float) -> None:
        """Meet the other ranks; does nothing if a process group exists already."""
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        if not dist.is_initialized():
            dist.init_process_group(
                "nccl" if self.device.type == "cuda" else "gloo",
                rank=self.rank,
                world_size=self.num_ranks,
                timeout=timedelta(seconds=timeout_seconds),
            )

    def limit_waits(self, *, timeout_seconds: float) -> None:
        """Give every process group there is the limit of `join`.

        A group that a library makes (DeepSpeed's for gradients) takes torch's default of 30
        minutes instead, and a cut link would hold the run that long.
        """
        limit = timedelta(seconds=timeout_seconds)
        # Private and pinned to this version; torch offers no public way after a group was made.
        for group in list(dist.distributed_c10d._world.pg_map):
            dist.distributed_c10d._set_pg_timeout(limit, group)

    def leave(self) -> None:
        """End the process group, if there is one."""
        if dist.is_initialized():
            dist.destroy_process_group()

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """The elementwise sum over ranks, in place; `values` may be on any device."""
        if self.num_ranks > 1:
            shared = values.to(self.device)
            dist.all_reduce(shared)
            values.copy_(shared)
        return values

    def gather(self, value: Any) -> list[Any]:
        """Every rank's `value`, in rank order, on every rank."""
        if self.num_ranks == 1:
            return [value]
        gathered: list[Any] = [None] * self.num_ranks
        dist.all_gather_object(gathered, value)
        return gathered

    def run_on_all(self, work: Callable[[], T]) -> list[T]:
        """Run `work` on every rank; returns every rank's result, in rank order, on every rank.

        If it fails anywhere, every rank raises the lowest failing rank's error, so that none is
        left waiting. An error that is no TxlError becomes one that names the rank.
        """
        error: TxlError | None = None
        result: T | None = None
        try:
            result = work()
        except TxlError as ours:
            error = ours
        except Exception as other:
            error = TxlError(f"rank {self.rank}: {type(other).__name__}: {other}")
        outcomes = self.gather((result, error))
        for _, failure in outcomes:
            if failure is not None:
                raise failure
        return [value for value, _ in outcomes]

    def run_on_rank_zero(self, work: Callable[[], object]) -> None:
        """Run `work` on rank 0 while the others wait; every rank raises if it fails."""
        self.run_on_all(work if self.is_rank_zero else lambda: None)

    def barrier(self) -> None:
        """Wait until every rank is here."""
        self.gather(None)

    def broadcast(self, value: Any) -> Any:
        """Rank 0's `value`, on every rank."""
        if self.num_ranks == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0, device=self.device)
        return box[0]
