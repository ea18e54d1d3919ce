"""The checkpoint directory of a run: pointers, superseded checkpoints, removal."""

import errno
import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from data_pipeline.system.files import try_lock
from tests.txl_dist.checkpoint.saving import BEST, save
from txl_dist.checkpoint.checkpoints import Checkpoints
from txl_dist.checkpoint.directory import (
    CheckpointDirectory,
    Retention,
    divergence_advice,
    reading,
    resolve_checkpoint,
    resume_advice,
)
from txl_dist.checkpoint.tensors import load_model, verify_checkpoint
from txl_dist.errors import CheckpointError, StoreError


def names(directory: CheckpointDirectory) -> list[str]:
    return sorted(path.name for path in directory.path.iterdir())


@pytest.fixture
def directory(tmp_path: Path) -> CheckpointDirectory:
    """Checkpoints of steps 1 to 6."""
    for step in range(1, 7):
        save(tmp_path, step=step)
    return CheckpointDirectory(tmp_path)


def test_pruning_keeps_the_newest_and_the_best(directory: CheckpointDirectory) -> None:
    directory.prune(Retention(keep=2), best_step=3)
    assert names(directory) == ["step-00000003", "step-00000005", "step-00000006"]


def test_multiples_of_an_interval_are_kept(directory: CheckpointDirectory) -> None:
    directory.prune(Retention(keep=1, keep_interval_steps=2), best_step=5)
    assert directory.steps() == [2, 4, 5, 6]


READER = """
import sys
from pathlib import Path
from txl_dist.checkpoint.directory import reading
with reading(Path(sys.argv[1])):
    print("reading", flush=True)
    sys.stdin.readline()
"""


def test_a_checkpoint_that_is_read_is_removed_later(directory: CheckpointDirectory) -> None:
    command = [sys.executable, "-c", READER, str(directory.at(2))]
    reader = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert reader.stdout is not None
    assert reader.stdout.readline() == "reading\n"
    with reading(directory.at(2)):  # any number of readers
        directory.prune(Retention(keep=2), best_step=None)
    assert directory.steps() == [2, 5, 6]
    directory.prune(Retention(keep=2), best_step=None)
    assert directory.steps() == [2, 5, 6], "the other reader still reads"
    reader.communicate("\n", timeout=60)
    directory.prune(Retention(keep=2), best_step=None)
    assert directory.steps() == [5, 6]
    with pytest.raises(CheckpointError, match=r"step-00000002 cannot be read"):
        verify_checkpoint(directory.at(2))


def test_a_checkpoint_that_the_disk_does_not_deliver_may_be_intact(
    directory: CheckpointDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(path: object, *arguments: object) -> int:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(path))

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", failing)
        with pytest.raises(StoreError, match="It may be intact"):
            verify_checkpoint(directory.at(2))
    verify_checkpoint(directory.at(2))


def test_a_checkpoint_that_is_being_removed_is_not_read(directory: CheckpointDirectory) -> None:
    descriptor = os.open(directory.at(2), os.O_RDONLY)
    assert try_lock(descriptor)
    with pytest.raises(CheckpointError, match="is being removed by its run"):
        load_model(directory.at(2))
    os.close(descriptor)
    load_model(directory.at(2))


def test_pointers_name_a_step(directory: CheckpointDirectory) -> None:
    assert directory.pointer("LATEST") == 6
    assert directory.pointer("BEST") is None
    (directory.run / "BEST").write_text("checkpoints/../../etc")
    assert directory.pointer("BEST") is None


def test_nothing_is_removed_while_it_is_unknown_which_checkpoint_is_the_best(
    directory: CheckpointDirectory, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoints = Checkpoints(directory, retention=Retention(keep=1))
    pointer = directory.run / "BEST"
    pointer.symlink_to(pointer)  # a read error, not a missing file
    checkpoints.prune()
    assert directory.steps() == [1, 2, 3, 4, 5, 6]
    assert "BEST cannot be read (Too many levels of symbolic links)" in caplog.text
    assert directory.pointer("BEST") is None
    directory.set_pointer("BEST", 3)  # as a better score does: it repairs the pointer
    checkpoints.prune()
    assert directory.steps() == [3, 6]


def test_a_directory_that_cannot_be_removed_is_a_warning_and_not_a_checkpoint(
    directory: CheckpointDirectory,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """As on NFS, where removing an open file leaves .nfsXXXX."""

    def busy(path: Path, *_: Any, **__: Any) -> None:
        raise OSError(16, "Device or resource busy", str(path))

    with caplog.at_level(logging.WARNING), monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", busy)
        directory.prune(Retention(keep=5), best_step=None)
    assert "cannot be removed (Device or resource busy)" in caplog.text
    assert directory.steps() == [2, 3, 4, 5, 6]
    assert len(names(directory)) == 6

    directory.open()
    assert len(names(directory)) == 5


def test_what_cannot_be_renamed_is_a_warning_and_stays_a_checkpoint(
    directory: CheckpointDirectory,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def refuse(path: Path, target: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    with caplog.at_level(logging.WARNING), monkeypatch.context() as patch:
        patch.setattr(Path, "rename", refuse)
        directory.prune(Retention(keep=5), best_step=None)
    assert "cannot be removed (Permission denied)" in caplog.text
    assert directory.steps() == [1, 2, 3, 4, 5, 6]


@pytest.mark.fault_row(8)
def test_a_start_removes_what_killed_processes_left(directory: CheckpointDirectory) -> None:
    before = names(directory)
    for folder in (".saving.tmp", ".step-00000001.0123abcd.tmp", ".superseded-step-00000002.tmp"):
        shutil.copytree(directory.at(6), directory.path / folder)
    for leftover in (directory.run / ".LATEST.123.tmp", directory.at(3) / ".manifest.json.7.tmp"):
        leftover.touch()
    directory.open()
    assert names(directory) == before
    assert not list(directory.path.parent.rglob("*.tmp"))


@pytest.mark.parametrize(("best_step", "pointed_at"), [(2, 2), (5, None), (None, None)])
def test_after_a_rewind_the_pointers_name_remaining_checkpoints(
    directory: CheckpointDirectory, best_step: int | None, pointed_at: int | None
) -> None:
    directory.set_pointer("BEST", 5)
    assert directory.rewind(3, best_step=best_step) == [4, 5, 6]
    assert resolve_checkpoint(directory.run / "LATEST") == directory.at(3)
    if pointed_at is None:
        assert not (directory.run / "BEST").exists()
    else:
        assert resolve_checkpoint(directory.run / "BEST") == directory.at(pointed_at)


def test_only_the_checkpoints_of_the_last_rewind_stay_superseded(
    directory: CheckpointDirectory,
) -> None:
    directory.rewind(3)
    save(directory.run, step=4)
    assert directory.rewind(4) == []
    directory.rewind(2)
    assert names(directory) == [
        "step-00000001",
        "step-00000002",
        "superseded-step-00000003",
        "superseded-step-00000004",
    ]


def test_advice_names_only_existing_checkpoints(tmp_path: Path) -> None:
    assert "no checkpoint" in resume_advice(tmp_path)
    assert "no good checkpoint" in divergence_advice(tmp_path, before=9)
    for step in (2, 4, 9):
        save(tmp_path, step=step, best=BEST)
    assert "resumes from the newest checkpoint, that of step 9" in resume_advice(tmp_path)
    advice = divergence_advice(tmp_path, before=9)
    assert f"--resume {CheckpointDirectory(tmp_path).at(4)}" in advice


def test_a_checkpoint_is_found_from_itself_its_run_or_its_pointer(tmp_path: Path) -> None:
    for step in (2, 11):
        save(tmp_path, step=step)
    CheckpointDirectory(tmp_path).set_pointer("BEST", 2)
    assert resolve_checkpoint(tmp_path).name == "step-00000011"
    assert resolve_checkpoint(tmp_path / "checkpoints").name == "step-00000011"
    assert resolve_checkpoint(tmp_path / "LATEST").name == "step-00000011"
    assert resolve_checkpoint(tmp_path / "BEST").name == "step-00000002"
    assert resolve_checkpoint(tmp_path / "checkpoints" / "step-00000002").name == "step-00000002"


@pytest.mark.fault_row(24, 45)
@pytest.mark.parametrize("content", ["", "checkpoints/../../etc", "step-1", "\x00"])
def test_a_damaged_pointer_is_refused(tmp_path: Path, content: str) -> None:
    save(tmp_path, step=2)
    (tmp_path / "LATEST").write_text(content)
    with pytest.raises(CheckpointError, match="names no checkpoint"):
        resolve_checkpoint(tmp_path / "LATEST")
    assert resolve_checkpoint(tmp_path).name == "step-00000002"
