"""Ranks as child processes on this machine, without Ray: `--on processes`.

A child reads its spec from standard input, and ends when that pipe is closed, so no child outlives
this process, even if it is killed. A child writes the error that ended it to standard output.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext, suppress
from typing import TYPE_CHECKING

from data_pipeline.errors import counted
from data_pipeline.system.workers import InProcess, ProcessWorkers, Workers
from txl_dist.errors import ConfigError, error_from_json
from txl_dist.launch.launcher import Launcher
from txl_dist.launch.rank_group import Event, RankEnded, RankRange, RanksUp
from txl_dist.runtime.process import free_port, num_gpus, usable_cores, without_torchrun
from txl_dist.training.spec import RunDirectory, TrainSpec

if TYPE_CHECKING:
    from txl_dist.launch.doctor import DoctorRequest, Finding


class ProcessLauncher(Launcher):
    """Trains with processes, evaluates in this process, prepares with processes."""

    def check_ranks(self, ranks: RankRange) -> None:
        if ranks.is_elastic:
            raise ConfigError(
                f"--ranks {ranks} with --on processes: processes of one machine do not come and "
                f"go. Give one number (--ranks {ranks.maximum}), or use --on ray or the address of "
                "a Ray cluster"
            )
        num_devices = num_gpus()
        if 0 < num_devices < ranks.maximum:
            raise ConfigError(
                f"{ranks} ranks need one GPU each, and this machine has {num_devices}. Start at "
                f"most {counted(num_devices, 'rank')}, or use CPUs: put CUDA_VISIBLE_DEVICES= "
                "before the command"
            )

    @contextmanager
    def rank_group(self, spec: TrainSpec, ranks: RankRange) -> Iterator["ProcessGroup"]:
        self.check_ranks(ranks)
        with closing(ProcessGroup()) as group:
            yield group

    def workers(
        self, num_workers: int, *, use_gpus: bool = False
    ) -> AbstractContextManager[Workers]:
        """Child processes; one worker is this process. With `use_gpus`, several need CPUs only."""
        if num_workers == 1:
            return nullcontext(InProcess())
        if use_gpus and num_gpus() > 0:
            raise ConfigError(
                f"--on processes cannot give each of {num_workers} workers a GPU; leave --workers "
                "out, use --on ray, or use CPUs: put CUDA_VISIBLE_DEVICES= before the command"
            )
        return ProcessWorkers(num_workers)

    def check_nodes(self, request: "DoctorRequest") -> "list[Finding]":
        from txl_dist.launch.doctor import check_this_machine

        return check_this_machine(request)


class ProcessGroup:
    max_restarts, growth_interval_seconds = 0, 0.0
    waits_for = "the ranks to start"

    def __init__(self) -> None:
        self._processes: list[subprocess.Popen[bytes]] = []
        self._events: list[Event] = []
        self._running: set[int] = set()

    def start(self, spec: TrainSpec, num_ranks: int) -> None:
        self.close()
        directory = RunDirectory(spec.run_path)
        environment = {
            **without_torchrun(os.environ),
            "WORLD_SIZE": str(num_ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port("127.0.0.1")),
        }
        num_threads = max(1, usable_cores() // num_ranks)
        environment.setdefault("OMP_NUM_THREADS", str(num_threads))
        for rank in range(num_ranks):
            with directory.log(rank).open("ab") as log:
                process = subprocess.Popen(
                    [sys.executable, "-m", "txl_dist.launch.rank_process"],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                    # Ctrl-C then reaches only this process, which forwards one signal.
                    start_new_session=True,
                    bufsize=0,
                )
            self._processes.append(process)
            assert process.stdin is not None
            with suppress(BrokenPipeError):  # the rank was killed; its exit code tells
                # Stays open: closing it ends the rank.
                process.stdin.write(spec.to_json().encode() + b"\n")
        self._running = set(range(num_ranks))
        self._events.append(RanksUp(dict.fromkeys(range(num_ranks), "")))

    def poll(self) -> list[Event]:
        for rank in sorted(self._running):
            process = self._processes[rank]
            if (code := process.poll()) is not None:
                self._running.remove(rank)
                self._events.append(_end_of(rank, code, process))
        events, self._events = self._events, []
        return events

    def request_stop(self) -> None:
        """A signal ends also a rank that is importing its libraries."""
        for rank in self._running:
            self._processes[rank].send_signal(signal.SIGTERM)

    def kill(self, ranks: Collection[int]) -> None:
        for rank in ranks:
            self._processes[rank].kill()

    def close(self) -> None:
        """Kill the processes that still run, and close the pipes of all."""
        for process in self._processes:
            process.kill()  # has no effect on a process that has ended
        for process in self._processes:
            with process:  # closes the pipes and waits
                pass
        self._processes, self._running = [], set()


def _end_of(rank: int, code: int, process: subprocess.Popen[bytes]) -> RankEnded:
    """With the error that the rank wrote to its standard output before it ended."""
    assert process.stdout is not None
    line = process.stdout.readline()
    if line.startswith(b"{"):
        return RankEnded(rank, code, error_from_json(line))
    return RankEnded(rank, code, reason=line.decode(errors="replace").strip())
