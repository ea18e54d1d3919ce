"""The sender: a process that sends a run's journal to MLflow while training runs.

    python -m txl_dist.tracking.sender RUN           # started by `Tracker`, with a pipe as stdin
    python -m txl_dist.tracking.sender RUN --sync    # started by `txl track sync`: send what a run
                                                     # that has ended did not deliver

Standard input: one line with the request as JSON, later `end STATUS`. If it closes, or the parent
process changes, training has ended, also by SIGKILL: the sender delivers the rest within a bounded
time and exits. Standard output: at most one line, for the training log.

Why a process and not a thread: docs/decisions/0014-tracking-in-its-own-process.md.
"""

import argparse
import contextlib
import logging
import os
import select
import subprocess
import sys
import threading
import time
from pathlib import Path

from data_pipeline.system.files import wait_for_lock
from txl_dist.tracking.state import LOCK, REQUEST, STATE, TrackingRequest, TrackingState

POLL_SECONDS = 1.0
FLUSH_SECONDS = 30.0
"""How long a sender may run after the end of training to deliver the rest, at least; with `--sync`,
from the end of the import of mlflow."""
MAX_BACKOFF_SECONDS = 30.0
WATCHDOG_SECONDS = 5.0
"""This long after the deadline, the process ends even in the middle of a call."""
EXIT_UNDELIVERED = 75

log = logging.getLogger("txl_dist.tracking.sender")


class TrainingProcess:
    """The process that started this one: its request, and how and when it ended."""

    def __init__(self, *, flush_seconds: float) -> None:
        self._notices = os.dup(1)
        os.dup2(2, 1)  # what libraries print must not reach the training log
        self._has_noticed = False
        self.request: TrackingRequest | None = None
        self.has_request = threading.Event()
        """Set when `request` is there or will never come."""
        self.status = "interrupted"
        self.has_ended = threading.Event()
        self.deadline = float("inf")
        """On the monotonic clock; finite once `has_ended` is set."""
        self._flush_seconds = flush_seconds
        self._pid = os.getppid()

    def listen(self) -> None:
        """Read standard input in a thread: a call to the server can block for minutes."""
        threading.Thread(target=self._listen, daemon=True).start()

    def notice(self, text: str) -> None:
        """Write one line to the training log; only the first call does."""
        if not self._has_noticed:
            self._has_noticed = True
            with contextlib.suppress(OSError):  # training has ended
                os.write(self._notices, text.replace("\n", " ").encode() + b"\n")

    def end(self) -> None:
        """Note that training has ended: the remaining time is now bounded."""
        if self.has_ended.is_set():
            return
        self.deadline = time.monotonic() + self._flush_seconds
        watchdog_seconds = self._flush_seconds + WATCHDOG_SECONDS
        watchdog = threading.Timer(watchdog_seconds, os._exit, [EXIT_UNDELIVERED])
        watchdog.daemon = True
        watchdog.start()
        self.has_ended.set()
        self.has_request.set()

    def _listen(self) -> None:
        # Not system/signals.py: it ends the process immediately, and this one must deliver first.
        # Not sys.stdin: the blocked thread would hold its lock while the interpreter shuts down.
        rest = b""
        try:
            while True:
                if select.select([0], [], [], POLL_SECONDS)[0]:
                    data = os.read(0, 1 << 16)
                    *lines, rest = (rest + data).split(b"\n")
                    for line in lines:
                        self._receive(line.decode())
                    if not data:
                        return
                elif os.getppid() != self._pid:
                    return  # killed, while a child that it forked still holds the pipe open
        finally:
            self.end()

    def _receive(self, line: str) -> None:
        word, _, status = line.partition(" ")
        if word == "end":
            self.status = status
            self.end()
        else:
            self.request = TrackingRequest.from_json(line)
            self.has_request.set()


def deliver(
    run_dir: Path, request: TrackingRequest, training: TrainingProcess, *, poll_seconds: float
) -> bool:
    """Send until training has ended and the server has everything (True), or until the deadline."""
    from txl_dist.tracking.delivery import Delivery
    from txl_dist.tracking.mlflow_client import UnavailableError

    delivery = Delivery(run_dir, request)
    backoff_seconds = poll_seconds
    is_failing = is_last = False
    while True:
        # Tested before the journal is read: then that read sees every line.
        if not is_last and training.has_ended.is_set():
            is_last = True
            delivery.set_end_status(training.status)
        try:
            delivery.pump()
            if is_last:
                delivery.finish()
                return True
            if is_failing:
                log.info("the server responds again")
            backoff_seconds, is_failing = poll_seconds, False
        except UnavailableError as error:
            if not is_failing:
                log.warning("%s", error)
                training.notice(
                    f"the tracking server cannot be reached ({error}). Training is not affected: "
                    "metrics are in metrics.jsonl and are sent when the server responds again"
                )
            is_failing = True
            backoff_seconds = min(MAX_BACKOFF_SECONDS, backoff_seconds * 2)
        if is_last:
            if time.monotonic() > training.deadline:
                return False
            time.sleep(min(backoff_seconds, 1.0))
        else:
            training.has_ended.wait(backoff_seconds)


def wait_for_previous_sender(run_dir: Path, training: TrainingProcess) -> bool:
    """Take the run's lock, which the sender of a killed training process holds until its deadline.

    False if it is not free by the deadline of this one. The lock ends with this process.
    """
    descriptor = os.open(run_dir / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    while time.monotonic() < training.deadline:
        if wait_for_lock(descriptor, timeout_seconds=POLL_SECONDS):
            return True
    return False


def git_commit() -> str | None:
    """The commit of this code if it runs from a repository."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=5, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return result.stdout.strip()


def run(run_dir: Path, *, sync: bool, poll_seconds: float, flush_seconds: float) -> int:
    """Everything a sender does; returns its exit code."""
    training = TrainingProcess(flush_seconds=flush_seconds)
    if sync:
        import txl_dist.tracking.delivery  # noqa: F401 - takes seconds, before the time counts

        training.end()
        training.request = TrackingRequest.load(run_dir / REQUEST)
        state = TrackingState.load(run_dir / STATE)
        if state is not None and state.status != "running":
            training.status = state.status
    else:
        training.listen()
        training.has_request.wait()
    request = training.request
    if request is None:
        log.error("%s has no tracking request; was this run started with tracking?", run_dir)
        return 1
    if not sync:
        if commit := git_commit():
            request.tags.setdefault("mlflow.source.git.commit", commit)
        request.without_secrets().save(run_dir / REQUEST)
    is_only = wait_for_previous_sender(run_dir, training)
    if is_only and deliver(run_dir, request, training, poll_seconds=poll_seconds):
        return 0
    # Into RUN/logs/tracking.log; a tracker that still waits repeats it in the training log.
    log.warning("not everything was delivered. To try again: %s", sync_command(run_dir))
    return EXIT_UNDELIVERED


def sync_command(run_dir: Path) -> str:
    return f"txl track sync {run_dir}"


def main() -> int:
    """Read the command line and run."""
    parser = argparse.ArgumentParser(prog="python -m txl_dist.tracking.sender")
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--sync", action="store_true", help="deliver the rest of an ended run")
    parser.add_argument("--poll-seconds", type=float, default=POLL_SECONDS)
    parser.add_argument("--flush-seconds", type=float, default=FLUSH_SECONDS)
    options = parser.parse_args()
    logging.basicConfig(
        level=logging.WARNING, format="%(asctime)s %(message)s", datefmt="%Y-%m-%d %H:%M:%S"
    )
    logging.getLogger("txl_dist").setLevel(logging.INFO)
    return run(
        options.run_dir,
        sync=options.sync,
        poll_seconds=options.poll_seconds,
        flush_seconds=options.flush_seconds,
    )


if __name__ == "__main__":
    with contextlib.suppress(OSError):
        os.nice(5)  # so that training gets the processor first
    sys.exit(main())
