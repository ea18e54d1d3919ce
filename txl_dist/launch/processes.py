"""ProcessLauncher: ranks as child processes on this machine, without Ray.

A child reads its job from standard input, and ends when that pipe is closed, so no child outlives
this process, even if it is killed. A child writes the error that ended it to standard output. If
one child fails, the run ends.
"""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass

import torch

from data_pipeline.processes.stop_signals import STOP_SIGNALS, StopSignals
from data_pipeline.processes.workers import ProcessWorkers, Workers
from txl_dist.checkpoint.directory import resume_advice
from txl_dist.errors import ConfigError, LostRankError, PreemptedError, TxlError, error_from_json
from txl_dist.evaluation.evaluate import EvaluationJob, EvaluationResult, evaluate_in_process
from txl_dist.launch.launcher import OnLine
from txl_dist.runtime.stop_request import STOPPING
from txl_dist.runtime.torchrun import without_torchrun
from txl_dist.training.follow import LogFollower
from txl_dist.training.job import TrainJob
from txl_dist.training.run_directory import RunDirectory

GRACE_SECONDS = 10.0
"""After one rank has failed, the others are killed after this time. They notice the failure at
their next collective; a rank that does not end by then hangs."""
POLL_SECONDS = 0.1


class ProcessLauncher:
    """Trains with `num_ranks` processes, evaluates in this process, prepares with processes."""

    def train(self, job: TrainJob, *, num_ranks: int, on_line: OnLine) -> None:
        """Raises the error that ended the run; PreemptedError after a stop signal."""
        directory = RunDirectory(job.run_path)
        _require_devices(num_ranks)
        directory.create()
        with directory.locked():
            pass  # raises if another run uses the directory, before any process is started
        with ExitStack() as stack:
            stack.enter_context(LogFollower(directory.log(0), on_line))
            signals = stack.enter_context(StopSignals())
            processes = stack.enter_context(_start_ranks(job, directory, num_ranks))
            ends = _wait(processes, signals, on_line)
        _raise_cause(ends, stop_requested=bool(signals), directory=directory)

    def evaluate(
        self, job: EvaluationJob, *, num_workers: int, on_progress: Callable[[int, int], None]
    ) -> EvaluationResult:
        """Scores in this process; torch's threads use all cores."""
        if num_workers != 1:
            raise ConfigError(
                f"--on processes scores in one process, not with {num_workers} workers; leave "
                "--workers out, or use --on ray"
            )
        return evaluate_in_process(job, on_progress=on_progress)

    def workers(self, num_workers: int) -> AbstractContextManager[Workers]:
        """Child processes."""
        return ProcessWorkers(num_workers)


def _require_devices(num_ranks: int) -> None:
    num_devices = torch.cuda.device_count()
    if 0 < num_devices < num_ranks:
        raise ConfigError(
            f"{num_ranks} ranks need one GPU each, and this machine has {num_devices}. Start at "
            f"most {num_devices} ranks, or use CPUs: put CUDA_VISIBLE_DEVICES= before the command"
        )


@contextmanager
def _start_ranks(
    job: TrainJob, directory: RunDirectory, num_ranks: int
) -> Iterator[list[subprocess.Popen[bytes]]]:
    """The processes of all ranks, in rank order; killed when the context exits."""
    processes: list[subprocess.Popen[bytes]] = []
    environment = {
        **without_torchrun(os.environ),
        "WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_free_port()),
    }
    # The ranks share the cores of this machine.
    environment.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // num_ranks)))
    with ExitStack() as stack:
        for rank in range(num_ranks):
            with directory.log(rank).open("ab") as log:
                process = subprocess.Popen(
                    [sys.executable, "-m", "txl_dist.training.rank"],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                    # Ctrl-C then reaches only this process, which forwards one signal.
                    start_new_session=True,
                )
            processes.append(stack.enter_context(process))  # closes the pipes and waits
            stack.callback(process.kill)  # has no effect on a process that has ended
            assert process.stdin is not None
            process.stdin.write(job.to_json().encode() + b"\n")
            process.stdin.flush()  # and stays open: closing it ends the rank
        yield processes


@dataclass(frozen=True, slots=True)
class _RankEnd:
    """How one rank ended."""

    rank: int
    code: int
    """Exit code, or minus the number of the signal that killed the process."""
    error: TxlError | None
    hung: bool
    """The launcher killed it, because it did not end after another rank had failed."""


def _wait(
    processes: Sequence[subprocess.Popen[bytes]], signals: StopSignals, on_line: OnLine
) -> list[_RankEnd]:
    """Wait for all ranks. Forward a stop request once; kill the others after one has failed."""
    deadline, is_forwarded = float("inf"), False
    hung: set[int] = set()
    while running := {n: process for n, process in enumerate(processes) if process.poll() is None}:
        if signals and not is_forwarded:
            is_forwarded = True
            on_line(STOPPING)
            for process in running.values():
                process.send_signal(signal.SIGTERM)
        if deadline == float("inf") and any(process.returncode for process in processes):
            deadline = time.monotonic() + GRACE_SECONDS
        if time.monotonic() > deadline:
            hung |= running.keys()
            for process in running.values():
                process.kill()
        time.sleep(POLL_SECONDS)
    return [
        _RankEnd(rank, process.wait(), _error_of_rank(process), rank in hung)
        for rank, process in enumerate(processes)
    ]


def _error_of_rank(process: subprocess.Popen[bytes]) -> TxlError | None:
    """The error that a rank wrote to its standard output before it ended."""
    assert process.stdout is not None
    line = process.stdout.readline()
    return error_from_json(line) if line else None


def _raise_cause(
    ends: Sequence[_RankEnd], *, stop_requested: bool, directory: RunDirectory
) -> None:
    """Raise the error that ended the run, if it failed.

    One failure usually makes all ranks fail. The first of these that exists is raised:
    1. a stop request; 2. a rank killed from outside; 3. an error of a rank's own; 4. a rank that
    hung. LostRankError comes last, because it is a consequence of another rank's failure.
    """
    failed = [end for end in ends if end.code]
    if not failed:
        return
    advice = resume_advice(directory.path)
    for end in failed:
        if isinstance(end.error, PreemptedError):
            raise end.error
    for end in failed:
        # During start-up a rank exits without an error, or is killed by the signal if it has not
        # yet installed its handlers.
        if end.code == PreemptedError.exit_code or (stop_requested and -end.code in STOP_SIGNALS):
            raise PreemptedError(f"stopped on request. {advice}")
    logs = f"Logs of all ranks: {directory.logs}"
    for end in failed:
        if end.code < 0 and not end.hung:
            name = signal.Signals(-end.code).name
            raise TxlError(
                f"rank {end.rank} was killed by {name}; the run stopped. {logs}. {advice}"
            )
    for end in failed:
        if end.error is not None and not isinstance(end.error, LostRankError):
            raise end.error
    hung = ", ".join(str(end.rank) for end in failed if end.hung)
    if hung:
        event = f"rank {hung} hung and was killed"
    else:
        event = f"rank {failed[0].rank} ended with code {failed[0].code}"
    consequence = next((str(end.error) for end in failed if end.error is not None), advice)
    raise TxlError(f"{event}. {consequence}. {logs}")


def _free_port() -> int:
    # Another program could take the port before rank 0 listens on it: the run then fails at its
    # start, and the same command works again.
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
