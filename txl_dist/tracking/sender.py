"""The sender: a process that sends a run's journal to its tracker while training runs.

    python -m txl_dist.tracking.sender RUN --request FILE   `TrackingProcess`, with a pipe
    python -m txl_dist.tracking.sender RUN                  `txl track sync`, of an ended run
    python -m txl_dist.tracking.sender RUN --evaluations    `log_evaluations`: only scores

When training has ended, also by SIGKILL, the sender delivers the rest within a bounded time and
exits. A server that fails is one line of RUN/logs/tracking.log and of the log of rank 0.

`Sender` sends each point exactly once: it first queries the points that the server has, and sends
only the others, with the timestamps of the journal. If a call failed, the server may still have
executed it, so the points of its metrics are queried again. After delivery, the run on the server
equals the journal. If it has steps that a resume has superseded, a new run gets the whole journal.

Scores of `txl eval`: evaluations.py.

Why a process and not a thread: docs/decisions/0014-tracking-in-its-own-process.md.
"""

import argparse
import contextlib
import itertools
import logging
import math
import os
import select
import signal
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from data_pipeline.system.files import wait_for_lock
from txl_dist.tracking.evaluations import (
    deliver_evaluations,
    send_evaluations,
    superseded_saves,
)
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
    open_lock,
    open_tracker,
    points_of,
    whole_path,
)

POLL_SECONDS = 1.0
MAX_BACKOFF_SECONDS = 30.0
WATCHDOG_SECONDS = 5.0
"""This long after the deadline, the sender ends even in the middle of a call."""
EXIT_UNDELIVERED = 75

log = logging.getLogger("txl_dist.tracking.sender")


class Sender:
    """Sends one run directory's journal. `pump` and `finish` may raise UnavailableError; what they
    have sent is not lost.
    """

    def __init__(self, run_dir: Path, request: TrackingRequest) -> None:
        self.run_dir, self._request = run_dir, request
        self._state = _first_state(run_dir, request)
        self._tail = JournalTail(run_dir / JOURNAL)
        self._tracker: Tracker | None = None
        self._started_key = ""  # of the run that is described on the server
        self._unsent: list[Point] = []
        # Per metric, the points that the server had when it was queried. Points that this process
        # sends are not added, which would keep a whole run in memory.
        self._recorded: dict[str, Recorded] = {}
        self._is_compared = False  # the run has no point that the journal does not have
        self._has_ended = False

    def pump(self) -> None:
        """Send everything that is in the run directory now, the metrics first."""
        self._try(self._pump)

    def finish(self, status: str) -> None:
        """Send the rest, end the run, then read back its points and send those that are missing.

        The status is stored first, for a later `txl track sync` if the server is unreachable now.
        """
        self._try(partial(self._finish, status))

    def _try(self, work: Callable[[], None]) -> None:
        try:
            try:
                work()
            except RunGoneError:
                log.warning("run %s was deleted; a new one replaces it", self._state.run_id)
                self._tracker, self._started_key, self._has_ended = None, "", False
                self._read_again()
                work()
        # OSError: a full disk, or a network file system that fails now.
        except (RefusedError, RunGoneError, OSError) as error:
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
        self._state = send_evaluations(tracker, self.run_dir, self._state)

    def _finish(self, status: str) -> None:
        self._update(status=status)
        self._pump()
        # Verify, because a server behind a proxy can confirm a call that it never executed.
        if not self._has_ended:  # else the server failed during the verification: continue it
            self._connect().end(self._run_id, status)
            self._read_again()
            self._has_ended = True
            self._pump()
        self._update(delivered=True)

    def _connect(self) -> Tracker:
        """The tracker, once its run is known to have no point that the journal does not have."""
        if self._tracker is None:
            self._update()  # saves the key before a run is created with it
            self._tracker = open_tracker(self._request.server, self.run_dir)
        if self._tail.is_replaced():
            self._read_again()
        while not self._is_compared:
            self._start(self._tracker)
            for key in journal_metrics(self.run_dir) - self._recorded.keys():
                self._recorded[key] = self._tracker.recorded(self._run_id, key)
            step = first_step_not_in_journal(self.run_dir, self._recorded)
            self._is_compared = step is None
            if step is not None:
                log.warning(
                    "training resumed before step %d, which run %s has: a new run supersedes it "
                    "and gets the whole journal",
                    step,
                    self._run_id,
                )
                self._read_again()
                old: dict[str, Any] = {"previous": self._run_id, "supersedes": self._run_id}
                saves = {
                    *self._state.superseded,
                    *superseded_saves(self.run_dir, self._state, step),
                }
                old |= {"evaluations": (), "superseded": tuple(sorted(saves))}
                self._update(key=uuid.uuid4().hex, run_id=None, **old)
        return self._tracker

    def _start(self, tracker: Tracker) -> None:
        """Create or find the run, and describe it. Not again after its end."""
        if self._started_key == self._state.key:
            return
        directory = self.run_dir.resolve()
        run = TrackedRun(
            key=self._state.key,
            name=directory.name,
            experiment=self._request.experiment,
            note=f"Run directory `{directory}` on host {socket.gethostname()}",
            params=self._request.params,
            tags=self._request.tags,
            previous=self._state.run_id or self._state.previous,
            supersedes=self._state.supersedes,
            datasets=self._request.datasets,
        )
        run_id = tracker.start(run)
        self._started_key = self._state.key
        if run_id != self._state.run_id:
            if self._state.run_id is not None:  # deleted, or left in another database
                self._update(evaluations=())
            self._update(run_id=run_id, previous=run.previous)
            log.info("run %s", run_id)

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
        for key in {point.metric for point in points} - self._recorded.keys():
            self._recorded[key] = tracker.recorded(self._run_id, key)
        if new := [p for p in points if (p.step, p.milliseconds) not in self._recorded[p.metric]]:
            self._log(tracker, new)

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
    # A copy of the directory is another run; another server lacks the old run.
    # Earlier versions have stored the relative path of a database.
    is_known = state is not None and whole_path(state.server) == whole_path(server)
    if state and state.directory in (None, directory) and is_known:
        changes = {"directory": directory, "delivered": False, "status": "running"}
        return state.model_copy(update={**changes, "server": server})
    return TrackingState(
        key=uuid.uuid4().hex,
        server=server,
        experiment=request.experiment,
        directory=directory,
        previous=state.run_id if state else None,
        superseded=state.superseded if state else (),
    )


class TrainingEnd:
    """How and when training has ended, from standard input."""

    def __init__(self, *, flush_seconds: float) -> None:
        self.status = "interrupted"  # until training says how it ended
        self.has_ended = threading.Event()
        self.deadline = math.inf  # on the monotonic clock; finite once `has_ended` is set
        self._flush_seconds, self._parent = flush_seconds, os.getppid()

    def end(self) -> None:
        """Note that training has ended: the remaining time is now bounded."""
        self.deadline = time.monotonic() + self._flush_seconds
        signal.alarm(math.ceil(self._flush_seconds + WATCHDOG_SECONDS))  # ends this process
        self.has_ended.set()

    def wait_for_end(self) -> None:
        """Wait until the status arrives, or training ends without one."""
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
    backoff_seconds, has_failed = POLL_SECONDS, False
    while True:
        # Tested before the journal is read: then that read sees every line.
        is_last = training.has_ended.is_set()
        try:
            if is_last:
                sender.finish(training.status)
                return ""
            sender.pump()
            backoff_seconds = POLL_SECONDS
        except UnavailableError as error:
            if not has_failed:
                has_failed = True
                warning = (
                    f"the tracking server cannot be reached ({error}). Training is not affected: "
                    "metrics are in metrics.jsonl and are sent when the server responds again"
                ).replace("\n", " ")
                log.warning("%s", warning)
                # The launcher displays the log of rank 0.
                rank_log = sender.run_dir / "logs/rank-0.log"
                with contextlib.suppress(OSError), rank_log.open("a") as file:
                    file.write(f"{time.strftime('%H:%M:%S')} tracking: {warning}\n")
            backoff_seconds = min(MAX_BACKOFF_SECONDS, backoff_seconds * 2)
            # Not before the last pass: the state must tell a later sync how the run ended.
            if is_last and time.monotonic() > training.deadline:
                return str(error)
        if is_last:
            time.sleep(POLL_SECONDS)
        else:
            training.has_ended.wait(backoff_seconds)


def run(run_dir: Path, request_path: Path | None, lock: int, *, flush_seconds: float) -> str:
    """Deliver the journal of a run; returns why not everything was delivered, or "".

    Without `request_path` as its last start requested it, with the status of its end.
    """
    training = TrainingEnd(flush_seconds=flush_seconds)
    request = TrackingRequest.load(request_path or run_dir / REQUEST)
    if request is None:
        return f"{run_dir} has no tracking request; was this run started with tracking?"
    if request_path is not None:
        request.without_secrets().save(run_dir / REQUEST)
    elif (state := TrackingState.load(run_dir / STATE)) and state.status != "running":
        training.status = state.status
    # Before the time counts: on a busy machine, at the end of a short run, it may take longer.
    import txl_dist.tracking.mlflow_tracker  # noqa: F401

    # In a thread: a call to the server can block for minutes.
    threading.Thread(target=training.wait_for_end, daemon=True).start()
    # The sender of a killed training process has the lock until its deadline.
    while not wait_for_lock(lock, timeout_seconds=POLL_SECONDS):
        if time.monotonic() > training.deadline:
            return f"another process still sends this run (it holds {LOCK})"
    return deliver(Sender(run_dir, request), training)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m txl_dist.tracking.sender")
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--evaluations", action="store_true", help="send only scores of txl eval")
    parser.add_argument("--request", type=Path, help="default: that of the last start of the run")
    parser.add_argument("--lock", type=int, help="an inherited descriptor of the run's lock")
    parser.add_argument("--flush-seconds", type=float, default=30.0, help="time after the end")
    options = parser.parse_args()
    run_dir, lock, seconds = options.run_dir, options.lock, options.flush_seconds
    if lock is None:
        lock = open_lock(run_dir)
    if options.evaluations:
        wait_for_lock(lock, timeout_seconds=math.inf)  # the caller limits the time of this process
        # The last line of an error's traceback is what log_evaluations reports.
        deliver_evaluations(run_dir)
        return 0
    line = "%(asctime)s %(message)s"
    logging.basicConfig(level=logging.WARNING, format=line, datefmt="%Y-%m-%d %H:%M:%S")
    logging.getLogger("txl_dist").setLevel(logging.INFO)
    if reason := run(run_dir, options.request, lock, flush_seconds=seconds):
        # `txl track sync` shows this line.
        print(f"not everything was delivered after {seconds:g} s: {reason}", file=sys.stderr)
        return EXIT_UNDELIVERED
    return 0


if __name__ == "__main__":
    with contextlib.suppress(OSError):
        os.nice(5)  # so that training gets the processor first
    sys.exit(main())
