"""RankStarts: when the ranks of a launch start, how many, and when they end early for a change.

Ray's thread runs one start after another (`ray_train.py`):

    wait -> number of ranks -> Ray Train -> end -> wait -> ...

The main thread decides by `poll` (`supervisor.py`). Each start is a new run of Ray Train with a
fixed number of ranks, which resume from the newest checkpoint; Ray Train itself restarts and
resizes nothing. Before a planned change the ranks save, so it loses no step:

    a node with ranks is preempted    stop file -> ranks save and return -> start on other nodes
    more ranks fit (--ranks A:B)      the same, with more ranks
"""

import queue
import time
from enum import Enum, auto

from cluster.failure_counter import FailureCounter
from cluster.rank_monitor import RankMonitor
from cluster.rank_plan import RankPlan
from txl_dist.errors import PreemptedError
from txl_dist.launch.launch_files import LaunchFiles
from txl_dist.launch.launch_output import LaunchOutput
from txl_dist.training.run_directory import RunDirectory

_END = 0
"""A number of ranks that tells Ray's thread to disconnect."""


class StartOutcome(Enum):
    """How the ranks of one start have ended, as Ray Train reports it."""

    RETURNED = auto()
    """All: at the end of the run, or with an error in the launch files."""
    FAILED = auto()
    NOT_STARTED = auto()
    """Their resources were gone before they started."""


class RankStarts:
    """The starts of one launch."""

    def __init__(
        self,
        directory: RunDirectory,
        files: LaunchFiles,
        plan: RankPlan,
        ranks: RankMonitor,
        counter: FailureCounter,
        output: LaunchOutput,
    ) -> None:
        self._directory, self._files, self._plan = directory, files, plan
        self._ranks, self._counter, self._output = ranks, counter, output
        self._numbers: queue.Queue[int] = queue.Queue()
        self._end: StartOutcome | None = None
        self._is_running = self._is_over = False
        self._is_change = False
        """Whether the last ranks have ended for a change."""
        self._restart_at = 0.0
        self.change: str | None = None
        """Why the running ranks were asked to end before others start."""
        self.waiting_since = time.monotonic()
        """When the ranks that run now, or are to start, began to be waited for."""

    # --- Ray's thread -----------------------------------------------------------------------------

    def wait(self) -> int | None:
        """Wait until ranks may start; returns how many, or None if the launch ends."""
        return self._numbers.get() or None

    def end(self, end: StartOutcome) -> None:
        """The ranks have ended."""
        self._end = end

    # --- the main thread --------------------------------------------------------------------------

    def poll(self) -> None:
        """Start ranks, or end the running ones early, as the state of the cluster requires."""
        if self._is_over:
            return
        if self._is_running:
            if self._end is not None:
                self._after_ranks(self._end)
            elif self._ranks.are_running and self.change is None:
                self._begin_change()
        elif time.monotonic() >= self._restart_at:
            self._start()

    def end_thread(self) -> None:
        """Let Ray's thread disconnect once the ranks have ended; none start any more."""
        if not self._is_over:
            self._is_over = True
            self._numbers.put(_END)

    def begin_wait(self) -> None:
        """The ranks are lost, and others have to start."""
        self.waiting_since = time.monotonic()
        self._output.begin_ranks()

    def _start(self) -> None:
        cluster = self._ranks.cluster
        num_ranks = self._plan.choose(cluster.state if cluster else None)
        if num_ranks is None:
            return
        previous = self._plan.num_ranks
        if previous and (self._is_change or num_ranks != previous):
            before = f" instead of {previous}" if num_ranks != previous else ""
            self._output.print(f"continuing with {num_ranks}{before} ranks {self._describe_loss()}")
        self._plan.begin(num_ranks)
        self._is_running = True
        self._numbers.put(num_ranks)

    def _describe_loss(self) -> str:
        """`from step 120; no step is lost`."""
        newest_step = self._directory.checkpoints.newest_step()
        start = "the beginning" if newest_step is None else f"step {newest_step}"
        return f"from {start}; {self._output.describe_loss(newest_step)}"

    def _begin_change(self) -> None:
        """Ask the ranks to save and end if there is a reason."""
        cluster = self._ranks.cluster
        state = cluster.state if cluster else None
        growth = self._plan.growth(state) if self._output.has_stepped else None
        self.change = self._ranks.preempted_node() or growth
        if self.change:
            self._files.stop.touch()
            self._output.print(f"{self.change}: the ranks save, and start again")

    def _after_ranks(self, end: StartOutcome) -> None:
        """Decide whether other ranks start."""
        self._is_change = self.change is not None
        self._ranks.read(self._plan.num_ranks, is_stopping=self._is_change)
        error = self._files.error()
        if error is None:
            is_over = end is StartOutcome.RETURNED  # trained to the end; else they have died
        else:
            is_over = not (self._is_change and isinstance(error, PreemptedError))
        if is_over:
            self.end_thread()
            return
        self._files.reset()
        self._ranks.begin(is_change=self._is_change)
        self._plan.end()
        if end is StartOutcome.NOT_STARTED:  # still the same wait, which has a limit
            self._output.print("Ray gave up this start, because the resources are not free")
        else:
            self.begin_wait()
        self._is_running, self._end, self.change = False, None, None
        delay_seconds = self._counter.delay_seconds
        self._restart_at = time.monotonic() + delay_seconds
        if delay_seconds:
            self._output.print(f"waiting {delay_seconds:.0f} s before the next start")
