"""A full or read-only disk ends a run with its reason, although nothing can be written about it."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.commands import output_of, start_txl, txl, wait_until
from tests.support.training_runs import NO_EVALUATION, train_words
from txl_dist.checkpoint.directory import CheckpointDirectory
from txl_dist.checkpoint.tensors import verify_checkpoint

pytestmark = pytest.mark.fault


def fill(disk: Path) -> None:
    with (disk / "filler").open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, shutil.disk_usage(disk).free)


@pytest.mark.fault_row(10)
def test_a_disk_that_fills_up_ends_the_run_with_4_and_keeps_what_was_saved(
    dataset: Path, small_disk: Path
) -> None:
    run = small_disk / "run"
    settings = ("training.num_steps=400", "training.checkpoint_interval_steps=100")
    process = start_txl(
        *train_words(dataset, run, NO_EVALUATION, "tracking.enabled=false", *settings)
    )
    wait_until((run / "LATEST").exists)
    fill(small_disk)
    assert shutil.disk_usage(small_disk).free == 0
    output = output_of(process, 4, timeout_seconds=120)
    assert "CheckpointError" in output
    assert re.search(r"rank \d: OSError: .*No space left on device", output)
    assert str(run / "checkpoints") in output
    assert "resumes from the newest checkpoint, that of step 100" in output
    verify_checkpoint(CheckpointDirectory(run).at(100))


@pytest.mark.fault_row(12)
@pytest.mark.parametrize("reason", ["No space left on device", "Read-only file system"])
def test_a_disk_that_cannot_be_written_is_refused_before_the_first_step(
    dataset: Path, small_disk: Path, reason: str
) -> None:
    if reason == "No space left on device":
        fill(small_disk)
    else:
        subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    run = small_disk / "run"
    done = txl(*train_words(dataset, run))
    assert done.returncode == 2, done.stderr
    for part in (reason, str(run), "directory=PATH"):
        assert part in done.stderr
