"""A full or read-only disk ends a run with its reason, although nothing can be written about it."""

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.commands import num_lines, start_txl, txl, wait_until
from tests.support.training_runs import NO_EVALUATION, TINY

pytestmark = pytest.mark.fault


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 8 MiB of its own."""
    mounted = tmp_path / "disk"
    mounted.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(mounted)]
    if os.geteuid() != 0 or subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("mounting a small file system needs root and a kernel that allows it")
    yield mounted
    subprocess.run(["umount", str(mounted)], check=True)


def fill(disk: Path) -> None:
    """Leave no byte free."""
    with (disk / "filler").open("wb", buffering=0) as file:
        for size in (65536, 4096, 1):
            try:
                while True:
                    file.write(b"x" * size)
            except OSError:
                continue


@pytest.mark.fault_row(10)
def test_a_disk_that_fills_up_ends_the_run_with_4_and_the_reason(
    dataset: Path, small_disk: Path
) -> None:
    run = small_disk / "run"
    process = start_txl(
        "train", TINY, f"data.path={dataset}", f"directory={run}", NO_EVALUATION,
        "training.num_steps=400", "training.checkpoint_interval_steps=100",
        "tracking.enabled=false", "--on", "processes", "--ranks", 2,
    )  # fmt: skip
    wait_until(lambda: num_lines(run / "metrics.jsonl") > 5)
    fill(small_disk)
    assert shutil.disk_usage(small_disk).free == 0
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 4, output
    assert "CheckpointError" in output
    assert re.search(r"rank \d: OSError: .*No space left on device", output)
    assert str(run / "checkpoints") in output


@pytest.mark.fault_row(12)
def test_a_disk_full_from_the_start_is_refused_before_the_first_step(
    dataset: Path, small_disk: Path
) -> None:
    fill(small_disk)
    run = small_disk / "run"
    done = txl("train", TINY, f"data.path={dataset}", f"directory={run}", "--on", "processes")
    assert done.returncode == 2, done.stderr
    assert "No space left on device" in done.stderr


@pytest.mark.fault_row(12)
def test_a_read_only_disk_is_refused_before_the_first_step(dataset: Path, small_disk: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    run = small_disk / "run"
    done = txl("train", TINY, f"data.path={dataset}", f"directory={run}", "--on", "processes")
    assert done.returncode == 2, done.stderr
    assert "Read-only file system" in done.stderr
    assert str(run) in done.stderr
    assert "directory=PATH" in done.stderr
