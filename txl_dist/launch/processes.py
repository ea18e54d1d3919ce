"""ProcessLauncher: ranks as plain child processes of this one, on this machine. No Ray.

A child gets its job through standard input, whose closing ends it: children never outlive this
process, not even when it is killed. What ended a child comes back on its standard output. The first
child to fail ends the run.
"""

import json
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
from txl_dist.errors import ConfigError, LostRankError, PreemptedError, TxlError, error_of
from txl_dist.evaluation.evaluate import EvaluationJob, EvaluationResult, evaluate_here
from txl_dist.launch.launcher import OnLine
from txl_dist.runtime.stop_request import STOPPING
from txl_dist.runtime.torchrun import without_torchrun
from txl_dist.training.follow import LogFollower
from txl_dist.training.job import TrainJob
from txl_dist.training.run_directory import RunDirectory

GRACE_SECONDS = 10.0
"""How long the other ranks get to end by themselves once one has failed. They notice at their next
collective; one that does not hangs, or computes something whose result nobody will use."""
POLL_SECONDS = 0.1


class ProcessLauncher:
    """Trains with `num_ranks` processes, evaluates in this one, prepares with children."""

    def train(self, job: TrainJob, *, num_ranks: int, on_line: OnLine) -> None:
        """Raises the error that ended the run, PreemptedError if it was a request to stop."""
        directory = RunDirectory(job.run_path)
        _check_devices(num_ranks)
        directory.create()
        with directory.locked():
            pass  # refuses a directory in use before anything is started
        with ExitStack() as stack:
            stack.enter_context(LogFollower(directory.log(0), on_line))
            signals = stack.enter_context(StopSignals())
            ranks = stack.enter_context(_started(job, directory, num_ranks))
            ends = _wait(ranks, signals, on_line)
        _raise_cause(ends, stop_requested=bool(signals), directory=directory)

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
        **without_torchrun(os.environ),
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
                    stdout=subprocess.PIPE,
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
            assert process.stdout is not None
            process.stdin.close()
            process.stdout.close()


@dataclass(frozen=True, slots=True)
class _RankEnd:
    """How one rank ended."""

    rank: int
    code: int
    """Exit code; minus the signal's number for a killed process."""
    error: TxlError | None
    hung: bool
    """It did not end by itself after another rank had, and was killed by this launcher."""


def _wait(
    ranks: Sequence[subprocess.Popen[bytes]], signals: StopSignals, on_line: OnLine
) -> list[_RankEnd]:
    """Wait for all ranks; forward a stop request once; end the rest when one has failed."""
    deadline, forwarded = float("inf"), False
    hung: set[int] = set()
    while any(process.poll() is None for process in ranks):
        if signals and not forwarded:
            forwarded = True
            on_line(STOPPING)
            for process in ranks:
                if process.poll() is None:
                    process.send_signal(signal.SIGTERM)
        if deadline == float("inf") and any(process.poll() for process in ranks):
            deadline = time.monotonic() + GRACE_SECONDS
        if time.monotonic() > deadline:
            for rank, process in enumerate(ranks):
                if process.poll() is None:
                    hung.add(rank)
                    process.kill()
        time.sleep(POLL_SECONDS)
    return [
        _RankEnd(rank, process.wait(), _error_of(process), rank in hung)
        for rank, process in enumerate(ranks)
    ]


def _error_of(process: subprocess.Popen[bytes]) -> TxlError | None:
    """What an ended rank wrote on its standard output."""
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        return None
    content = json.loads(line)
    return error_of(content["type"], content["message"])


def _raise_cause(
    ends: Sequence[_RankEnd], *, stop_requested: bool, directory: RunDirectory
) -> None:
    """Raise what ended the run, if it did not end well. The order is from causes to consequences:

    a rank that somebody killed, an error that a rank found, a rank that hung; only then what the
    other ranks noticed of it.
    """
    failed = [end for end in ends if end.code]
    if not failed:
        return
    advice = resume_advice(directory.path)
    for end in failed:
        if isinstance(end.error, PreemptedError):
            raise end.error
    for end in failed:
        # In start-up a rank ends at once, or by the signal itself if it could not catch it yet.
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
    what = (
        f"rank {hung} hung and was ended"
        if hung
        else f"rank {failed[0].rank} ended with code {failed[0].code}"
    )
    noticed = next((f"{end.error}" for end in failed if end.error is not None), advice)
    raise TxlError(f"{what}. {noticed}. {logs}")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
