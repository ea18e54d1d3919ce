"""The processes of tracking: rank 0 starts a sender, the launcher waits for its end.

Rank 0 starts `sender.py` with a file in RAM that has the request as JSON, and later writes the
status to its standard input. If the pipe closes, or the sender's parent process changes, training
has ended, also by SIGKILL.

Nothing here raises or waits for a server: metrics go to the journal (`journal.py`), and the sender
sends them. Once the ranks have ended, the launcher waits for the sender (`wait_for_delivery`): in a
container the sender ends with the launcher. No rank, restart or stop request waits for it. A sender
that died during the run is replaced at its end, and the new one delivers the rest.

`log_evaluations` starts the sender for scores of `txl eval`, which `evaluations.py` reads.
"""

import contextlib
import logging
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Self

from data_pipeline.system.files import is_locked
from data_pipeline.system.signals import StopSignals
from txl_dist.checkpoint.directory import run_of
from txl_dist.config.redaction import redact
from txl_dist.errors import DivergedError, FencedError, PreemptedError
from txl_dist.tracking.tracker import (
    LOCK,
    LOG,
    REQUEST,
    STATE,
    TrackedDataset,
    TrackingRequest,
    TrackingState,
    as_text,
    child_environment,
    server_of,
)

if TYPE_CHECKING:
    from txl_dist.config.run_config import RunConfig

SENDER = "txl_dist.tracking.sender"
FLUSH_SECONDS = 30.0
"""How long a sender may run after the end of training to deliver the rest, at least."""
CLOSE_SECONDS = 1.5
"""How long rank 0 waits at its end for the sender, which then continues without it. A server that
has everything but the last lines takes less; a database that does not exist yet takes more."""
START_SECONDS = 2.0
"""How long the launcher waits for a sender that has not begun."""
WAIT_POLL_SECONDS = 0.1
EVALUATION_SECONDS, RESULT_SECONDS = 30.0, 2.0
"""How long `log_evaluations` waits for one result, and for each further result of a table."""

log = logging.getLogger("txl_dist.tracking")


def sync_command(run_dir: Path) -> str:
    return f"txl track sync {shlex.quote(str(run_dir))}"


def run_module(module: str, *words: str, timeout_seconds: float, server: str | None = None) -> str:
    """Run a module with this Python, such as SENDER, and with `server` as MLFLOW_TRACKING_URI.

    Returns "", or the reason why it failed, without secrets: the last line of its standard error.
    """
    try:
        process = subprocess.run(
            [sys.executable, "-m", module, *words],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",  # native code may write other bytes to standard error
            timeout=timeout_seconds,
            check=False,
            env=child_environment() | ({"MLFLOW_TRACKING_URI": server} if server else {}),
        )
    except subprocess.TimeoutExpired:
        return f"no response within {timeout_seconds:g} s"
    except OSError as error:
        return str(error)
    if process.returncode == 0:
        return ""
    last_line = process.stderr.strip().rpartition("\n")[2]
    return redact(last_line or f"exit code {process.returncode}")


class TrackingProcess:
    """In rank 0: the sender of one run. A context manager; its exit sends it the final status.

    Start it after `MetricsJournal.truncate_after`, so that it does not send lines that a resume
    removes.
    """

    def __init__(
        self, run_dir: Path, start_sender: Callable[[], subprocess.Popen[bytes]] | None
    ) -> None:
        """`start_sender`: None if nothing is tracked."""
        self._run_dir, self._start_sender, self._is_closed = run_dir, start_sender, False
        self._sender = start_sender() if start_sender else None

    @classmethod
    def start(
        cls,
        run_dir: Path,
        config: "RunConfig",
        *,
        tags: Mapping[str, str] | None = None,
        datasets: Sequence[TrackedDataset] = (),
    ) -> Self:
        """Start to send RUN/metrics.jsonl in the background. Returns immediately; never raises.

        `tags` are recorded as `txl.<name>`. A run directory that was tracked before continues its
        run on the server.
        """
        try:
            if config.tracking.enabled:
                flush_seconds = max(FLUSH_SECONDS, config.tracking.end_timeout_seconds)
                request = _request(run_dir, config, tags or {}, datasets)
                return cls(run_dir, partial(_start_sender, run_dir, request, flush_seconds))
        except Exception as error:
            log.warning("tracking is off: %s: %s", type(error).__name__, error)
        return cls(run_dir, None)

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
        sender = self._sender
        if sender is None or self._is_closed:
            return
        self._is_closed = True
        if sender.poll() and self._start_sender is not None:
            with contextlib.suppress(OSError):
                sender = self._start_sender()
        assert sender.stdin is not None
        with contextlib.suppress(OSError):  # it has died
            sender.stdin.write(f"{status}\n".encode())
        with contextlib.suppress(OSError):
            sender.stdin.close()
        try:
            code = sender.wait(timeout_seconds)
        except subprocess.TimeoutExpired:
            log.info("tracking: the rest is sent in the background")
            return
        if code:
            log.warning(
                "tracking: not everything was delivered (see %s); it is in metrics.jsonl. To send "
                "it later: %s",
                LOG,
                sync_command(self._run_dir),
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self.close(_status_of(error))


def _start_sender(
    run_dir: Path, request: TrackingRequest, flush_seconds: float
) -> subprocess.Popen[bytes]:
    log_path = run_dir / LOG
    log_path.parent.mkdir(parents=True, exist_ok=True)
    # Not through the pipe: a request may be larger than its buffer, and a write would wait until
    # the sender has imported its libraries. Not on a disk: it contains secrets.
    memory = os.memfd_create("tracking-request")
    with os.fdopen(memory, "wb") as request_file, log_path.open("ab") as log_file:
        request_file.write(request.model_dump_json().encode())
        request_file.flush()
        command = [sys.executable, "-m", SENDER, str(run_dir), "--request", f"/dev/fd/{memory}"]
        return subprocess.Popen(
            [*command, "--flush-seconds", str(flush_seconds)],
            pass_fds=[memory],
            stdin=subprocess.PIPE,
            stdout=log_file,
            stderr=log_file,
            bufsize=0,
            env=child_environment(),
            start_new_session=True,  # Ctrl-C and a job's SIGTERM must reach only training
        )


def wait_for_delivery(
    run_dir: Path,
    config: "RunConfig",
    signals: StopSignals,
    print_line: Callable[[str], None],
) -> None:
    """Wait until the sender has ended, then print if something is undelivered. Never raises.

    Called by the launcher after the ranks have ended. Waits `tracking.end_timeout_seconds` at most,
    and after a stop request no longer than `training.grace_seconds` since then. A stop request
    during the wait ends it.
    """
    if not config.tracking.enabled or not (run_dir / REQUEST).exists():
        return
    seconds, was_stopped = config.tracking.end_timeout_seconds, bool(signals)
    if was_stopped:
        seconds = min(seconds, config.training.grace_seconds - signals.seconds_since_request)
    begin, has_printed = time.monotonic(), False
    while is_sending := _is_sending(run_dir, time.monotonic() - begin):
        waited = time.monotonic() - begin
        if waited >= seconds or (signals and not was_stopped):
            break
        if waited >= START_SECONDS and not has_printed:
            has_printed = True
            print_line(
                f"waiting up to {seconds:.0f} s for MLflow to receive the last metrics "
                "(tracking.end_timeout_seconds); Ctrl-C ends the wait"
            )
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

    The sender of a run that trains does it for that run. Never raises, and waits
    EVALUATION_SECONDS for one result. What the server does not have then is a warning: the next
    start of the run delivers it, or `txl track sync`.
    """
    from txl_dist.tracking.evaluations import unsent_evaluations

    unsent: dict[Path, int] = {}
    for run in filter(None, (run_of(checkpoint.resolve()) for checkpoint in checkpoints)):
        state = TrackingState.load(run / STATE)
        paths = unsent_evaluations(run, state) if state else []
        if paths and not is_locked(run / LOCK):
            unsent[run] = len(paths)
    if not unsent:
        return
    seconds = EVALUATION_SECONDS + RESULT_SECONDS * (sum(unsent.values()) - 1)
    if reason := run_module(SENDER, *map(str, unsent), "--evaluations", timeout_seconds=seconds):
        log.warning(
            "the evaluation was not recorded in MLflow yet: %s. To send it later: %s",
            reason,
            " and ".join(map(sync_command, unsent)),
        )


def page_command(run_dir: Path, uri: str | None) -> str:
    """What opens the page of a tracking server: a command for an SQLite file, or an address."""
    server = server_of(uri, run_dir)
    if server.startswith("http"):
        return redact(server)
    return f"mlflow ui --backend-store-uri {shlex.quote(redact(server))}"


def _is_sending(run_dir: Path, waited_seconds: float) -> bool:
    """Whether the sender runs, or may still begin."""
    state = TrackingState.load(run_dir / STATE)
    is_delivered = state is not None and state.delivered
    # A file system without locks: only the state tells.
    is_running = is_locked(run_dir / LOCK, if_unsupported=not is_delivered)
    return is_running or (not is_delivered and waited_seconds < START_SECONDS)


def _request(
    run_dir: Path,
    config: "RunConfig",
    tags: Mapping[str, str],
    datasets: Sequence[TrackedDataset],
) -> TrackingRequest:
    from txl_dist.config.config_file import flatten_config

    return TrackingRequest(
        server=config.tracking.uri,
        experiment=config.tracking.experiment,
        params={name: as_text(value) for name, value in flatten_config(config).items()},
        tags={
            "txl.version": metadata.version("txl-dist"),
            "txl.run_directory": str(run_dir),
            **{f"txl.{name}": value for name, value in tags.items()},
        },
        datasets=tuple(datasets),
    )


def _status_of(error: BaseException | None) -> str:
    if error is None:
        return "finished"
    if isinstance(error, PreemptedError):
        return "preempted"
    if isinstance(error, DivergedError):
        return "diverged"
    if isinstance(error, FencedError):
        return "running"  # the newer attempt continues the same run
    return "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"
