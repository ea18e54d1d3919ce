"""Supervisor: the launcher's main thread while Ray, in another thread, starts and runs the ranks.

A call into Ray can block for minutes or without limit, and Python handles no signal meanwhile. So
the main thread makes no calls into Ray. Every POLL_SECONDS it

1. reads from the launch files which ranks have started or failed, and prints failures
   (`rank_monitor.py`);
2. passes a stop request on to the ranks, as a stop file;
3. decides when ranks start, how many, and when they end early for a change (`rank_starts.py`);
4. prints what the launch is waiting for, until the first step;
5. gives up if a time limit has passed: it kills a private Ray and abandons Ray's thread.
"""

import logging
import threading
import time
from collections.abc import Callable

from cluster.connection import abandon_ray, responds
from cluster.failure_counter import NODE_LOSS_SECONDS, FailureCounter
from cluster.nodes import ClusterMonitor
from cluster.private_ray import end_private_ray
from cluster.rank_monitor import RankMonitor, describe_draining
from cluster.rank_plan import RankPlan
from cluster.rank_starts import RankStarts
from data_pipeline.system.signals import StopSignals, block_stop_signals, end_now
from txl_dist.checkpoint.directory import resume_advice
from txl_dist.config.run_config import RunConfig
from txl_dist.errors import PreemptedError, TxlError
from txl_dist.launch.launch_files import LaunchFiles
from txl_dist.launch.launch_output import LaunchOutput
from txl_dist.launch.launcher import OnLine
from txl_dist.launch.supervision import RestartBudget
from txl_dist.runtime.stop import STOPPING
from txl_dist.tracking.tracker import wait_for_delivery
from txl_dist.training.follow import LogFollower
from txl_dist.training.run_directory import RunDirectory

POLL_SECONDS = 0.2
STOP_MARGIN_SECONDS = 3.0
"""Ranks end by themselves `grace_seconds` after a stop request; this is what they may exceed it."""
HEAD_SECONDS = 30.0
"""Time limit for the head node to respond. Ray itself aborts this process after 60 seconds."""
SHUTDOWN_SECONDS = 15.0
"""Time limit for Ray's shutdown once the ranks have ended."""

log = logging.getLogger("ray.txl")


class Supervisor:
    """Supervises one launch. Ray's thread uses `starts`."""

    def __init__(
        self,
        directory: RunDirectory,
        files: LaunchFiles,
        *,
        plan: RankPlan,
        address: str | None,
        config: RunConfig,
        budget: RestartBudget,
        on_line: OnLine,
    ) -> None:
        self._directory, self._files, self._plan, self._address = directory, files, plan, address
        self._config, self._grace_seconds = config, config.training.grace_seconds
        # A private Ray has one node, which this process would not outlive.
        wait_seconds = 0.0 if address is None else NODE_LOSS_SECONDS
        self._counter = FailureCounter(budget, directory, wait_seconds=wait_seconds)
        self._ranks = RankMonitor(files, self._counter)
        self._output = LaunchOutput(on_line)
        self.starts = RankStarts(directory, files, plan, self._ranks, self._counter, self._output)
        self._stop_deadline: float | None = None
        """When to give up on ranks that were asked to stop."""
        self._is_preempted = False
        self._ended_at: float | None = None
        self._error: Exception | None = None

    @property
    def monitor(self) -> ClusterMonitor | None:
        """Set by Ray's thread once it is connected."""
        return self._ranks.cluster

    @monitor.setter
    def monitor(self, monitor: ClusterMonitor) -> None:
        if self._ranks.cluster is None:
            self._output.print(f"Ray is up after {self._waited_seconds:.0f} s")
        self._ranks.cluster = monitor

    def run(self, run_ray: Callable[[], None]) -> None:
        """Call `run_ray` in a thread until it returns. Raises the TxlError that ended the launch.

        `run_ray` must call `set_ended` when the ranks have ended, before it disconnects from Ray.
        """
        thread = threading.Thread(
            target=self._run_in_thread, args=(run_ray,), name="ray", daemon=True
        )
        rank_0_log = LogFollower(self._directory.log(0), self._output.print_record)
        with StopSignals(on_repeat=self._kill_ray_and_end) as signals, rank_0_log:
            thread.start()
            place = "starting Ray" if self._address is None else f"connecting to {self._address}"
            self._output.print(f"{place}; ranks to start: {self._plan.ranks}")
            error = self._supervise(thread, signals)
            wait_for_delivery(self._directory.path, self._config, signals, self._output.print)
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
                if error := self._poll(is_stop_requested=self._is_stop_requested(signals)):
                    return error
            elif time.monotonic() - self._ended_at > SHUTDOWN_SECONDS:
                break
            thread.join(POLL_SECONDS)
        return self._launch_error(is_stop_requested=self._is_stop_requested(signals))

    def _poll(self, *, is_stop_requested: bool) -> TxlError | None:
        """Steps 1 to 5 above; returns an error to give up with."""
        is_ending = is_stop_requested or self.starts.change is not None
        self._ranks.read(self._plan.num_ranks, is_stopping=is_ending)
        # Before the failure is reported as one after which training resumes.
        if not is_stop_requested and (error := self._check_budget()):
            return error
        self._report_failure()
        if is_stop_requested and (error := self._forward_stop()):
            return error
        if not is_stop_requested:
            self.starts.poll()
        if self._output.status_is_due:
            self._output.print(f"waiting {self._waited_seconds:.0f} s for {self._describe_wait()}")
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

    # --- 1. failures ------------------------------------------------------------------------------

    def _report_failure(self) -> None:
        event = self._ranks.take_failure()
        if event is None:
            return
        self.starts.begin_wait()
        loss = self._output.describe_loss(self._directory.checkpoints.newest_step())
        self._output.print(
            f"{event}; waiting for {self._describe_wait()}. Training then resumes from the newest "
            f"checkpoint: {loss} (details: {self._ray_log})"
        )

    def _check_budget(self) -> TxlError | None:
        """Count failures; returns the error that ends the launch after too many."""
        if self._files.error() is not None:  # the ranks return, and the launch ends with this error
            return None
        state = self.monitor.state if self.monitor else None
        return self._counter.check(state.node_ids if state else None)

    # --- 2. stop requests -------------------------------------------------------------------------

    def _is_stop_requested(self, signals: StopSignals) -> bool:
        """By a signal, or because the node of this process is preempted."""
        monitor = self.monitor
        deadlines = monitor.state.deadlines if monitor and monitor.state else {}
        if not self._is_preempted and monitor and monitor.own_node_id in deadlines:
            self._is_preempted = True
            node = describe_draining("of the launcher", deadlines[monitor.own_node_id])
            self._output.print(f"{node}: the launch ends")
        return bool(signals) or self._is_preempted

    def _forward_stop(self) -> TxlError | None:
        """Ask the ranks to save and stop, once; without ranks, end here."""
        if not self._ranks.locations:
            has_failed = self._ranks.has_failed
            state = "no rank is training" if has_failed else "nothing has been trained yet"
            self._output.print(f"stopping: {state}")
            return PreemptedError(
                f"stopped on request while no rank was training. {self._resume_advice}"
            )
        if self._stop_deadline is None:
            self._stop_deadline = time.monotonic() + self._grace_seconds + STOP_MARGIN_SECONDS
            self._files.stop.touch()
            self._output.print(STOPPING)
            self.starts.end_thread()
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

    # --- 4. output --------------------------------------------------------------------------------

    def _describe_wait(self) -> str:
        if self._ranks.locations:
            return self._output.describe_ranks()
        if self.monitor is not None:
            return self.monitor.describe_wait(
                self._plan.ranks.minimum, waited_seconds=self._waited_seconds
            )
        return "Ray to start" if self._address is None else f"the Ray cluster at {self._address}"

    @property
    def _waited_seconds(self) -> float:
        return time.monotonic() - self.starts.waiting_since

    @property
    def _ray_log(self) -> str:
        return str(self._directory.logs / "ray.log")

    @property
    def _resume_advice(self) -> str:
        return resume_advice(self._directory.path)

    # --- 5. giving up -----------------------------------------------------------------------------

    def _check_time_limits(self) -> TxlError | None:
        limit_seconds = self._config.ray.start_timeout_seconds
        if not self._ranks.locations and self._waited_seconds > limit_seconds:
            return TxlError(
                f"the ranks did not start within {limit_seconds:g} s "
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
