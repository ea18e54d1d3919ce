"""A child that calls end_with_parent ends when its parent is killed, in the middle of its work."""

import os
import subprocess
import sys

import pytest

from tests.support.commands import is_alive, wait_until

CHILD = """
import sys, time
from data_pipeline.processes.parent import end_with_parent
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
