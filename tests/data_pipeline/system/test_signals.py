"""Stop signals, and how a process ends."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from data_pipeline.system import signals
from data_pipeline.system.signals import STOP_SIGNALS, StopSignals
from tests.support.commands import is_alive, wait_until

CHILD = """
import sys, time
from data_pipeline.system.signals import end_with_parent
end_with_parent(0)
print("ready", flush=True)
while True:
    time.sleep(0.01) if sys.argv[1] == "sleeping" else sum(range(1000))
"""
PARENT = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", *sys.argv[1:]], stdin=subprocess.PIPE)
print(child.pid, flush=True)
time.sleep(600)
"""


@pytest.mark.usefixtures("hangup")
@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_a_signal_is_a_request_and_the_old_handler_is_restored(number: int) -> None:
    before, requests = signal.getsignal(number), []
    with StopSignals(requests.append) as signals:
        assert not signals
        signal.raise_signal(number)
        wait_until(lambda: bool(signals))
    assert requests == [number]
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
from data_pipeline.system.signals import (
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
    requests, repeats = [], []
    with StopSignals(requests.append, lambda: repeats.append(1)) as signals:
        for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            signal.raise_signal(number)
        wait_until(lambda: len(signals._first_seen) == 3)
    assert (requests, repeats) == ([signal.SIGTERM], [])


def test_only_the_same_signal_again_after_a_while_is_a_repeat(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(signals, "REPEAT_SECONDS", 0.0)
    requests, repeats = [], []
    with StopSignals(requests.append, lambda: repeats.append(1)):
        # Slurm warns with SIGUSR1 and ends with SIGTERM: the second is not a repeat.
        signal.raise_signal(signal.SIGUSR1)
        wait_until(lambda: requests == [signal.SIGUSR1])
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
        wait_until(lambda: repeats == [1])
    assert requests == [signal.SIGUSR1]


def test_a_request_works_inside_native_code(tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    code = (
        "import hashlib, pathlib\n"
        "from data_pipeline.system.signals import StopSignals\n"
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
    outer, inner = [], []
    with StopSignals(outer.append):
        with StopSignals(inner.append) as signals:
            os.kill(os.getpid(), signal.SIGTERM)
            wait_until(lambda: bool(signals))
        os.kill(os.getpid(), signal.SIGINT)
        wait_until(lambda: outer == [signal.SIGINT])
    assert inner == [signal.SIGTERM]


@pytest.mark.parametrize("code", [0, 75])
def test_the_shutdown_of_the_interpreter_does_not_change_the_exit_code(code: int) -> None:
    program = (
        "import atexit, os, sys\n"
        "from data_pipeline.system.signals import exit_without_teardown\n"
        "atexit.register(os.abort)\n"  # like a native thread during the shutdown
        "print('buffered', end='')\n"
        f"exit_without_teardown({code})\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], check=False, stdout=subprocess.PIPE, text=True
    )
    assert (done.returncode, done.stdout) == (code, "buffered")


@pytest.mark.parametrize("work", ["sleeping", "computing"])
def test_a_child_ends_when_its_parent_is_killed(work: str) -> None:
    command = [sys.executable, "-c", PARENT, CHILD, work]
    parent = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    lines = {parent.stdout.readline().strip() for _ in range(2)}
    (child,) = (int(line) for line in lines - {"ready"})
    assert is_alive(child)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    wait_until(lambda: not is_alive(child), timeout_seconds=10)


def test_bytes_from_the_parent_do_not_end_the_child() -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, "sleeping"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert child.stdin is not None
    assert child.stdout is not None
    assert child.stdout.readline() == b"ready\n"
    os.write(child.stdin.fileno(), b"x" * 10_000)
    with pytest.raises(subprocess.TimeoutExpired):
        child.wait(timeout=0.3)
    child.stdin.close()
    assert child.wait(timeout=10) == 1
    child.stdout.close()
