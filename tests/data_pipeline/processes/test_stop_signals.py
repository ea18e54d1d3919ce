"""A stop request may arrive as several signals, and must work during native code."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from data_pipeline.processes import stop_signals
from data_pipeline.processes.stop_signals import STOP_SIGNALS, StopSignals
from tests.support.commands import wait_until


class Calls:
    """Records the callbacks of a StopSignals."""

    def __init__(self) -> None:
        self.requests: list[int] = []
        self.repeats = 0

    def repeat(self) -> None:
        self.repeats += 1


@pytest.mark.usefixtures("hangup")
@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_a_signal_is_a_request_and_the_old_handler_is_restored(number: int) -> None:
    before = signal.getsignal(number)
    calls = Calls()
    with StopSignals(calls.requests.append, calls.repeat) as signals:
        assert not signals
        signal.raise_signal(number)
        wait_until(lambda: bool(signals))
    assert calls.requests == [number]
    assert signal.getsignal(number) == before
    assert signal.set_wakeup_fd(-1) == -1


def test_nohup_keeps_its_meaning() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopSignals() as signals:
            signal.raise_signal(signal.SIGHUP)
            signal.raise_signal(signal.SIGUSR1)
            wait_until(lambda: bool(signals))
            assert list(signals._first_seen) == [signal.SIGUSR1]
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


BLOCKED = """
import os, signal, time
from data_pipeline.processes.stop_signals import (
    StopSignals, block_stop_signals, unblock_stop_signals
)
block_stop_signals()  # as the processes of a private Ray, which inherit the mask
os.kill(os.getpid(), signal.SIGTERM)
print("blocked", flush=True)
with StopSignals(on_request=lambda number: print("requested", flush=True)):
    unblock_stop_signals()
    time.sleep(1)
print("lives")
"""


def test_a_signal_to_a_process_that_blocks_it_is_a_request_once_it_has_handlers() -> None:
    command = [sys.executable, "-c", BLOCKED]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == ["blocked", "requested", "lives"]


def test_copies_of_one_request_are_one_request() -> None:
    calls = Calls()
    with StopSignals(calls.requests.append, calls.repeat) as signals:
        for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            signal.raise_signal(number)
        wait_until(lambda: len(signals._first_seen) == 3)
    assert calls.requests == [signal.SIGTERM]
    assert calls.repeats == 0


def test_only_the_same_signal_again_after_a_while_is_a_repeat(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stop_signals, "REPEAT_SECONDS", 0.0)
    calls = Calls()
    with StopSignals(calls.requests.append, calls.repeat):
        # Slurm warns with SIGUSR1 and ends with SIGTERM: the second is not a repeat.
        signal.raise_signal(signal.SIGUSR1)
        wait_until(lambda: calls.requests == [signal.SIGUSR1])
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
        wait_until(lambda: calls.repeats == 1)
    assert calls.requests == [signal.SIGUSR1]


def test_a_request_works_inside_native_code(tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    code = (
        "import hashlib, pathlib\n"
        "from data_pipeline.processes.stop_signals import StopSignals\n"
        "from txl_dist.runtime.stop import exit_before_first_step\n"
        "with StopSignals(on_request=exit_before_first_step):\n"
        f"    pathlib.Path({str(ready)!r}).touch()\n"
        # Minutes of native code that releases the GIL and does not check for signals.
        "    hashlib.pbkdf2_hmac('sha256', b'', b'', 1_000_000_000)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True)
    wait_until(ready.exists)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=10)
    assert process.returncode == 75
    assert "nothing is lost" in errors


def test_contexts_nest() -> None:
    outer, inner = Calls(), Calls()
    with StopSignals(outer.requests.append):
        with StopSignals(inner.requests.append) as signals:
            os.kill(os.getpid(), signal.SIGTERM)
            wait_until(lambda: bool(signals))
        os.kill(os.getpid(), signal.SIGINT)
        wait_until(lambda: outer.requests == [signal.SIGINT])
    assert inner.requests == [signal.SIGTERM]
