"""Runs `txl` in child processes, as a user does, or in this process."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from unittest.mock import patch

from typer.testing import CliRunner

from txl_dist.cli import options
from txl_dist.cli.app import app
from txl_dist.errors import TxlError

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200"}


def txl(
    *words: object,
    timeout_seconds: float = 120,
    cwd: Path | None = None,
    environment: Mapping[str, str] = {},
) -> subprocess.CompletedProcess[str]:
    """Run one command to its end. The result holds its output as text."""
    command = [sys.executable, "-m", "txl_dist", *map(str, words)]
    return subprocess.run(
        command,
        check=False,
        capture_output=True,
        text=True,
        timeout=timeout_seconds,
        env={**ENVIRONMENT, **environment},
        cwd=cwd,
    )


def run_txl(*words: object) -> tuple[int, str]:
    """Exit code and output of a command that runs in this process; of an error, its message."""
    with patch.object(options, "SILENT_SECONDS", 600):  # no line depends on the time
        result = CliRunner().invoke(app, [str(word) for word in words])
    if isinstance(result.exception, TxlError):
        return result.exception.exit_code, str(result.exception)
    return result.exit_code, result.output


def start_txl(
    *words: object,
    environment: Mapping[str, str] = {},
    own_group: bool = False,
    inside: Sequence[str] = (),
) -> subprocess.Popen[str]:
    """Start one command, which obeys Ctrl-C however the tests were started; the caller ends it.

    `own_group`: in a new process group, so that a signal can be sent to all its processes.
    `inside` prefixes the command, for example with `Host.prefix`.
    """
    return subprocess.Popen(
        [*inside, sys.executable, "-m", "txl_dist", *map(str, words)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**ENVIRONMENT, **environment},
        start_new_session=own_group,
        preexec_fn=_restore_interrupts,  # noqa: PLW1509  # takes no lock
    )


def output_of(process: subprocess.Popen[str], code: int, *, timeout_seconds: float) -> str:
    """What a command has printed at its end, which must be with this exit code."""
    output, _ = process.communicate(timeout=timeout_seconds)
    assert process.returncode == code, output
    return output


def start_torchrun(*words: object, own_group: bool = False) -> subprocess.Popen[str]:
    """Start two ranks of a command under torchrun, which decides what `--on` and `--ranks` say."""
    launch = ("--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node", "2")
    return subprocess.Popen(
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            *launch,
            "-m",
            "txl_dist",
            *map(str, words),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=ENVIRONMENT,
        start_new_session=own_group,
    )


def _restore_interrupts() -> None:
    # A shell script starts its background jobs with SIGINT ignored, and children inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)


def wait_until(
    condition: Callable[[], bool], *, timeout_seconds: float = 300, poll_seconds: float = 0.02
) -> None:
    """Poll `condition`; AssertionError if it does not come true in time.

    On a busy machine the start of two ranks alone takes more than a minute.
    """
    deadline = time.monotonic() + timeout_seconds
    while not condition():
        assert time.monotonic() < deadline, f"the condition did not hold within {timeout_seconds} s"
        time.sleep(poll_seconds)


def num_lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def children_of(pid: int) -> list[int]:
    """Pids of the direct children of a process."""
    path = Path(f"/proc/{pid}/task/{pid}/children")
    return [int(word) for word in path.read_text().split()] if path.exists() else []


def is_alive(pid: int) -> bool:
    """Whether a process runs (a zombie does not)."""
    status = Path(f"/proc/{pid}/stat")
    try:
        return status.read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
