"""ProcessLauncher: ranks as child processes on this machine, without Ray.

A child reads its job from standard input, and ends when that pipe is closed, so no child outlives
this process, even if it is killed. A child writes the error that ended it to standard output. If
one child fails, all end. `supervision.py` decides whether they are started again.
"""

import math
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress

from data_pipeline.system.signals import StopSignals
from data_pipeline.system.workers import InProcess, ProcessWorkers, Workers
from txl_dist.checkpoint.directory import CheckpointDirectory
from txl_dist.config.training_config import TrainingConfig
from txl_dist.doctor.checks import DoctorRequest, check_this_machine
from txl_dist.doctor.finding import Finding
from txl_dist.errors import ConfigError, TxlError, error_from_json
from txl_dist.launch.launch_files import LaunchFiles
from txl_dist.launch.launch_output import LaunchOutput
from txl_dist.launch.launcher import OnLine
from txl_dist.launch.supervision import (
    RankEnd,
    RestartBudget,
    RunFailure,
    failure_of,
    is_stop_code,
    restart_delay_seconds,
    restart_line,
)
from txl_dist.runtime.heartbeat import HangWatch
from txl_dist.runtime.process import num_gpus, without_torchrun
from txl_dist.runtime.stop import STOPPING, StopRequest
from txl_dist.tracking.tracker import wait_for_delivery
from txl_dist.training.follow import LogFollower
from txl_dist.training.job import TrainJob
from txl_dist.training.run_directory import SECONDS_TO_END, RunDirectory

AFTER_FAILURE_SECONDS = 10.0
"""After one rank has failed, the others are killed after this time. They notice the failure at
their next collective; a rank that does not end by then hangs."""
AFTER_KILL_SECONDS = 1.0
"""The same after a rank was killed. Then it is known why the ranks end, and a restart waits. Not if
rank 0 is completing a checkpoint, which saves more than these seconds."""
STOP_MARGIN_SECONDS = 3.0
"""Ranks end by themselves `training.grace_seconds` after a stop request; those that cannot are
killed after this additional time, which Kubernetes' grace period still includes."""
POLL_SECONDS = 0.1


class ProcessLauncher:
    """Trains with `num_ranks` processes, evaluates in this process, prepares with processes."""

    def train(
        self,
        job: TrainJob,
        *,
        num_ranks: int,
        on_line: OnLine,
        max_restarts: int | None = None,
        min_ranks: int | None = None,
    ) -> None:
        """Raises the error that ended the run; PreemptedError after a stop signal.

        After a failure that a restart can repair, all ranks are started again from the newest
        checkpoint, `max_restarts` times (None: 0) without a new checkpoint in between.
        """
        if min_ranks not in (None, num_ranks):
            raise ConfigError(
                f"--ranks {min_ranks}:{num_ranks} with --on processes: processes of one machine do "
                f"not come and go. Give one number (--ranks {num_ranks}), or use --on ray or the "
                "address of a Ray cluster"
            )
        directory = RunDirectory(job.run_path)
        _require_devices(num_ranks)
        directory.create()
        # Raises if another run uses the directory, before any process is started.
        with directory.locked(timeout_seconds=SECONDS_TO_END, force=job.force_unlock):
            pass
        files = LaunchFiles(directory.path, job.launch_id)
        job = job.model_copy(update={"stop_file": str(files.stop), "saved_file": str(files.saved)})
        budget = RestartBudget(max_restarts or 0)
        with ExitStack() as stack:
            stack.enter_context(files.held())
            output = LaunchOutput(on_line)
            follower = LogFollower(directory.log(0), output.print_log_line)
            log_of_rank_0 = stack.enter_context(follower)
            signals = stack.enter_context(StopSignals())
            stack.callback(wait_for_delivery, directory.path, job.config, signals, output.print)
            while failure := _run_ranks(job, directory, files, num_ranks, signals, output):
                if not failure.can_restart or budget.max_restarts == 0:
                    raise failure.error
                newest_step = directory.checkpoints.newest_step()
                if not budget.allows_restart(newest_step=newest_step):
                    raise budget.exhausted_error(failure.event, directory) from failure.error
                job = files.job_after_restart(job)
                log_of_rank_0.flush()  # what rank 0 says about the failure comes first
                output.print(
                    restart_line(failure, budget, newest_step=newest_step, resume=job.resume)
                )
                _wait_before_restart(restart_delay_seconds(budget.num_failures), signals)

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

    def check_nodes(self, request: DoctorRequest) -> list[Finding]:
        """Check this machine."""
        return check_this_machine(request)


def _wait_before_restart(seconds: float, signals: StopSignals) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and not signals:
        time.sleep(POLL_SECONDS)


def _require_devices(num_ranks: int) -> None:
    num_devices = num_gpus()
    if 0 < num_devices < num_ranks:
        raise ConfigError(
            f"{num_ranks} ranks need one GPU each, and this machine has {num_devices}. Start at "
            f"most {num_devices} ranks, or use CPUs: put CUDA_VISIBLE_DEVICES= before the command"
        )


def _run_ranks(
    job: TrainJob,
    directory: RunDirectory,
    files: LaunchFiles,
    num_ranks: int,
    signals: StopSignals,
    output: LaunchOutput,
) -> RunFailure | None:
    """Start all ranks and wait until they have ended; returns why they failed."""
    output.begin_ranks()
    ranks = "1 rank starts" if num_ranks == 1 else f"{num_ranks} ranks start"
    output.print(f"{ranks} on this machine; logs: {directory.logs}")
    with (
        HangWatch(directory.path, num_ranks=num_ranks) as watch,
        _start_ranks(job, directory, num_ranks) as processes,
    ):
        ends = _wait(
            processes,
            signals,
            files,
            watch,
            checkpoints=directory.checkpoints,
            config=job.config.training,
            output=output,
        )
    return failure_of(
        ends, stop_requested=bool(signals), has_saved=files.saved.exists(), directory=directory
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
                    [sys.executable, "-m", "txl_dist.launch.rank_process"],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                    # Ctrl-C then reaches only this process, which forwards one signal.
                    start_new_session=True,
                    bufsize=0,
                )
            processes.append(stack.enter_context(process))  # closes the pipes and waits
            stack.callback(process.kill)  # has no effect on a process that has ended
            assert process.stdin is not None
            with suppress(BrokenPipeError):  # the rank was killed; its exit code tells
                # Stays open: closing it ends the rank.
                process.stdin.write(job.to_json().encode() + b"\n")
        yield processes


def _wait(
    processes: Sequence[subprocess.Popen[bytes]],
    signals: StopSignals,
    files: LaunchFiles,
    watch: HangWatch,
    *,
    checkpoints: CheckpointDirectory,
    config: TrainingConfig,
    output: LaunchOutput,
) -> list[RankEnd]:
    """Wait for all ranks. Pass a stop request on once; kill the ranks that do not end in time, and
    all of them if they hang.
    """
    grace_seconds = config.grace_seconds
    deadline, is_forwarded = math.inf, False
    hung: set[int] = set()
    while running := {n: process for n, process in enumerate(processes) if process.poll() is None}:
        if signals and not is_forwarded:
            is_forwarded = True
            output.print(STOPPING)
            for process in running.values():
                process.send_signal(signal.SIGTERM)
            deadline = time.monotonic() + grace_seconds + STOP_MARGIN_SECONDS
        codes = [process.returncode for process in processes if process.returncode]
        if not is_forwarded and any(map(is_stop_code, codes)):
            # Not a signal: where a rank has already got one, a second means to end without saving.
            StopRequest(stop_file=files.stop).share()
        hang = watch.hang(timeout_seconds=config.rank_timeout_seconds)
        if hang and deadline == math.inf:
            output.print(hang)
            deadline = 0.0
        is_publishing = bool(codes) and 0 in running and checkpoints.is_publishing(len(processes))
        limits = [
            _seconds_for_others(code, grace_seconds=grace_seconds, is_publishing=is_publishing)
            for code in codes
        ]
        deadline = min([deadline, *(time.monotonic() + seconds for seconds in limits)])
        if time.monotonic() > deadline:
            hung |= running.keys()
            for process in running.values():
                process.kill()
        if output.status_is_due:
            output.print_wait()
        time.sleep(POLL_SECONDS)
    return [
        RankEnd(rank, process.wait(), _error_of_rank(process), rank in hung)
        for rank, process in enumerate(processes)
    ]


def _seconds_for_others(code: int, *, grace_seconds: float, is_publishing: bool) -> float:
    """How long the other ranks have to end, after one has ended with a code other than 0."""
    if is_stop_code(code):
        return grace_seconds + STOP_MARGIN_SECONDS
    return AFTER_KILL_SECONDS if code < 0 and not is_publishing else AFTER_FAILURE_SECONDS


def _error_of_rank(process: subprocess.Popen[bytes]) -> TxlError | None:
    """The error that a rank wrote to its standard output before it ended."""
    assert process.stdout is not None
    line = process.stdout.readline()
    return error_from_json(line) if line else None


def _free_port() -> int:
    # Another program could take the port before rank 0 listens on it: the run then fails at its
    # start, and the same command works again.
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
