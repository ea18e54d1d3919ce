"""ProcessLauncher: ranks as plain child processes of this one, on this machine. No Ray.

A child gets its job through standard input, whose closing ends it: children never outlive this
process, not even when it is killed. The first child to fail ends the run.
"""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager

import torch

from data_pipeline.workers import ProcessWorkers, Workers
from txl_dist.errors import ConfigError, PreemptedError, TxlError
from txl_dist.evaluation.evaluate import EvaluationJob, EvaluationResult, evaluate_here
from txl_dist.launchers import OnLine
from txl_dist.training.follow import LogFollower
from txl_dist.training.job import TrainJob
from txl_dist.training.run_directory import RunDirectory

GRACE_SECONDS = 30.0
"""How long the other ranks get to end by themselves once one has failed."""
POLL_SECONDS = 0.1


class ProcessLauncher:
    """Trains with `num_ranks` processes, evaluates in this one, prepares with children."""

    def train(self, job: TrainJob, *, num_ranks: int, on_line: OnLine) -> None:
        """Raises the error of the first rank that failed, or PreemptedError."""
        directory = RunDirectory(job.run_path)
        _check_devices(num_ranks)
        directory.create()
        with directory.locked():
            pass  # refuses a directory in use before anything is started
        with ExitStack() as stack:
            stack.enter_context(LogFollower(directory.log(0), on_line))
            ranks = stack.enter_context(_started(job, directory, num_ranks))
            signalled = stack.enter_context(_signals_forwarded(ranks))
            codes = _wait(ranks)
        if error := directory.failure(job.attempt):
            raise error
        if signalled and any(-code in signalled for code in codes):
            raise PreemptedError("stopped on request before the first step; nothing is lost")
        failed = {rank: code for rank, code in enumerate(codes) if code}
        if failed:
            raise TxlError(_explain(failed, directory))

    def evaluate(
        self, job: EvaluationJob, *, num_workers: int, on_progress: Callable[[int, int], None]
    ) -> EvaluationResult:
        """Scores in this process, whose threads use all cores."""
        if num_workers != 1:
            raise ConfigError(
                f"--on processes scores in one process, not with {num_workers} workers; leave "
                "--workers out, or use --on ray"
            )
        return evaluate_here(job, on_progress=on_progress)

    def workers(self, num_workers: int) -> AbstractContextManager[Workers]:
        """Child processes."""
        return ProcessWorkers(num_workers)


def _check_devices(num_ranks: int) -> None:
    num_devices = torch.cuda.device_count()
    if 0 < num_devices < num_ranks:
        raise ConfigError(
            f"{num_ranks} ranks for {num_devices} GPUs: every rank needs one of its own. Start at "
            f"most {num_devices} ranks, or train on the CPU with CUDA_VISIBLE_DEVICES= before the "
            "command"
        )


@contextmanager
def _started(
    job: TrainJob, directory: RunDirectory, num_ranks: int
) -> Iterator[list[subprocess.Popen[bytes]]]:
    ranks: list[subprocess.Popen[bytes]] = []
    environment = {
        **os.environ,
        "WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_free_port()),
    }
    if "OMP_NUM_THREADS" not in os.environ:
        environment["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // num_ranks))
    try:
        for rank in range(num_ranks):
            with directory.log(rank).open("ab") as log:
                process = subprocess.Popen(
                    [sys.executable, "-m", "txl_dist.training.rank"],
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=log,
                    env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                    start_new_session=True,  # Ctrl-C reaches this process alone, which forwards it
                )
            ranks.append(process)
            assert process.stdin is not None
            process.stdin.write(job.to_json().encode() + b"\n")
            process.stdin.flush()
        yield ranks
    finally:
        for process in ranks:
            if process.poll() is None:
                process.kill()
        for process in ranks:
            process.wait()
            assert process.stdin is not None
            process.stdin.close()


@contextmanager
def _signals_forwarded(ranks: list[subprocess.Popen[bytes]]) -> Iterator[set[int]]:
    """SIGTERM and SIGINT to this process ask every rank to save and stop; gives those that came."""
    signalled: set[int] = set()

    def forward(number: int, _frame: object) -> None:
        signalled.add(number)
        for process in ranks:
            if process.poll() is None:
                process.send_signal(number)

    previous = {n: signal.signal(n, forward) for n in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield signalled
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _wait(ranks: list[subprocess.Popen[bytes]]) -> list[int]:
    """Exit codes of all ranks; once one failed, the rest get a grace period."""
    deadline = float("inf")
    while any(process.poll() is None for process in ranks):
        if deadline == float("inf") and any(process.poll() for process in ranks):
            deadline = time.monotonic() + GRACE_SECONDS
        if time.monotonic() > deadline:
            for process in ranks:
                if process.poll() is None:
                    process.kill()
        time.sleep(POLL_SECONDS)
    return [process.wait() for process in ranks]


def _explain(failed: dict[int, int], directory: RunDirectory) -> str:
    # A killed rank is the cause; the others then fail because it is gone.
    rank, code = min(failed.items(), key=lambda item: (item[1] > 0, item[0]))
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
    return (
        f"rank {rank} {how}; the run stopped. Its log: {directory.log(rank)}. The same command "
        "resumes from the newest checkpoint"
    )


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
