"""The sender: a process of its own that carries a run's journal to MLflow while training runs.

    python -m txl_dist.tracking.sender RUN           # started by `Tracker`, fed on standard input
    python -m txl_dist.tracking.sender RUN --sync    # by hand: deliver what an ended run left over,
                                                     # for at most --timeout-seconds

Standard input: one line with the request as JSON, later `end STATUS`. Its closing, or a change of
parent process, means that training is gone, even by SIGKILL: what is left is sent within a bounded
time and the process ends. Standard output: at most a few lines for the training log.
"""

import argparse
import contextlib
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from data_pipeline.storage.locks import wait_for_lock
from txl_dist.tracking.state import (
    LOCK,
    REQUEST,
    RUN_STATUSES,
    STATE,
    TrackingRequest,
    TrackingState,
)

POLL_SECONDS = 1.0
FLUSH_SECONDS = 30.0
"""How long a sender may outlive training to deliver the rest."""
SYNC_SECONDS = 600.0
"""How long a sync by hand may take, from when mlflow is imported."""
MAX_BACKOFF_SECONDS = 30.0
WATCHDOG_SECONDS = 5.0
"""After the flush time, a call that still hangs is ended with the process."""
EXIT_UNDELIVERED = 75

log = logging.getLogger("txl_dist.tracking.sender")


class Parent:
    """The training process, as its pipe tells: a request, an end, or a sudden silence."""

    def __init__(self, *, flush_seconds: float) -> None:
        self._notices = os.dup(1)
        os.dup2(2, 1)  # what a library prints is not for the training log
        self._noticed = False
        self.request: TrackingRequest | None = None
        self.status = "interrupted"
        self.asked = threading.Event()
        self.gone = threading.Event()
        self.deadline = float("inf")
        """On the monotonic clock; known once `gone` is set."""
        self._flush_seconds = flush_seconds
        self._pid = os.getppid()

    def listen(self) -> None:
        """Start to hear."""
        threading.Thread(target=self._listen, daemon=True).start()
        threading.Thread(target=self._watch, daemon=True).start()

    def notice(self, text: str) -> None:
        """Tell the training log, once in this process's life."""
        if not self._noticed:
            self._noticed = True
            with contextlib.suppress(OSError):  # training is gone
                os.write(self._notices, text.replace("\n", " ").encode() + b"\n")

    def end(self) -> None:
        """Training is gone: from now on the time is bounded."""
        if self.gone.is_set():
            return
        self.deadline = time.monotonic() + self._flush_seconds
        seconds = self._flush_seconds + WATCHDOG_SECONDS
        watchdog = threading.Timer(seconds, os._exit, [EXIT_UNDELIVERED])
        watchdog.daemon = True
        watchdog.start()
        self.gone.set()
        self.asked.set()

    def _listen(self) -> None:
        # Not through sys.stdin: its lock would be held when the interpreter shuts down.
        rest = b""
        with contextlib.suppress(OSError):
            while data := os.read(0, 1 << 16):
                *lines, rest = (rest + data).split(b"\n")
                for line in lines:
                    self._hear(line.decode(errors="replace"))
        self.end()

    def _hear(self, line: str) -> None:
        word, _, status = line.partition(" ")
        if word == "end" and status in RUN_STATUSES:
            self.status = status
            self.end()
        elif self.request is None:
            self.request = TrackingRequest.from_json(line)
            self.asked.set()

    def _watch(self) -> None:
        # A child that training forked may hold the pipe open after training itself has died.
        while os.getppid() == self._pid and not self.gone.is_set():
            time.sleep(POLL_SECONDS)
        self.end()


def deliver(run_dir: Path, request: TrackingRequest, parent: Parent, *, poll: float) -> bool:
    """Send until training is gone and everything is there, or the time is up. True if it is."""
    from txl_dist.tracking.delivery import Delivery
    from txl_dist.tracking.mlflow_client import UnavailableError

    delivery = Delivery(run_dir, request)
    backoff = poll
    troubled = ended = False
    while True:
        if not ended and parent.gone.is_set():  # before the read, which then sees every line
            ended = True
            delivery.ends_with(parent.status)
        try:
            delivery.pump()
            if ended:
                delivery.finish()
                return True
            if troubled:
                log.info("delivering again")
            backoff, troubled = poll, False
        except UnavailableError as error:
            if not troubled:
                log.warning("%s", error)
                parent.notice(
                    f"the tracking server cannot be reached ({error}). Training is not affected: "
                    "metrics stay in metrics.jsonl and are sent when it answers again"
                )
            troubled = True
            backoff = min(MAX_BACKOFF_SECONDS, backoff * 2)
        if ended:
            if time.monotonic() > parent.deadline:
                return False
            time.sleep(min(backoff, 1.0))
        else:
            parent.gone.wait(backoff)


@contextlib.contextmanager
def only_sender(run_dir: Path, parent: Parent) -> Iterator[bool]:
    """Wait for a sender that a killed training left, which ends soon by itself."""
    descriptor = os.open(run_dir / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        while time.monotonic() < parent.deadline:
            if wait_for_lock(descriptor, timeout_seconds=POLL_SECONDS):
                yield True
                return
        yield False
    finally:
        os.close(descriptor)


def git_commit() -> str | None:
    """The commit of this code, if it is run from a repository."""
    try:
        answer = subprocess.run(
            ["git", "rev-parse", "HEAD"],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            timeout=5,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.strip()


def run(run_dir: Path, *, sync: bool, poll: float, flush: float) -> int:
    """The sender's whole life; its exit code."""
    parent = Parent(flush_seconds=flush)
    (run_dir / LOCK).parent.mkdir(parents=True, exist_ok=True)
    if sync:
        import txl_dist.tracking.delivery  # noqa: F401 - seconds, which are not the delivery's

        parent.end()
        parent.request = TrackingRequest.load(run_dir / REQUEST)
        before = TrackingState.load(run_dir / STATE)
        if before is not None and before.status != "running":
            parent.status = before.status
    else:
        parent.listen()
        parent.asked.wait()
    request = parent.request
    if request is None:
        log.error("no request: was this run ever tracked?")
        return 1
    if not sync:
        if commit := git_commit():
            request.tags.setdefault("mlflow.source.git.commit", commit)
        request.without_secrets().save(run_dir / REQUEST)
    with only_sender(run_dir, parent) as mine:
        delivered = mine and deliver(run_dir, request, parent, poll=poll)
    if not delivered:
        log.warning("not everything was delivered; later: %s", sync_command(run_dir))
        return EXIT_UNDELIVERED
    return 0


def sync_command(run_dir: Path) -> str:
    return f"python -m txl_dist.tracking.sender {run_dir} --sync"


def main(arguments: list[str] | None = None) -> int:
    """Read the command line and run."""
    parser = argparse.ArgumentParser(prog="python -m txl_dist.tracking.sender")
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--sync", action="store_true", help="deliver what an ended run left over")
    parser.add_argument("--poll-seconds", type=float, default=POLL_SECONDS)
    parser.add_argument("--flush-seconds", type=float, default=FLUSH_SECONDS)
    parser.add_argument(
        "--timeout-seconds",
        type=float,
        default=SYNC_SECONDS,
        help="with --sync: give up after this time (default: %(default)s)",
    )
    options = parser.parse_args(arguments)
    logging.basicConfig(
        level=logging.WARNING, format="%(asctime)s %(message)s", datefmt="%Y-%m-%d %H:%M:%S"
    )
    logging.getLogger("txl_dist").setLevel(logging.INFO)
    return run(
        options.run_dir,
        sync=options.sync,
        poll=options.poll_seconds,
        flush=options.timeout_seconds if options.sync else options.flush_seconds,
    )


if __name__ == "__main__":
    with contextlib.suppress(OSError):
        os.nice(5)  # training has the processor first
    sys.exit(main())
