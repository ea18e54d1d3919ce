"""World: the rank of this process, and the collectives that the project uses.

Training uses ranks only through this class, so it does not depend on the launcher. A launcher sets
RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT. With one rank every collective returns
immediately.
"""

import logging
import math
import os
import re
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Self, TypeVar

import torch
import torch.distributed as dist

from data_pipeline.errors import counted
from data_pipeline.system.workers import BackgroundQueue
from txl_dist.errors import ConfigError, DivergedError, LostRankError, TxlError
from txl_dist.runtime.process import Activity

T = TypeVar("T")

_GPU = re.compile(r"\d|GPU-|MIG-")
"""Begins the value of CUDA_VISIBLE_DEVICES, unless there is none (empty, -1, NoDevFiles)."""


@dataclass(frozen=True, slots=True)
class World:
    """One of `num_ranks` processes. All ranks must call the collectives in the same order."""

    rank: int
    num_ranks: int
    local_rank: int = 0
    activity: Activity = field(default_factory=Activity, compare=False, repr=False)
    """What this rank is doing, for messages about ranks that do not respond."""

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> Self:
        """From the variables that torchrun and `launch/processes.py` set."""
        try:
            values = [int(environment[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")]
        except (KeyError, ValueError) as error:
            raise ConfigError(
                f"RANK, WORLD_SIZE and LOCAL_RANK must be numbers ({error!r}). They are set by "
                "torchrun, Ray and `txl train CONFIG --on processes`"
            ) from None
        return cls(values[0], values[1], values[2])

    @property
    def is_rank_zero(self) -> bool:
        return self.rank == 0

    @property
    def device(self) -> torch.device:
        if torch.cuda.is_available():
            # A launcher may make one GPU visible to each rank: it is number 0 in every process.
            return torch.device("cuda", self.local_rank % torch.cuda.device_count())
        return torch.device("cpu")

    def join(self, *, timeout_seconds: float) -> None:
        """Create the process group, unless it exists. Returns when all ranks have joined.

        Raises ConfigError if this rank was given a GPU that cannot be used, LostRankError if the
        rendezvous fails: the port is in use, or a rank has not started. (NCCL refuses two ranks on
        one GPU, by name, at their first collective.)
        """
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
            # After a time limit NCCL's watchdog waits for four times this, by default for a minute.
            os.environ.setdefault("TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC", "1000")
        elif _GPU.match(assigned := os.environ.get("CUDA_VISIBLE_DEVICES", "").strip()):
            raise ConfigError(
                f"rank {self.rank} on host {socket.gethostname()} was given GPU {assigned} "
                "(CUDA_VISIBLE_DEVICES), which torch cannot use; on the CPU it would take weeks. "
                "Run txl doctor there; to train on CPUs, set CUDA_VISIBLE_DEVICES to nothing"
            )
        if dist.is_initialized():
            return
        try:
            dist.init_process_group(
                "nccl" if self.device.type == "cuda" else "gloo",
                rank=self.rank,
                world_size=self.num_ranks,
                timeout=timedelta(seconds=timeout_seconds),
            )
        except dist.DistError as error:
            reason = str(error).partition("\n")[0].partition("Exception raised from")[0].strip()
            address = ":".join(os.environ.get(name, "?") for name in ("MASTER_ADDR", "MASTER_PORT"))
            raise LostRankError(
                f"rank {self.rank} of {self.num_ranks} could not reach other ranks at {address} "
                f"({reason}). Another program uses that port, or a "
                "rank did not start: see the logs of all ranks. Run the same command again; under "
                "torchrun, with another --master-port"
            ) from error

    @contextmanager
    def timeouts(self, *, timeout_seconds: float) -> Iterator[None]:
        """Set the time limit of all process groups, and of those that are created in the context.

        Groups that a library creates (DeepSpeed's for gradients) have torch's default limit of 30
        minutes. If a link is cut or a rank hangs, the run would hang that long, also while the
        groups are created.
        """
        limit, c10d = timedelta(seconds=timeout_seconds), dist.distributed_c10d
        # Private names of the pinned torch: `new_group` is called by DeepSpeed, and there is no
        # public way to change the limit of an existing group.
        before = c10d.default_pg_timeout, c10d.default_pg_nccl_timeout
        c10d.default_pg_timeout = c10d.default_pg_nccl_timeout = limit
        try:
            yield
        finally:
            c10d.default_pg_timeout, c10d.default_pg_nccl_timeout = before
        for group in list(c10d._world.pg_map):
            c10d._set_pg_timeout(limit, group)

    def leave(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()

    def all_reduce_sum(self, values: torch.Tensor) -> torch.Tensor:
        """All-reduce: the elementwise sum over ranks, in place. `values` may be on any device."""
        if self.num_ranks > 1:
            self.activity.num_collectives += 1
            shared = values.to(self.device)
            dist.all_reduce(shared)
            values.copy_(shared)
        return values

    def all_gather_parts(self, part_N: torch.Tensor) -> torch.Tensor:
        """All-gather: the tensors [N] of all ranks, one after the other in rank order."""
        if self.num_ranks == 1:
            return part_N
        self.activity.num_collectives += 1
        shared = part_N.to(self.device)
        whole = shared.new_empty(self.num_ranks * shared.numel())
        dist.all_gather_into_tensor(whole, shared)
        return whole.to(part_N.device)

    def all_gather(self, value: Any) -> list[Any]:
        """All-gather: the `value` of every rank, in rank order, on every rank."""
        if self.num_ranks == 1:
            return [value]
        self.activity.num_collectives += 1
        gathered: list[Any] = [None] * self.num_ranks
        dist.all_gather_object(gathered, value)
        return gathered

    def run_on_all(self, work: Callable[[], T]) -> list[T]:
        """Run `work` on every rank; returns the results of all ranks, in rank order.

        If it fails on any rank, every rank raises the error of the lowest failing rank, so no rank
        waits for one that has left. Other exceptions become a TxlError that names the rank.
        """
        error: TxlError | None = None
        result: T | None = None
        try:
            result = work()
        except TxlError as txl_error:
            error = txl_error
        except Exception as exception:
            error = TxlError(f"rank {self.rank}: {type(exception).__name__}: {exception}")
        outcomes = self.all_gather((result, error))
        for _, failure in outcomes:
            if failure is not None:
                raise failure
        return [value for value, _ in outcomes]

    def run_on_rank_zero(self, work: Callable[[], object]) -> None:
        """Run `work` on rank 0 while the other ranks wait; if it fails, every rank raises."""
        self.run_on_all(work if self.is_rank_zero else lambda: None)

    def barrier(self) -> None:
        """Wait for all ranks."""
        self.all_gather(None)

    def broadcast(self, value: Any) -> Any:
        """The `value` of rank 0, on every rank."""
        if self.num_ranks == 1:
            return value
        self.activity.num_collectives += 1
        box = [value]  # pickled: for settings and results, not for large tensors
        dist.broadcast_object_list(box, src=0, device=self.device)
        return box[0]


POLL_SECONDS = 1.0
"""Between two collectives of ranks that wait. Far below the limit of a collective: a slow disk or
download must not look like a lost rank."""
NOTICE_SECONDS = 10.0
"""Between two lines about a wait."""

log = logging.getLogger("txl_dist.training")


def do_on_rank_zero(world: World, work: Callable[[], T], *, name: str) -> T:
    """The result of `work` of rank 0, however long it takes. Collective.

    The other ranks wait in short collectives, whose limit it may exceed. Every rank raises its
    error. `name` says what the ranks wait for.
    """
    queue, results = BackgroundQueue("rank zero"), list[T]()
    try:
        if world.is_rank_zero:
            queue.submit(lambda: results.append(work()))
        wait_for_queues(world, queue, name=name)
    finally:
        queue.close(timeout_seconds=0)
    result: T = world.broadcast(results[0] if results else None)
    return result


def wait_for_queues(
    world: World,
    queue: BackgroundQueue,
    *,
    name: str,
    limit_seconds: float = math.inf,
    on_error: Callable[[], None] = lambda: None,
) -> None:
    """Wait until the queue of every rank is idle. Collective. `name` says what the ranks wait for.

    If a task of any rank has failed, every rank calls `on_error` and raises the error: a
    DivergedError if there is one, as it ends a run for good, or else that of the lowest rank.
    If no queue reports progress for `limit_seconds`, every rank raises LostRankError.
    """
    start = changed_at = time.monotonic()
    next_notice, previous = start + NOTICE_SECONDS, None
    while True:
        is_idle = queue.wait(POLL_SECONDS)
        now = time.monotonic()
        outcomes = world.all_gather((is_idle, queue.error, queue.progress, now - changed_at))
        errors = [error for _, error, _, _ in outcomes if error is not None]
        if errors:
            on_error()
            raise next((e for e in errors if isinstance(e, DivergedError)), errors[0])
        busy = [rank for rank, (is_idle, *_) in enumerate(outcomes) if not is_idle]
        if not busy:
            return
        progress = [progress for _, _, progress, _ in outcomes]
        if progress != previous:
            previous, changed_at = progress, now
        ranks = f"{counted(len(busy), 'rank')} ({', '.join(map(str, busy))})"
        if now >= next_notice and world.is_rank_zero:
            next_notice = now + NOTICE_SECONDS
            log.info("waiting %.0f s for %s of %s", now - start, name, ranks)
        if outcomes[0][3] > limit_seconds:  # by the clock of rank 0, so that all ranks agree
            raise LostRankError(
                f"{name} of {ranks} made no progress for training.rank_timeout_seconds="
                f"{limit_seconds:g}: the storage does not respond, or is very slow"
            )
