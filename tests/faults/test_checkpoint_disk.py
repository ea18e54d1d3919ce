"""A full disk, and a checkpoint that cannot be removed, on real file systems."""

import logging
import subprocess
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.gloo_ranks import RankGroups
from tests.support.training_runs import NO_EVALUATION, tiny_spec
from tests.txl_dist.checkpoint.saving import save
from tests.txl_dist.training.test_saving import train_changed, unchanged
from txl_dist.checkpoint.directory import CheckpointDirectory, Retention
from txl_dist.checkpoint.reader import verify_checkpoint


@contextmanager
def small_disk(at: Path, *, kilobytes: int) -> Iterator[None]:
    """Mount a small file system at `at`; skips the test if that is not permitted."""
    at.mkdir(exist_ok=True)
    disk = f"txl-{uuid.uuid4().hex}"
    mount = ["mount", "-t", "tmpfs", "-o", f"size={kilobytes}k", disk, str(at)]
    if subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("mounting a file system needs root")
    try:
        yield
    finally:
        # Its directory may have been renamed meanwhile.
        mounts = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
        (mount_point,) = [words[1] for words in mounts if words[0] == disk]
        subprocess.run(["umount", "--lazy", mount_point], check=True)


@pytest.mark.fault_row(10)
@pytest.mark.fault
@pytest.mark.parametrize("kilobytes", range(700, 900, 16))
def test_a_disk_that_fills_up_ends_all_ranks_with_4_and_keeps_what_was_saved(
    ranks: RankGroups, dataset: Path, tmp_path: Path, kilobytes: int
) -> None:
    """Several sizes, so the disk is full at different files of a save."""
    with small_disk(tmp_path / "disk", kilobytes=kilobytes):
        run = tmp_path / "disk" / "run"
        settings = ("training.checkpoint_interval_steps=1", "training.keep_checkpoints=99")
        spec = tiny_spec(dataset, run, NO_EVALUATION, *settings)
        ends = ranks(2).run(train_changed, spec, unchanged)
        assert [code for code, _ in ends] == [4, 4]
        steps = CheckpointDirectory(run).steps()
        assert steps
        for _, message in ends:
            assert "disk full" in message or "No space left on device" in message
            assert f"resumes from the newest checkpoint, that of step {steps[-1]}" in message
        for step in steps:
            verify_checkpoint(CheckpointDirectory(run).at(step))


@pytest.mark.fault
def test_a_busy_checkpoint_is_a_warning_and_is_removed_at_the_next_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for step in (1, 2, 3):
        save(tmp_path, step=step)
    directory = CheckpointDirectory(tmp_path)
    with small_disk(directory.at(1) / "busy", kilobytes=100), caplog.at_level(logging.WARNING):
        directory.prune(Retention(keep=2), best_step=None)
    assert "cannot be removed" in caplog.text
    assert directory.steps() == [2, 3]
    directory.open()
    assert len(list(directory.path.iterdir())) == 2
