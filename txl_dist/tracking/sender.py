"""The sender: a process that sends a run's journal to its tracker while training runs.

    python -m txl_dist.tracking.sender RUN --request FILE     `TrackingProcess`, with a pipe
    python -m txl_dist.tracking.sender RUN --sync             `txl track sync`, of an ended run
    python -m txl_dist.tracking.sender RUN... --evaluations   `log_evaluations`: only scores

When training has ended, also by SIGKILL, the sender delivers the rest within a bounded time and
exits. A server that fails is one line of RUN/logs/tracking.log and of the log of rank 0.

`Sender` sends each point exactly once: it first queries the points that the server has, and sends
only the others, with the timestamps of the journal. If a call failed, the server may still have
executed it, so the points of its metrics are queried again. After delivery, the run on the server
equals the journal. If it has steps that a resume has superseded, a new run gets the whole journal.
`evaluations.py` reads the scores of `txl eval` from the run directory.

Why a process and not a thread: docs/decisions/0014-tracking-in-its-own-process.md.
"""

import argparse
import contextlib
import itertools
import logging
import os
import select
import shlex
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from data_pipeline.system.files import wait_for_lock
from txl_dist.tracking.evaluations import send_evaluations, unsent_evaluations
from txl_dist.tracking.journal import (
    JOURNAL,
    JournalTail,
    first_step_not_in_journal,
    journal_metrics,
)
from txl_dist.tracking.tracker import (
    LOCK,
    MAX_POINTS,
    REQUEST,
    STATE,
    Point,
    Recorded,
    RefusedError,
    RunGoneError,
    TrackedRun,
    Tracker,
    TrackingRequest,
    TrackingState,
    UnavailableError,
    directory_identity,
    open_tracker,
    points_of,
)

POLL_SECONDS = 1.0
MAX_BACKOFF_SECONDS = 30.0
WATCHDOG_SECONDS = 5.0
"""This long after the deadline, the sender ends even in the middle of a call."""
EXIT_UNDELIVERED = 75
RANK_LOG = "logs/rank-0.log"

log = logging.getLogger("txl_dist.tracking.sender")


class Sender:
    """Sends one run directory's journal. `pump` and `finish` may raise UnavailableError.

    Progress is not lost if a call fails: an unreliable server gets all points after enough calls.
    """

    def __init__(self, run_dir: Path, request: TrackingRequest) -> None:
        self.run_dir, self._request = run_dir, request
        self._state = _first_state(run_dir, request)
        self._tail = JournalTail(run_dir / JOURNAL)
        self._tracker: Tracker | None = None
        self._unsent: list[Point] = []
        self._recorded: dict[str, Recorded] = {}
        """Per metric, the points that the server had when it was queried. Points that this process
        sends are not added, which would keep a whole run in memory."""
        self._is_compared = False
        """The run is known to have no point that the journal does not have."""
        self._has_ended = False

    def pump(self) -> None:
        """Send everything that is in the run directory now, the metrics first."""
        self._try(self._pump)

    def set_end_status(self, status: str) -> None:
        """Store how the run ended, also for a later `--sync` if the server is unreachable now."""
        self._update(status=status)

    def finish(self) -> None:
        """End the run, then read back its points and send those that are missing."""
        self._try(self._end_and_verify)
        self._update(delivered=True)

    def _try(self, work: Callable[[], None]) -> None:
        try:
            try:
                work()
            except RunGoneError:
                log.warning("run %s was deleted; a new one replaces it", self._state.run_id)
                self._tracker, self._has_ended = None, False
                self._read_again()
                work()
        except (RefusedError, RunGoneError) as error:
            raise UnavailableError(str(error)) from error

    def _pump(self) -> None:
        while True:
            tracker = self._connect()  # a resume may have replaced the journal in the meantime
            if not self._unsent:
                self._unsent += itertools.chain.from_iterable(map(points_of, self._tail.lines()))
            if not self._unsent:
                break
            self._send(tracker, self._unsent[:MAX_POINTS])
            del self._unsent[:MAX_POINTS]
        if unsent_evaluations(self.run_dir, self._state):
            # Not the tracker of this run, which knows what of it is still to be described.
            tracker = open_tracker(self._request.server, self.run_dir)
            self._state = send_evaluations(tracker, self.run_dir, self._state)

    def _end_and_verify(self) -> None:
        # Verify, because a server behind a proxy can confirm a call that it never executed.
        if not self._has_ended:  # else the server failed during the verification: continue it
            self._connect().end(self._run_id, self._state.status)
            self._read_again()
            self._has_ended = True
        self._pump()

    def _connect(self) -> Tracker:
        """The tracker, once its run is known to have no point that the journal does not have."""
        if self._tracker is None:
            self._update()  # saves the key before a run is created with it
            self._tracker = open_tracker(self._request.server, self.run_dir)
        if self._tail.is_replaced():
            self._read_again()
        while not self._is_compared:
            run_id = self._tracker.start(self._tracked_run())
            if run_id != self._state.run_id:
                self._update(run_id=run_id, previous=self._state.run_id or self._state.previous)
                log.info("run %s", run_id)
            for key in journal_metrics(self.run_dir) - self._recorded.keys():
                self._recorded[key] = self._tracker.recorded(run_id, key)
            step = first_step_not_in_journal(self.run_dir, self._recorded)
            self._is_compared = step is None
            if step is not None:
                log.warning(
                    "training resumed before step %d, which run %s has: a new run supersedes it "
                    "and gets the whole journal",
                    step,
                    run_id,
                )
                self._read_again()
                new_key = uuid.uuid4().hex
                self._update(key=new_key, run_id=None, previous=run_id, supersedes=run_id)
        return self._tracker

    def _tracked_run(self) -> TrackedRun:
        directory = self.run_dir.resolve()
        return TrackedRun(
            key=self._state.key,
            name=directory.name,
            experiment=self._request.experiment,
            note=f"Run directory `{directory}` on host {socket.gethostname()}. A page about it: "
            f"`txl report {shlex.quote(str(directory))}`",
            params=self._request.params,
            tags=self._request.tags,
            files={"config.yaml": self.run_dir / "config.yaml"},
            previous=self._state.run_id or self._state.previous,
            supersedes=self._state.supersedes,
            datasets=self._request.datasets,
        )

    @property
    def _run_id(self) -> str:
        assert self._state.run_id is not None
        return self._state.run_id

    def _update(self, **changes: Any) -> None:
        """Change fields of the state and write it, before an action that must not be repeated."""
        self._state = self._state.changed(self.run_dir, **changes)

    def _read_again(self) -> None:
        """Query the server again, and read the journal from the beginning."""
        self._recorded, self._is_compared = {}, False
        self._unsent.clear()
        self._tail.rewind()

    def _send(self, tracker: Tracker, points: list[Point]) -> None:
        new = []
        for point in points:
            if point.metric not in self._recorded:
                self._recorded[point.metric] = tracker.recorded(self._run_id, point.metric)
            if (point.step, point.milliseconds) not in self._recorded[point.metric]:
                new.append(point)
        if new:
            self._log(tracker, new)
            self._update(sent_step=new[-1].step)

    def _log(self, tracker: Tracker, points: list[Point]) -> None:
        """One call. A batch is rejected as a whole, so halve it down to the rejected points."""
        try:
            tracker.log(self._run_id, points)
        except UnavailableError:
            for metric in {point.metric for point in points}:  # the server may or may not have them
                self._recorded.pop(metric, None)
            raise
        except RefusedError as error:
            if len(points) == 1:
                log.warning("%s of step %d refused: %s", points[0].metric, points[0].step, error)
                return
            middle = len(points) // 2
            self._log(tracker, points[:middle])
            self._log(tracker, points[middle:])


def _first_state(run_dir: Path, request: TrackingRequest) -> TrackingState:
    server, directory = request.without_secrets().server, directory_identity(run_dir)
    state = TrackingState.load(run_dir / STATE)
    is_copy = state is not None and state.directory not in (None, directory)
    if state is not None and is_copy:
        log.info("a copy of the directory of run %s: it gets a run for itself", state.run_id)
    if state is None or is_copy or state.server != server:  # another server lacks the old run
        return TrackingState(
            key=uuid.uuid4().hex,
            server=server,
            experiment=request.experiment,
            directory=directory,
            previous=state.run_id if state else None,
            # The server has those of the original, below its run.
            evaluations=state.evaluations if state and state.server == server else (),
        )
    changes = {"directory": directory, "delivered": False, "status": "running"}
    return state.model_copy(update=changes)


class TrainingEnd:
    """How and when training has ended. `listen` finds out from standard input."""

    def __init__(self, *, flush_seconds: float) -> None:
        self.status = "interrupted"
        self.has_ended = threading.Event()
        self.deadline = float("inf")
        """On the monotonic clock; finite once `has_ended` is set."""
        self._flush_seconds, self._parent = flush_seconds, os.getppid()

    def end(self) -> None:
        """Note that training has ended: the remaining time is now bounded."""
        self.deadline = time.monotonic() + self._flush_seconds
        watchdog_seconds = self._flush_seconds + WATCHDOG_SECONDS
        watchdog = threading.Timer(watchdog_seconds, os._exit, [EXIT_UNDELIVERED])
        watchdog.daemon = True
        watchdog.start()
        self.has_ended.set()

    def listen(self) -> None:
        """Wait for the status in a thread: a call to the server can block for minutes."""
        threading.Thread(target=self._wait, daemon=True).start()

    def _wait(self) -> None:
        # Not system/signals.py: it ends the process immediately, and this one must deliver first.
        # Not sys.stdin: the blocked thread would hold its lock while the interpreter shuts down.
        while not select.select([0], [], [], POLL_SECONDS)[0]:
            if os.getppid() != self._parent:
                break  # killed, while a child that it forked still holds the pipe open
        else:
            # One short line in one write is never split. Empty: the pipe was closed without it.
            self.status = os.read(0, 1 << 16).decode().strip() or self.status
        self.end()


def deliver(sender: Sender, training: TrainingEnd) -> str:
    """Send until training has ended and the server has everything; returns "".

    Or until the deadline; then it returns why the server does not have everything.
    """
    backoff_seconds, has_failed, is_last, reason = POLL_SECONDS, False, False, ""
    while True:
        # Tested before the journal is read: then that read sees every line.
        if not is_last and training.has_ended.is_set():
            is_last = True
            sender.set_end_status(training.status)
        try:
            sender.pump()
            if is_last:
                sender.finish()
                return ""
            backoff_seconds = POLL_SECONDS
        except UnavailableError as error:
            reason = str(error)
            if not has_failed:
                has_failed = True
                _warn_training(sender.run_dir, reason)
            backoff_seconds = min(MAX_BACKOFF_SECONDS, backoff_seconds * 2)
        if is_last:  # not before: the state must tell a later `--sync` how the run ended
            if time.monotonic() > training.deadline:
                return reason
            time.sleep(POLL_SECONDS)
        else:
            training.has_ended.wait(backoff_seconds)


def _warn_training(run_dir: Path, reason: str) -> None:
    """One line in the log of rank 0, which the launcher displays."""
    warning = (
        f"the tracking server cannot be reached ({reason}). Training is not affected: metrics are "
        "in metrics.jsonl and are sent when the server responds again"
    )
    log.warning("%s", warning)
    with contextlib.suppress(OSError), (run_dir / RANK_LOG).open("a") as rank_log:
        line = warning.replace("\n", " ")
        rank_log.write(f"{time.strftime('%H:%M:%S')} tracking: {line}\n")


@contextlib.contextmanager
def lock_of(run_dir: Path, training: TrainingEnd | None = None) -> Iterator[bool]:
    """Hold the run's lock, which the sender of a killed training process has until its deadline.

    False if it is not free by the deadline of `training`.
    """
    descriptor = os.open(run_dir / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        is_held = False
        while not is_held and (training is None or time.monotonic() < training.deadline):
            is_held = wait_for_lock(descriptor, timeout_seconds=POLL_SECONDS)
        yield is_held
    finally:
        os.close(descriptor)


def deliver_evaluations(run_dir: Path) -> None:
    """Record the results of `txl eval` of a run that does not train. Raises UnavailableError.

    The caller limits the time of this process.
    """
    with lock_of(run_dir):
        if (state := TrackingState.load(run_dir / STATE)) is not None:
            send_evaluations(open_tracker(state.server, run_dir), run_dir, state)


def run(run_dir: Path, request_path: Path, *, sync: bool, flush_seconds: float) -> str:
    """Everything a sender does; returns why not everything was delivered, or ""."""
    training = TrainingEnd(flush_seconds=flush_seconds)
    request = TrackingRequest.load(request_path)
    if sync:
        import txl_dist.tracking.mlflow_tracker  # noqa: F401 - takes seconds, before the time counts

        state = TrackingState.load(run_dir / STATE)
        if state is not None and state.status != "running":
            training.status = state.status
        training.end()
    else:
        training.listen()
    if request is None:
        return f"{run_dir} has no tracking request; was this run started with tracking?"
    if not sync:
        request.without_secrets().save(run_dir / REQUEST)
    with lock_of(run_dir, training) as is_held:
        if not is_held:
            return f"another process still sends this run (it holds {LOCK})"
        return deliver(Sender(run_dir, request), training)


def main() -> int:
    """Read the command line and run."""
    parser = argparse.ArgumentParser(prog="python -m txl_dist.tracking.sender")
    parser.add_argument("run_dir", type=Path, nargs="+")
    parser.add_argument("--evaluations", action="store_true", help="send only scores of txl eval")
    parser.add_argument("--request", type=Path, help="default: that of the last start of the run")
    parser.add_argument("--sync", action="store_true", help="deliver the rest of an ended run")
    parser.add_argument("--flush-seconds", type=float, default=30.0, help="time after the end")
    options = parser.parse_args()
    if options.evaluations:
        for run_dir in options.run_dir:
            # The last line of an error's traceback is what log_evaluations reports.
            deliver_evaluations(run_dir)
        return 0
    (run_dir,) = options.run_dir
    # `txl track sync` shows the last line.
    line = "%(message)s" if options.sync else "%(asctime)s %(message)s"
    logging.basicConfig(level=logging.WARNING, format=line, datefmt="%Y-%m-%d %H:%M:%S")
    logging.getLogger("txl_dist").setLevel(logging.INFO)
    request, seconds = options.request or run_dir / REQUEST, options.flush_seconds
    if reason := run(run_dir, request, sync=options.sync, flush_seconds=seconds):
        log.warning("not everything was delivered after %g s: %s", seconds, reason)
        return EXIT_UNDELIVERED
    return 0


if __name__ == "__main__":
    with contextlib.suppress(OSError):
        os.nice(5)  # so that training gets the processor first
    sys.exit(main())
