"""Supervisor: the launcher's main thread while Ray, in another thread, starts and runs the ranks.

A call into Ray can block for minutes or without limit, and Python handles no signal meanwhile. So
the main thread makes no calls into Ray. Every POLL_SECONDS it

1. reads from the launch files which ranks have started or failed, and prints failures;
2. passes a stop request on to the ranks, as a stop file;
3. prints what the launch is waiting for, until the first step;
4. gives up if a time limit has passed: it kills a private Ray and abandons Ray's thread.
"""

import logging
import re
import threading
import time
from collections.abc import Callable
from dataclasses import replace

from cluster.address import responds
from cluster.cluster_monitor import ClusterMonitor
from cluster.connection import abandon_ray
from cluster.failure_counter import NODE_LOSS_SECONDS, FailureCounter
from cluster.private_ray import end_private_ray
from data_pipeline.processes.stop_signals import StopSignals, block_stop_signals, end_now
from txl_dist.checkpoint.directory import resume_advice
from txl_dist.errors import PreemptedError, TxlError
from txl_dist.launch.launch_files import LaunchFiles, RankFailure, RankLocation
from txl_dist.launch.launcher import OnLine
from txl_dist.launch.supervision import RestartBudget
from txl_dist.runtime.stop_request import STOPPING
from txl_dist.training.follow import LogFollower, step_of
from txl_dist.training.run_directory import RunDirectory

POLL_SECONDS = 0.2
STATUS_SECONDS = 10.0
"""Before the first step, a status line is printed after this time without output."""
STOP_MARGIN_SECONDS = 3.0
"""Ranks end by themselves `grace_seconds` after a stop request; this is what they may exceed it."""
HEAD_SECONDS = 30.0
"""Time limit for the head node to respond. Ray itself aborts this process after 60 seconds."""
SHUTDOWN_SECONDS = 15.0
"""Time limit for Ray's shutdown once the ranks have ended."""

log = logging.getLogger("ray.txl")
_RECORD = re.compile(r"^\d\d:\d\d:\d\d (?!rank \d+ failed$)")
"""First line of a log record. Failures are excluded, as are the lines of tracebacks: the supervisor
prints one line per failure."""


class Supervisor:
    """Supervises one launch. Ray's thread sets `monitor` once it is connected."""

    def __init__(
        self,
        directory: RunDirectory,
        files: LaunchFiles,
        *,
        num_ranks: int,
        address: str | None,
        start_timeout_seconds: float,
        grace_seconds: float,
        budget: RestartBudget,
        on_line: OnLine,
    ) -> None:
        self.monitor: ClusterMonitor | None = None
        self._directory, self._files = directory, files
        self._num_ranks, self._address = num_ranks, address
        self._start_timeout_seconds, self._grace_seconds = start_timeout_seconds, grace_seconds
        # A private Ray has one node, which this process would not outlive.
        wait_seconds = 0.0 if address is None else NODE_LOSS_SECONDS
        self._counter = FailureCounter(budget, directory, wait_seconds=wait_seconds)
        self._on_line, self._print_lock = on_line, threading.Lock()
        self._waiting_since = self._last_print = time.monotonic()
        self._locations: dict[int, RankLocation] = {}
        """Filled once all ranks have started; empty again after a failure."""
        self._failure: tuple[float, RankFailure] | None = None
        """A failure that is not yet reported, and when it was read."""
        self._has_stepped = self._has_failed = False
        self._stop_deadline: float | None = None
        """When to give up on ranks that were asked to stop."""
        self._ended_at: float | None = None
        self._error: Exception | None = None

    def run(self, run_ray: Callable[[], None]) -> None:
        """Call `run_ray` in a thread until it returns. Raises the TxlError that ended the launch.

        `run_ray` must call `set_ended` when the ranks have ended, before it disconnects from Ray.
        """
        thread = threading.Thread(
            target=self._run_in_thread, args=(run_ray,), name="ray", daemon=True
        )
        rank_0_log = LogFollower(self._directory.log(0), self._print_record)
        with StopSignals(on_repeat=self._kill_ray_and_end) as signals, rank_0_log:
            thread.start()
            error = self._supervise(thread, signals)
            if thread.is_alive():
                abandon_ray(self._address, error.exit_code if error else 0)
        if error:
            raise error

    def set_ended(self, error: Exception | None) -> None:
        """Called from Ray's thread: the ranks have ended, with this error of Ray or Ray Train."""
        self._error, self._ended_at = error, time.monotonic()

    def _run_in_thread(self, run_ray: Callable[[], None]) -> None:
        # The processes of a private Ray inherit the mask. A signal to every process of the job must
        # not end them while the ranks still have to save.
        block_stop_signals()
        try:
            run_ray()
        except Exception as error:
            self.set_ended(error)

    def _supervise(self, thread: threading.Thread, signals: StopSignals) -> TxlError | None:
        """Poll until Ray's thread has ended or is given up; returns what ended the launch."""
        while thread.is_alive():
            # When Ray connects, it replaces our handlers by one in C++, which prints a stack and
            # aborts the process three seconds after a SIGTERM.
            signals.reinstall()
            if self._ended_at is None:
                if error := self._poll(is_stop_requested=bool(signals)):
                    return error
            elif time.monotonic() - self._ended_at > SHUTDOWN_SECONDS:
                break
            thread.join(POLL_SECONDS)
        return self._launch_error(is_stop_requested=bool(signals))

    def _poll(self, *, is_stop_requested: bool) -> TxlError | None:
        """Steps 1 to 4 above; returns an error to give up with."""
        self._read_launch_files()
        self._report_failure()
        if is_stop_requested and (error := self._forward_stop()):
            return error
        if not is_stop_requested and (error := self._check_budget()):
            return error
        if not self._has_stepped and time.monotonic() - self._last_print > STATUS_SECONDS:
            seconds = time.monotonic() - self._waiting_since
            self._print(f"waiting {seconds:.0f} s for {self._describe_wait()}")
        return self._check_time_limits()

    def _launch_error(self, *, is_stop_requested: bool) -> TxlError | None:
        """The error of the launch after Ray's end: the best explanation that there is."""
        if rank_error := self._files.error():
            return rank_error
        error = self._error
        if error is None:
            return None
        log.warning("%s", error)
        first_line = next(iter(str(error).splitlines()), type(error).__name__)
        if is_stop_requested:
            return PreemptedError(
                f"stopped on request, but Ray ended before the ranks had saved: {first_line}. "
                f"{self._resume_advice}"
            )
        if isinstance(error, TxlError):
            return error
        if self.monitor is not None and not responds(self.monitor.head):
            return self._lost_head_error(self.monitor)
        return TxlError(
            f"Ray ended with an error: {first_line}. More in {self._directory.logs}. "
            f"{self._resume_advice}"
        )

    # --- 1. start and failure of ranks ------------------------------------------------------------

    def _read_launch_files(self) -> None:
        if not self._locations:
            locations = self._files.locations(self._num_ranks)
            if len(locations) == self._num_ranks:
                self._locations = locations
        for failure in self._files.new_failures():
            for rank, text in failure.errors.items():
                log.warning("rank %d: %s", rank, text)
            self._failure = time.monotonic(), failure
            if not failure.is_preemption:
                node_ids = frozenset(location.node_id for location in self._locations.values())
                self._counter.add(self._describe_failure(failure), node_ids=node_ids)
            self._files.remove_locations(self._num_ranks)  # before the restarted ranks write theirs

    def _report_failure(self) -> None:
        """Print which ranks died or failed, as soon as that is known, and wait for new ranks."""
        if self._failure is None or self._files.error() is not None:
            return
        since, failure = self._failure
        # When a node dies, Ray Train reports an error of the surviving ranks first. The node's
        # death explains it, and Ray notices that some seconds later.
        failure = replace(failure, died=self._ranks_on_dead_nodes() or failure.died)
        if not failure.died and time.monotonic() - since < NODE_LOSS_SECONDS:
            return
        event = self._describe_failure(failure)
        self._failure, self._locations, self._has_failed = None, {}, True
        self._waiting_since, self._has_stepped = time.monotonic(), False
        self._print(
            f"{event}; waiting for {self._describe_wait()}. Training then resumes from the newest "
            f"checkpoint (details: {self._ray_log})"
        )

    def _describe_failure(self, failure: RankFailure) -> str:
        if failure.died:
            return " and ".join(f"{self._describe_rank(rank)} died" for rank in failure.died)
        rank, text = next(iter(failure.errors.items()))
        return f"{self._describe_rank(rank)} failed ({text.splitlines()[0]})"

    def _check_budget(self) -> TxlError | None:
        """Count failures; returns the error that ends the launch after too many."""
        if self._files.error() is not None:  # the ranks return, and the launch ends with this error
            return None
        state = self.monitor.state if self.monitor else None
        return self._counter.check(state.node_ids if state else None)

    def _ranks_on_dead_nodes(self) -> tuple[int, ...]:
        state = self.monitor.state if self.monitor else None
        if state is None:
            return ()
        return tuple(
            rank
            for rank, location in self._locations.items()
            if location.node_id not in state.node_ids
        )

    # --- 2. stop requests -------------------------------------------------------------------------

    def _forward_stop(self) -> TxlError | None:
        """Ask the ranks to save and stop, once; without ranks, end here."""
        if not self._locations:
            state = "no rank is training" if self._has_failed else "nothing has been trained yet"
            self._print(f"stopping: {state}")
            return PreemptedError(
                f"stopped on request while no rank was training. {self._resume_advice}"
            )
        if self._stop_deadline is None:
            self._stop_deadline = time.monotonic() + self._grace_seconds + STOP_MARGIN_SECONDS
            self._files.stop.touch()
            self._print(STOPPING)
        if self._files.error() is not None:  # the ranks' PreemptedError: do not wait for Ray
            self.set_ended(None)
        elif time.monotonic() > self._stop_deadline:
            return PreemptedError(
                "stopped on request, and the ranks were killed, because they did not end within "
                f"training.grace_seconds={self._grace_seconds:g}. {self._resume_advice}"
            )
        return None

    def _kill_ray_and_end(self) -> None:
        """A stop signal was repeated: end without saving, and kill a private Ray."""
        if self._address is None:
            end_private_ray()
        end_now()

    # --- 3. output --------------------------------------------------------------------------------

    def _print(self, line: str) -> None:
        with self._print_lock:  # the log of rank 0 is followed in another thread
            self._last_print = time.monotonic()
            self._on_line(line)

    def _print_record(self, line: str) -> None:
        """A line of rank 0's log."""
        if _RECORD.match(line):
            self._has_stepped |= step_of(line) is not None
            self._print(line)

    def _describe_wait(self) -> str:
        if self._locations:
            return "the first step: the ranks are running and load data and model"
        if self.monitor is not None:
            return self.monitor.describe_wait(self._num_ranks)
        return "Ray to start" if self._address is None else f"the Ray cluster at {self._address}"

    def _describe_rank(self, rank: int) -> str:
        location = self._locations.get(rank)
        return f"rank {rank}" + (
            f" (node {location.address}, pid {location.pid})" if location else ""
        )

    @property
    def _ray_log(self) -> str:
        return str(self._directory.logs / "ray.log")

    @property
    def _resume_advice(self) -> str:
        return resume_advice(self._directory.path)

    # --- 4. giving up -----------------------------------------------------------------------------

    def _check_time_limits(self) -> TxlError | None:
        waited_seconds = time.monotonic() - self._waiting_since
        if not self._locations and waited_seconds > self._start_timeout_seconds:
            return TxlError(
                f"the ranks did not start within {self._start_timeout_seconds:g} s "
                f"(ray.start_timeout_seconds), while waiting for {self._describe_wait()}. Ray's "
                f"log: {self._ray_log}. Run the same command again, or use --on processes"
            )
        if self.monitor is not None and self.monitor.silent_seconds > HEAD_SECONDS:
            return self._lost_head_error(self.monitor)
        return None

    def _lost_head_error(self, monitor: ClusterMonitor) -> TxlError:
        return TxlError(
            f"the head of the Ray cluster at {monitor.head} does not respond: its node or network "
            f"failed, which ends the ranks too. Start the cluster again. {self._resume_advice}"
        )
