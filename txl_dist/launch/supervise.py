"""Supervise the ranks of a launch: start them, watch them, and decide what follows when they end.

    RankGroup.poll -> events -> supervise: stop, hang, failure, change -> restart, return or raise

The launcher's rank group only starts, reports and kills processes. Everything that is decided is
decided here, once for all launchers, by the rules of `restarts.py`:

    a stop signal              ranks save and end; late ones are killed; code 75
    a rank ended or died       the others follow; restart from the newest checkpoint, or raise
    no rank responds           all are killed, and restarted
    a node is preempted        ranks save and end; start on other nodes, not counted as a failure
    more ranks fit (A:B)       the same, with more ranks

How a stop request travels: docs/how_to/stop_a_run.md.
"""

import math
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar

from data_pipeline.errors import counted
from data_pipeline.system.signals import StopSignals
from txl_dist.checkpoint.attempts import FOLDER, newest_number, newest_record
from txl_dist.checkpoint.directory import resume_advice
from txl_dist.errors import PreemptedError, TxlError
from txl_dist.events import EventLog
from txl_dist.launch.output import LaunchOutput
from txl_dist.launch.rank_group import (
    Event,
    NodeLost,
    OnLine,
    Preempted,
    RankEnded,
    RankGroup,
    RankRange,
    RanksUp,
    Room,
)
from txl_dist.launch.restarts import (
    ElasticPlan,
    RestartBudget,
    RunFailure,
    failure_of,
    is_stop_code,
)
from txl_dist.runtime.stop import STOPPING
from txl_dist.runtime.waiting import HangWatch
from txl_dist.tracking.process import wait_for_delivery
from txl_dist.training.spec import SECONDS_TO_END, LaunchFiles, RunDirectory, TrainSpec

_T = TypeVar("_T")

POLL_SECONDS = 0.1
AFTER_FAILURE_SECONDS = 10.0
"""After one rank has failed, the others are killed after this time. They notice the failure at
their next collective; a rank that does not end by then hangs."""
AFTER_KILL_SECONDS = 1.0
"""The same after a rank was killed. Then it is known why the ranks end, and a restart waits. Not if
rank 0 is completing a checkpoint, which saves more than these seconds."""
STOP_MARGIN_SECONDS = 3.0
"""Ranks end by themselves `training.grace_seconds` after a stop request; those that cannot are
killed after this additional time, which Kubernetes' grace period still includes."""
GIVE_UP_SECONDS = 20.0
"""Killed ranks that have not ended after this time are on a node that is dead or unreachable."""
OUTAGE_SECONDS = 60.0
"""How long to repeat a look at the run directory while its file server fails."""
NODE_LOSS_SECONDS = 6.0
"""Time for a cluster to find out, after ranks have failed, that their node has died."""


def supervise(
    open_group: Callable[[TrainSpec, RankRange], AbstractContextManager[RankGroup]],
    spec: TrainSpec,
    *,
    ranks: RankRange,
    max_restarts: int | None,
    on_line: OnLine,
) -> None:
    """See `Launcher.train`."""
    directory = RunDirectory(spec.run_path)
    directory.create()
    # Raises if another run uses the directory, before any process is started.
    with spec.lock_of(directory, timeout_seconds=SECONDS_TO_END):
        pass
    files = LaunchFiles(directory.path, spec.launch_id)
    spec = spec.model_copy(update={"stop_file": str(files.stop), "saved_file": str(files.saved)})
    with ExitStack() as stack:
        stack.enter_context(files.held())
        output = LaunchOutput(on_line, directory)
        stack.callback(output.follow)
        events = EventLog(directory.event_log.path, _attempt_of(spec, directory))
        signals = stack.enter_context(StopSignals())
        stack.callback(wait_for_delivery, directory.path, spec.config, signals, output.print)
        group = stack.enter_context(open_group(spec, ranks))
        budget = RestartBudget(group.max_restarts if max_restarts is None else max_restarts)
        plan = ElasticPlan(ranks, growth_interval_seconds=group.growth_interval_seconds)
        supervisor = _Supervisor(
            spec, directory, files, group, plan, budget, signals, output, events
        )
        try:
            supervisor.run()
        except TxlError as error:  # that a run is finished is an event of rank 0
            is_stop = isinstance(error, PreemptedError)
            events.write("stopped" if is_stop else "failed", f"{type(error).__name__}: {error}")
            raise


def _attempt_of(spec: TrainSpec, directory: RunDirectory) -> Callable[[], int]:
    """The number of the newest attempt of this launch. It stays as it was once another launch has
    taken over: readers skip what this one writes.
    """
    folder = directory.path / FOLDER
    known = newest_number(folder)

    def number() -> int:
        nonlocal known
        newest = newest_record(folder, launch_id=spec.launch_id)
        known = newest.number if newest else known
        return known

    return number


@dataclass
class _StartState:
    """What is known about the running ranks; every start of ranks begins with a new one."""

    places: dict[int, str] | None = None
    """Of `RanksUp`, as are `nodes`; None until the ranks are up."""
    nodes: frozenset[str] = frozenset()
    ends: dict[int, RankEnded] = field(default_factory=dict)
    killed: set[int] = field(default_factory=set)
    """Ranks that were killed here, because they had not ended in time."""
    preempted: str = ""
    """A node of ranks that will be preempted, in words."""
    is_stopping: bool = False
    must_share_stop: bool = False
    """The stop file could not be created yet."""
    change: str = ""
    """Why the running ranks were asked to end before others start."""
    deadline: float = math.inf
    """When the ranks that still run are killed."""


@dataclass
class _Supervisor:
    spec: TrainSpec
    directory: RunDirectory
    files: LaunchFiles
    group: RankGroup
    plan: ElasticPlan
    budget: RestartBudget
    signals: StopSignals
    output: LaunchOutput
    events: EventLog

    def __post_init__(self) -> None:
        self._start = _StartState()
        self._lost_nodes: set[str] = set()
        self._suspect_nodes: frozenset[str] = frozenset()
        """Nodes of the ranks of the last counted failure, which may turn out to be lost."""
        self._room: int | None = None

    def run(self) -> None:
        """Start ranks until they have reached the end of the run. Raises what ends it earlier."""
        is_change, delay_seconds = False, 0.0
        while True:
            self._start.places = None  # no rank is up
            num_ranks = self._wait_to_start(delay_seconds)
            self._start = _StartState()
            self._announce(num_ranks, is_change=is_change)
            failure = self._run_ranks(num_ranks)
            if failure is None:
                return
            self.output.follow()  # what rank 0 says about the failure comes first
            if self._see(self.files.saved.exists):  # they replace the command's --resume
                self.spec = self.spec.model_copy(update={"resume": "auto"})
            # Ranks that were asked to end for a change have saved, or died before they could.
            is_planned = isinstance(failure.error, PreemptedError) or failure.can_restart
            is_change = bool(self._start.change) and not self.signals and is_planned
            if not is_change:
                self._count(failure)
            delay_seconds = 0.0 if is_change else self.budget.delay_seconds
            self._see(partial(self.files.stop.unlink, missing_ok=True))
            self.plan.end()

    # --- starting ---------------------------------------------------------------------------------

    def _wait_to_start(self, delay_seconds: float) -> int:
        """The number of ranks to start, as soon as they may."""
        if delay_seconds:
            self.output.print(f"waiting {delay_seconds:.0f} s before the next start")
        start_at = time.monotonic() + delay_seconds
        while True:
            if time.monotonic() >= start_at and (number := self.plan.choose(self._room)):
                return number
            self._poll()
            self._stop_without_ranks()

    def _announce(self, num_ranks: int, *, is_change: bool) -> None:
        previous, ranks = self.plan.num_ranks, counted(num_ranks, "rank")
        if previous and (is_change or num_ranks != previous):
            before = "" if num_ranks == previous else f" instead of {previous}"
            self.output.print(f"continuing with {ranks}{before} from {self._describe_resume()}")
        else:
            self.output.print(f"starting {ranks}; logs: {self.directory.logs}")
        self.plan.begin(num_ranks)

    def _describe_resume(self) -> str:
        if self.spec.resume not in ("auto", "never"):
            return f"{self.spec.resume}, or the newest checkpoint since"
        newest_step = self._see(self.directory.checkpoints.newest_step)
        return "the beginning" if newest_step is None else f"step {newest_step}"

    # --- running ----------------------------------------------------------------------------------

    def _run_ranks(self, num_ranks: int) -> RunFailure | None:
        """Start all ranks and wait until they have ended; returns why they have failed."""
        self.output.begin_ranks()
        self.events.write("ranks_started", f"starting {counted(num_ranks, 'rank')}")
        self.group.start(self.spec, num_ranks)
        while self._start.places is None and len(self._start.ends) < num_ranks:
            self._poll()
            self._stop_without_ranks()
        timeout_seconds = self.spec.config.training.rank_timeout_seconds
        with HangWatch(self.directory.path) as watch:
            while running := [rank for rank in range(num_ranks) if rank not in self._start.ends]:
                if self.signals and not self._start.is_stopping:
                    self._start.is_stopping = True
                    self.output.print(STOPPING)
                    self._ask_to_stop()
                self._check_change()
                self._check_failure(running, num_ranks)
                hang = watch.hang(timeout_seconds=timeout_seconds)
                if hang and self._start.deadline == math.inf:
                    self.output.print(hang)
                    self._end_within(0.0)
                self._kill_late(running)
                if self._start.must_share_stop:
                    self._share_stop()
                self._poll()
        return failure_of(
            [self._start.ends[rank] for rank in range(num_ranks)],
            stop_requested=self._start.is_stopping or bool(self._start.change),
            has_saved=self._see(self.files.saved.exists),
            directory=self.directory,
        )

    def _poll(self) -> None:
        self.signals.reinstall()  # Ray replaces the handlers when it connects
        try:
            for event in self.group.poll():
                self._take(event)
        except PreemptedError:
            raise
        except TxlError as error:
            if self._start.is_stopping:
                raise PreemptedError(f"stopped on request, but {error}") from error
            raise
        self.output.follow()
        are_up = self._start.places is not None
        self.output.print_wait("the first step line" if are_up else self.group.waits_for)
        time.sleep(POLL_SECONDS)

    def _take(self, event: Event) -> None:
        match event:
            case RanksUp(places, nodes):
                self._start.places, self._start.nodes = dict(places), frozenset(nodes)
            case RankEnded(rank):
                place, hung = (self._start.places or {}).get(rank, ""), rank in self._start.killed
                event = replace(event, hung=hung, place=place)
                is_lost = event.is_killed and not is_stop_code(event.code)
                if is_lost and not any(end.is_killed for end in self._start.ends.values()):
                    self.events.write("rank_lost", event.death, rank=rank)
                self._start.ends.setdefault(rank, event)
            case NodeLost(node):
                self._lost_nodes.add(node)
                if self._find_lost_nodes():
                    self.output.print(f"node {node} was lost: the last failure does not count")
            case Room(num_ranks):
                self._room = num_ranks
            case Preempted(reason):
                self._start.preempted = reason

    # --- stop requests and changes ----------------------------------------------------------------

    def _stop_without_ranks(self) -> None:
        if self.signals:
            self.output.print("stopping: no rank is training")
            raise PreemptedError(
                "stopped on request while no rank was training. "
                f"{resume_advice(self.directory.path)}"
            )

    def _check_change(self) -> None:
        """Ask the ranks to save and end, if others have to start."""
        if self._start.is_stopping or self._start.change or self._start.ends or self.signals:
            return
        growth = self.plan.growth(self._room) if self.output.has_stepped else None
        self._start.change = self._start.preempted or growth or ""
        if self._start.change:
            self._print_restart(f"{self._start.change}: the ranks save, and start again")
            self._ask_to_stop()

    def _ask_to_stop(self) -> None:
        self._share_stop()
        self.group.request_stop()
        self._end_within(self.spec.config.training.grace_seconds + STOP_MARGIN_SECONDS)

    def _share_stop(self) -> None:
        self._start.must_share_stop = True
        with suppress(OSError):  # a full disk, or a server that fails: the loop tries again
            self.files.stop.touch()
            self._start.must_share_stop = False

    # --- ranks that end ---------------------------------------------------------------------------

    def _check_failure(self, running: list[int], num_ranks: int) -> None:
        """Limit the time of the other ranks after one has ended."""
        failed = [end for end in self._start.ends.values() if end.code != 0]
        if not failed:
            return
        if any(is_stop_code(end.code) for end in failed):
            # Only that rank has got the signal. Not a signal to the others: where a rank has
            # already got one, a second means to end without saving.
            self._share_stop()
            self._end_within(self.spec.config.training.grace_seconds + STOP_MARGIN_SECONDS)
        if any(end.is_killed and not is_stop_code(end.code) for end in failed):
            checkpoints = self.directory.checkpoints
            is_publishing = False
            with suppress(OSError):
                is_publishing = 0 in running and checkpoints.is_publishing(num_ranks)
            self._end_within(AFTER_FAILURE_SECONDS if is_publishing else AFTER_KILL_SECONDS)
        elif not all(is_stop_code(end.code) for end in failed):
            self._end_within(AFTER_FAILURE_SECONDS)

    def _end_within(self, seconds: float) -> None:
        self._start.deadline = min(self._start.deadline, time.monotonic() + seconds)

    def _kill_late(self, running: list[int]) -> None:
        late_seconds = time.monotonic() - self._start.deadline
        if late_seconds > 0:
            self._start.killed |= set(running)
            self.group.kill(running)
        if late_seconds > GIVE_UP_SECONDS:
            self._start.ends |= {rank: RankEnded(rank, None, hung=True) for rank in running}

    # --- restarts ---------------------------------------------------------------------------------

    def _count(self, failure: RunFailure) -> None:
        """Count a failure and say what follows. Raises its error if no ranks may start again."""
        if not failure.can_restart or self.signals:
            raise failure.error
        self.budget.count(newest_step=self._see(self.directory.checkpoints.newest_step))
        self._suspect_nodes = self._start.nodes
        self._find_lost_nodes()
        decide_at = time.monotonic() + NODE_LOSS_SECONDS
        while self.budget.is_exhausted and self._suspect_nodes and time.monotonic() < decide_at:
            self._poll()
            self._stop_without_ranks()
        if self.budget.is_exhausted:
            raise self.budget.exhausted_error(failure, self.directory) from failure.error
        restart = (
            "with its node, which does not count as a failure; restart"
            if self._start.nodes and not self._suspect_nodes
            else f"restart {self.budget.num_failures} of at most {self.budget.max_restarts} (a "
            "new checkpoint resets the count"
            f"{', and a lost node is not counted' if self._suspect_nodes else ''})"
        )
        self._print_restart(f"{failure.event}; {restart}, from {self._describe_resume()}")

    def _find_lost_nodes(self) -> bool:
        """Whether the loss of a node, found now, explains the failure of its ranks."""
        if not self._suspect_nodes & self._lost_nodes or not self.budget.forgive_lost_node():
            return False
        self._suspect_nodes = frozenset()
        return True

    def _see(self, look: Callable[[], _T]) -> _T:
        """What the run directory says. Its file server may fail for a while, as for the ranks."""
        deadline = time.monotonic() + OUTAGE_SECONDS
        while True:
            try:
                return look()
            except OSError as error:
                if self.signals:
                    raise PreemptedError(f"stopped on request, but {error}") from error
                if time.monotonic() > deadline:
                    raise
            time.sleep(POLL_SECONDS)

    def _print_restart(self, reason: str) -> None:
        self.output.print(reason)
        self.events.write("restart", reason)
