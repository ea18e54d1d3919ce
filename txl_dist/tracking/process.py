"""The processes of tracking: rank 0 starts a sender, the launcher waits for its end.

Rank 0 starts `sender.py` with a file in RAM that has the request as JSON, and later writes the
status to its standard input. If the pipe closes, or the sender's parent process changes, training
has ended, also by SIGKILL. The sender has the lock of the run from its first moment, so the
launcher sees it however long its start takes.

Nothing here raises or waits for a server: metrics go to the journal (`journal.py`), and the sender
sends them. Once the ranks have ended, the launcher waits for the sender (`wait_for_delivery`): in a
container the sender ends with the launcher. No rank, restart or stop request waits for it. A sender
that died during the run is replaced at its end, and the new one delivers the rest.

`log_evaluations` and `send_metrics` start the sender for scores of `txl eval`.
"""

import contextlib
import logging
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from types import MappingProxyType, NoneType
from typing import TYPE_CHECKING

from data_pipeline.system.files import is_locked, try_lock
from data_pipeline.system.signals import StopSignals
from txl_dist.checkpoint.directory import run_of
from txl_dist.config.redaction import redact
from txl_dist.errors import DivergedError, FencedError, PreemptedError
from txl_dist.tracking.tracker import (
    LOCK,
    LOG,
    STATE,
    TrackedDataset,
    TrackingRequest,
    TrackingState,
    as_text,
    default_server,
    open_lock,
    whole_path,
)

if TYPE_CHECKING:
    from txl_dist.config.run_config import RunConfig

SENDER = "txl_dist.tracking.sender"
FLUSH_SECONDS = 30.0
"""How long a sender may run after the end of training to deliver the rest, at least."""
CLOSE_SECONDS = 1.5
"""How long rank 0 waits at its end for the sender, which then continues without it. A server that
has everything but the last lines takes less; a database that does not exist yet takes more."""
WAIT_POLL_SECONDS = 0.1
EVALUATION_SECONDS = 60.0
"""How long `log_evaluations` waits for the results of one run."""
_STATUSES = {
    NoneType: "finished",
    PreemptedError: "preempted",
    DivergedError: "diverged",
    FencedError: "running",  # the newer attempt continues the same run
    KeyboardInterrupt: "interrupted",
    BaseException: "failed",
}
"""How a run ends by the error that ends it; the first that fits."""

log = logging.getLogger("txl_dist.tracking")


def sync_command(run_dir: Path) -> str:
    return f"txl track sync {shlex.quote(str(run_dir))}"


def run_sender(*words: str, timeout_seconds: float) -> str:
    """Run the sender of a run that has ended, and wait for it.

    Returns "", or the reason why it failed, without secrets: the last line of its standard error.
    """
    try:
        process = subprocess.run(
            [sys.executable, "-m", SENDER, *words],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",  # native code may write other bytes to standard error
            timeout=timeout_seconds,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"no response within {timeout_seconds:g} s"
    except OSError as error:
        return str(error)
    if process.returncode == 0:
        return ""
    last_line = process.stderr.strip().rpartition("\n")[2]
    return redact(last_line or f"exit code {process.returncode}")


class TrackingProcess(contextlib.AbstractContextManager["TrackingProcess"]):
    """In rank 0: the sender of one run. A context manager; its exit sends it the final status.

    Start it after `MetricsJournal.truncate_after`, so that it does not send lines that a resume
    removes.
    """

    def __init__(
        self,
        run_dir: Path,
        config: "RunConfig",
        *,
        tags: Mapping[str, str] = MappingProxyType({}),
        datasets: Sequence[TrackedDataset] = (),
    ) -> None:
        """Start to send RUN/metrics.jsonl in the background. Returns immediately; never raises.

        `tags` are recorded as `txl.<name>`. A run directory that was tracked before continues its
        run on the server.
        """
        self._run_dir = run_dir
        self._flush_seconds = max(FLUSH_SECONDS, config.training.grace_seconds)
        self._sender: subprocess.Popen[bytes] | None = None
        self._status: str | None = None
        try:
            from txl_dist.config.config_file import flatten_config

            self._request = TrackingRequest(
                server=whole_path(config.tracking.uri),
                experiment=config.tracking.experiment,
                params={name: as_text(value) for name, value in flatten_config(config).items()},
                tags={
                    "txl.version": metadata.version("txl-dist"),
                    "txl.run_directory": str(run_dir),
                    **{f"txl.{name}": value for name, value in tags.items()},
                },
                datasets=tuple(datasets),
            )
            self._sender = self._start_sender()
        except Exception as error:
            log.warning("tracking is off: %s: %s", type(error).__name__, error)

    @property
    def run_id(self) -> str | None:
        """The id of the run on the server; None until the sender has created it."""
        state = TrackingState.load(self._run_dir / STATE) if self._sender else None
        return state.run_id if state else None

    def close(self, status: str, *, timeout_seconds: float = CLOSE_SECONDS) -> None:
        """Report how the run ended: finished, preempted, diverged, failed or interrupted; running
        if another process continues it.

        Waits at most `timeout_seconds` for the delivery; after that the sender continues for a
        bounded time. Never raises. Only the first call has an effect.
        """
        if self._sender is None or self._status is not None:
            return
        self._status = status
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            if self._sender.poll():  # it has died
                self._sender = self._start_sender()
            assert self._sender.stdin is not None
            with self._sender.stdin as pipe:
                pipe.write(f"{status}\n".encode())
            self._sender.wait(timeout_seconds)

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self.close(next(_STATUSES[kind] for kind in _STATUSES if isinstance(error, kind)))

    def _start_sender(self) -> subprocess.Popen[bytes]:
        log_path = self._run_dir / LOG
        lock = open_lock(self._run_dir)
        # Not through the pipe: a request may be larger than its buffer, and a write would wait
        # until the sender has imported its libraries. Not on a disk: it contains secrets.
        memory = os.memfd_create("tracking-request")
        command = [sys.executable, "-m", SENDER, str(self._run_dir), "--lock", str(lock)]
        command += ["--request", f"/dev/fd/{memory}", "--flush-seconds", str(self._flush_seconds)]
        try:
            try_lock(lock)  # else the sender of a killed process has it, and the new one waits
            with os.fdopen(memory, "wb") as request_file, log_path.open("ab") as log_file:
                request_file.write(self._request.model_dump_json().encode())
                request_file.flush()
                return subprocess.Popen(
                    command,
                    pass_fds=[memory, lock],
                    stdin=subprocess.PIPE,
                    stdout=log_file,
                    stderr=log_file,
                    bufsize=0,
                    start_new_session=True,  # Ctrl-C and a job's SIGTERM must reach only training
                )
        finally:
            os.close(lock)


def wait_for_delivery(
    run_dir: Path,
    config: "RunConfig",
    signals: StopSignals,
    print_line: Callable[[str], None],
) -> None:
    """Wait until the sender has ended, then print if something is undelivered. Never raises.

    Called by the launcher after the ranks have ended. Waits `training.grace_seconds` at most, since
    a stop request if there was one. A stop request during the wait ends it.
    """
    if not config.tracking.enabled or not (run_dir / LOCK).exists():
        return
    seconds, was_stopped = config.training.grace_seconds, bool(signals)
    if was_stopped:
        seconds = max(0.0, seconds - signals.seconds_since_request)
    deadline = time.monotonic() + seconds
    if _is_sending(run_dir):
        print_line(
            f"waiting up to {seconds:.0f} s for MLflow to receive the last metrics "
            "(training.grace_seconds); Ctrl-C ends the wait"
        )
    while is_sending := _is_sending(run_dir):
        if time.monotonic() >= deadline or (signals and not was_stopped):
            break
        time.sleep(WAIT_POLL_SECONDS)
    state = TrackingState.load(run_dir / STATE)
    if is_sending or state is None or not state.delivered:
        print_line(
            "tracking: MLflow does not have everything yet; metrics.jsonl has. The next start of "
            f"this run delivers the rest, or: {sync_command(run_dir)}"
        )
    else:
        print_line(f"tracking: MLflow has everything: {page_command(run_dir, config.tracking.uri)}")


def log_evaluations(checkpoints: Iterable[Path]) -> None:
    """Record the results of `txl eval` that the runs of these checkpoints keep.

    The sender of a run that trains does it for that run. Never raises, and waits at most
    EVALUATION_SECONDS for each run. What the server does not have then is a warning: the next
    start of the run delivers it, or `txl track sync`.
    """
    from txl_dist.tracking.evaluations import unsent_evaluations

    runs = {run_of(checkpoint.resolve()) for checkpoint in checkpoints}
    for run in filter(None, runs):
        state = TrackingState.load(run / STATE)
        if state is None or not unsent_evaluations(run, state) or is_locked(run / LOCK):
            continue
        _send(run, "--evaluations")


def send_metrics(run: Path) -> None:
    """Deliver lines that metrics.jsonl got after the run had ended. Never raises.

    Waits as `log_evaluations`. Nothing to do for a run that was not tracked, or trains again.
    """
    if TrackingState.load(run / STATE) is None or is_locked(run / LOCK):
        return
    _send(run)


def _send(run: Path, *options: str) -> None:
    if reason := run_sender(str(run), *options, timeout_seconds=EVALUATION_SECONDS):
        log.warning(
            "the scores were not recorded in MLflow yet: %s. To send them later: %s",
            reason,
            sync_command(run),
        )


def page_command(run_dir: Path, uri: str | None) -> str:
    """What opens the page of a tracking server: a command for an SQLite file, or an address."""
    server = redact(uri or default_server(run_dir))
    if server.startswith("http"):
        return server
    return f"mlflow ui --backend-store-uri {shlex.quote(server)}"


def _is_sending(run_dir: Path) -> bool:
    state = TrackingState.load(run_dir / STATE)
    # A file system without locks: only the state tells.
    return is_locked(run_dir / LOCK, if_unsupported=state is None or not state.delivered)
