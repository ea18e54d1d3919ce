"""Starts job scripts in a process group of their own, and ends what tests leave of them."""

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import pytest

from tests.support.commands import ENVIRONMENT

ROOT = Path(__file__).parents[3]
ALONE = (
    "unshare", "--pid", "--net", "--mount-proc", "--fork", "--kill-child", "bash", "-ec",
    """
    ip link set lo up
    ip link add eth0 type veth peer name eth1
    ip address add 10.77.32.1/24 dev eth0
    ip link set eth0 up
    ip link set eth1 up
    ip route add default via 10.77.32.2
    exec "$@"
    """,
    "job",
)  # fmt: skip
"""Starts a command in a new network namespace: `ray stop` ends every Ray that it can see. Ray uses
the address by which it would reach the internet, hence an interface and a route."""

_started: list[subprocess.Popen[str]] = []


def start_job(
    words: Sequence[str], environment: Mapping[str, str], *, cwd: Path = ROOT
) -> subprocess.Popen[str]:
    """Start a command; `end_jobs` kills its process group."""
    process = subprocess.Popen(
        words,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=cwd,
        env={**ENVIRONMENT, **environment},
        start_new_session=True,
    )
    _started.append(process)
    return process


def end_jobs() -> None:
    while _started:
        with suppress(ProcessLookupError):
            os.killpg(_started.pop().pid, signal.SIGKILL)


def require_namespaces() -> None:
    """Skip the test if this user cannot create a network namespace."""
    try:
        subprocess.run([*ALONE, "true"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"namespaces cannot be created: {error}")
