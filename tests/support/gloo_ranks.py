"""Groups of real gloo ranks that many tests share, because starting a group takes seconds.

A test passes a module-level function to a group; every rank calls it with its World and the same
arguments. A rank that raises may leave the other ranks in a collective, so the group is marked
broken and the next test gets a new one.
"""

import multiprocessing as mp
import os
import socket
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

from txl_dist.runtime.world import World

JOIN_TIMEOUT_SECONDS = 60.0
ANSWER_TIMEOUT_SECONDS = 900.0
"""Only ends a test that hangs. Compiling nine layers takes minutes on a busy machine."""


class RankGroup:
    """`num_ranks` processes that run the same functions at the same time."""

    def __init__(self, num_ranks: int) -> None:
        from torch.distributed import TCPStore  # slow to import

        context = mp.get_context("spawn")
        # Listens already: a free port could be taken before rank 0 listens on it. On its own,
        # TCPStore would listen on all addresses.
        listener = socket.create_server(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        self._store = TCPStore(
            "127.0.0.1",
            port,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
        self._pipes: list[Connection] = []
        self._processes = []
        self.is_broken = False
        for rank in range(num_ranks):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(theirs, rank, num_ranks, self._store.port), daemon=True
            )
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """`function(world, *args, **kwargs)` on every rank; the results, in rank order.

        Raises AssertionError with the remote traceback if a rank fails, OSError or EOFError if its
        process has ended. The group cannot be used again then.
        """
        self.is_broken = True
        for pipe in self._pipes:
            pipe.send((function, args, kwargs))
        results, failures = [], []
        for rank, pipe in enumerate(self._pipes):
            if not pipe.poll(ANSWER_TIMEOUT_SECONDS):
                failures.append(f"rank {rank} did not respond")
                continue
            ok, value = pipe.recv()
            (results if ok else failures).append(value)
        if failures:
            raise AssertionError("\n".join(failures))
        self.is_broken = False
        return results

    def close(self) -> None:
        """Kill the processes: an orderly end takes seconds and has no benefit."""
        for pipe in self._pipes:
            with suppress(OSError):
                pipe.close()
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()


def _serve(pipe: Connection, rank: int, num_ranks: int, port: int) -> None:
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # rank 0 too connects to the store of the parent
    }
    import torch

    torch.set_num_threads(1)
    world = World(rank, num_ranks, rank)
    world.join(timeout_seconds=JOIN_TIMEOUT_SECONDS)
    with suppress(EOFError):
        while True:
            function, args, kwargs = pipe.recv()
            try:
                pipe.send((True, function(world, *args, **kwargs)))
            except BaseException:
                pipe.send((False, f"rank {rank}:\n{traceback.format_exc()}"))
    world.leave()


class RankGroups:
    """One group per number of ranks, started at its first use."""

    def __init__(self) -> None:
        self._groups: dict[int, RankGroup] = {}

    def __call__(self, num_ranks: int) -> RankGroup:
        group = self._groups.get(num_ranks)
        if group is not None and group.is_broken:
            group.close()
            group = None
        if group is None:
            group = self._groups[num_ranks] = RankGroup(num_ranks)
        return group

    def close(self) -> None:
        for group in self._groups.values():
            group.close()
