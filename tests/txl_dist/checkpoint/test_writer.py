"""A save is complete or leaves the previous checkpoint as the newest one."""

import errno
import math
import os
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.txl_dist.checkpoint.saving import (
    BEST,
    HEADER,
    NUM_LANES,
    fragments_of,
    memory,
    save,
    save_on_one_rank,
    snapshot,
)
from txl_dist.checkpoint import checkpoints as module
from txl_dist.checkpoint.checkpoints import Checkpoints, Save
from txl_dist.checkpoint.directory import CheckpointDirectory
from txl_dist.checkpoint.tensors import (
    Snapshot,
    verify_checkpoint,
)
from txl_dist.errors import CheckpointError, DivergedError, LostRankError
from txl_dist.training.state import TrainState


@pytest.mark.fault
@pytest.mark.fault_row(8, 9)
def test_a_kill_at_any_file_operation_leaves_an_intact_newest_checkpoint(tmp_path: Path) -> None:
    sweep = [sys.executable, "-m", "tests.txl_dist.checkpoint.kill_sweep", str(tmp_path)]
    done = subprocess.run(sweep, check=False, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "kill points" in done.stdout


@pytest.mark.fault_row(10)
@pytest.mark.parametrize("file", ["weights", "memory", "manifest.json", "LATEST"])
def test_a_full_disk_names_the_place_and_leaves_an_intact_newest_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str
) -> None:
    save(tmp_path, step=1)
    open_file = Path.open

    def full(path: Path, mode: str = "r", *rest: Any, **named: Any) -> Any:
        if "w" in mode and file in path.name:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        return open_file(path, mode, *rest, **named)

    monkeypatch.setattr(Path, "open", full)
    with pytest.raises(CheckpointError, match=r"checkpoints: .*No space left.*newest checkpoint"):
        save(tmp_path, step=2)
    directory = CheckpointDirectory(tmp_path)
    assert directory.steps() == ([1, 2] if file == "LATEST" else [1])
    assert not list(directory.path.glob(".*"))
    verify_checkpoint(directory.at(directory.steps()[-1]))


@pytest.mark.parametrize("kind", ["weights", "optimizer", "memory"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_numbers_that_are_not_finite_are_never_saved(
    tmp_path: Path, kind: str, value: float
) -> None:
    save(tmp_path, step=1)

    def poison(name: str, tensor: torch.Tensor) -> None:
        if name == kind:
            tensor.view(-1)[-1] = value

    with pytest.raises(DivergedError, match=rf"after step 2 .*{kind} .*rank 0"):
        save(tmp_path, step=2, change=poison)
    directory = CheckpointDirectory(tmp_path)
    assert directory.steps() == [1]
    assert not list(directory.path.glob(".*"))


def test_checkpoint_files_follow_the_umask(tmp_path: Path) -> None:
    modes = {stat.S_IMODE(path.stat().st_mode) for path in save(tmp_path, step=3).iterdir()}
    (tmp_path / "neighbour").touch()
    assert modes == {stat.S_IMODE((tmp_path / "neighbour").stat().st_mode)}


def test_changing_the_state_changes_nothing_else(tmp_path: Path) -> None:
    path = save(tmp_path, step=3)
    before = verify_checkpoint(path)
    score = BEST.model_copy(update={"step": 3, "nats": 1.25})
    changes = {"best": score.model_dump(mode="json")}
    CheckpointDirectory(tmp_path).update_state(3, changes)
    assert verify_checkpoint(path) == before.model_copy(update={"state": before.state | changes})


def one_of_two(rank: int, save_id: str, timeout_seconds: float = 60) -> Save:
    return Save(
        save_id=save_id, state={"step": 2}, rank=rank, num_ranks=2, timeout_seconds=timeout_seconds
    )


def test_a_missing_rank_is_named_and_its_files_of_another_save_do_not_count(tmp_path: Path) -> None:
    save(tmp_path, step=1)
    tensors, checkpoints = snapshot(2), Checkpoints(CheckpointDirectory(tmp_path))
    checkpoints.save(one_of_two(1, "a" * 8), tensors, HEADER)
    with pytest.raises(CheckpointError, match=r"files of rank 1 are missing after .*=0\.1"):
        checkpoints.save(one_of_two(0, "b" * 8, 0.1), tensors, HEADER)
    assert checkpoints.directory.steps() == [1]


def test_a_slow_rank_is_waited_for_as_long_as_its_files_grow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, step=1)
    monkeypatch.setattr(module, "_LOOK_SECONDS", 0.05)
    checkpoints = Checkpoints(CheckpointDirectory(tmp_path))
    first = one_of_two(0, "b" * 8, 0.5)
    checkpoints.write_part(first, snapshot(2))
    growing = checkpoints.directory.staging(first.save_id) / "weights-rank-00001.safetensors"

    def grow() -> None:
        for _ in range(12):
            time.sleep(0.1)
            with growing.open("ab") as file:
                file.write(b"x" * 100)

    started, thread = time.monotonic(), threading.Thread(target=grow)
    thread.start()
    with pytest.raises(LostRankError, match=r"files of rank 1 have not grown for .*=0\.5"):
        checkpoints.publish(first, HEADER)
    thread.join()
    assert time.monotonic() - started > 1.2 + 0.5
    assert checkpoints.directory.steps() == [1]


def test_rank_0_may_publish_as_soon_as_it_finds_the_last_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even if the other rank is not scheduled between the rename of its part and its next call."""
    checkpoints = Checkpoints(CheckpointDirectory(tmp_path))
    checkpoints.directory.open()
    first, second = (one_of_two(rank, "d" * 8) for rank in (0, 1))
    first_part = Snapshot(fragments_of(2), [(lane, memory(2, lane)) for lane in (0, 2)])
    checkpoints.write_part(first, first_part)
    replace, published = Path.replace, []

    def replace_and_publish(path: Path, target: Path) -> Path:
        moved = replace(path, target)
        if target.name.startswith("part-rank-00001"):
            published.append(checkpoints.publish(first, HEADER))
        return moved

    monkeypatch.setattr(Path, "replace", replace_and_publish)
    checkpoints.write_part(second, Snapshot([], [(1, memory(2, 1))]))
    assert published == [checkpoints.directory.at(2)]
    assert verify_checkpoint(published[0]).rank_of_lane == (0, 1, 0)


def test_a_snapshot_does_not_change_with_its_originals(tmp_path: Path) -> None:
    memory_of_lane = {lane: memory(3, lane) for lane in range(NUM_LANES)}
    fragments = fragments_of(3)
    copy = Snapshot(fragments, memory_of_lane.items())
    for each in fragments:
        torch._foreach_zero_([each.master, *each.states.values()])
    for tensors in memory_of_lane.values():
        torch._foreach_zero_(list(tensors.values()))
    path = save_on_one_rank(tmp_path, TrainState(step=3), copy)
    other = save(tmp_path / "other", step=3)
    for name, entry in verify_checkpoint(path).files.items():
        assert verify_checkpoint(other).files[name] == entry
