"""The lock of a file or directory: one holder, released by the kernel when the holder is killed."""

import errno
import fcntl
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from data_pipeline.storage.locks import try_lock, wait_for_lock

HOLDER = """
import os, sys, time
from data_pipeline.storage.locks import try_lock
assert try_lock(os.open(sys.argv[1], os.O_RDONLY))
print("locked", flush=True)
time.sleep(600)
"""


@pytest.fixture(params=["file", "directory"])
def descriptors(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[int, int]]:
    """Two open descriptors of one file or directory, as two processes would have."""
    path = tmp_path / "locked"
    if request.param == "directory":
        path.mkdir()
    else:
        path.touch()
    pair = (os.open(path, os.O_RDONLY), os.open(path, os.O_RDONLY))
    yield pair
    for descriptor in pair:
        os.close(descriptor)


def test_only_one_descriptor_holds_the_lock(descriptors: tuple[int, int]) -> None:
    first, second = descriptors
    assert try_lock(first)
    assert not try_lock(second)
    assert try_lock(first), "the holder may take it again"
    assert not wait_for_lock(second, timeout_seconds=0.2)


def test_waiting_ends_when_the_lock_is_released(descriptors: tuple[int, int]) -> None:
    first, second = descriptors
    assert try_lock(first)
    timer = threading.Timer(0.2, fcntl.flock, (first, fcntl.LOCK_UN))
    timer.start()
    assert wait_for_lock(second, timeout_seconds=30)
    timer.join()


@pytest.mark.fault_row(35)
def test_a_killed_process_leaves_no_lock(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLDER, str(tmp_path)]
    holder = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert holder.stdout is not None
    assert holder.stdout.readline() == b"locked\n"
    descriptor = os.open(tmp_path, os.O_RDONLY)
    assert not try_lock(descriptor)
    holder.kill()
    holder.wait()
    holder.stdout.close()
    assert try_lock(descriptor)
    os.close(descriptor)


def test_a_file_system_without_locks_counts_as_unlocked(
    descriptors: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    assert try_lock(descriptors[0])
    assert not try_lock(descriptors[0], if_unsupported=False)
