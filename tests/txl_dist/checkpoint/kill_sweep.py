"""Kills a process at every file operation of a save and of a state update, and verifies the files.

Started by test_writer.py. One process forks a child per kill point: the kill is real, and costs
milliseconds.
"""

import os
import shutil
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tests.txl_dist.checkpoint.saving import BEST, model, save
from txl_dist.checkpoint import tensors
from txl_dist.checkpoint.directory import CheckpointDirectory
from txl_dist.checkpoint.tensors import load_model, verify_checkpoint

KILLED = 137


def main(run: Path) -> None:
    torch.set_num_threads(1)
    sweep_save(run)
    sweep_score(run)


def sweep_score(run: Path) -> None:
    """The checkpoint of step 2 is intact at every moment, with or without its score."""
    directory = CheckpointDirectory(run)
    state = verify_checkpoint(directory.at(2)).state
    score = {"best": BEST.model_copy(update={"step": 2}).model_dump(mode="json")}
    scored = {**state, **score}
    for kill_at in range(1, 50):
        is_killed = killed_at(kill_at, partial(directory.update_state, 2, score))
        assert verify_checkpoint(directory.at(2)).state in (state, scored)
        directory.open()
        assert not list(directory.at(2).glob(".*"))
        if not is_killed:
            assert verify_checkpoint(directory.at(2)).state == scored
            assert kill_at > 4
            return
        directory.update_state(2, state)
    raise AssertionError("the score was never saved")


def sweep_save(run: Path) -> None:
    """The newest checkpoint is intact at every moment of a save."""
    save(run, step=1)
    seen_new = seen_old = 0
    for kill_at in range(1, 400):
        is_killed = killed_at(kill_at, partial(save, run, step=2))
        newest = CheckpointDirectory(run).steps()[-1]
        assert_intact(run, newest)
        if not is_killed:
            assert newest == 2
            assert seen_old >= 8
            assert seen_new >= 2
            assert not list(CheckpointDirectory(run).path.glob(".*"))
            print(f"{kill_at - 1} kill points")
            return
        seen_old, seen_new = seen_old + (newest == 1), seen_new + (newest == 2)
        if newest == 2:  # both are accepted; go back to before the save
            shutil.rmtree(CheckpointDirectory(run).at(2))
    raise AssertionError("the save never ended")


def assert_intact(run: Path, step: int) -> None:
    """The checkpoint is complete and contains the values of its step."""
    directory = CheckpointDirectory(run).at(step)
    assert verify_checkpoint(directory).step == step
    loaded, _, _ = load_model(directory)
    for name, parameter in model(step).named_parameters():
        assert torch.equal(loaded.get_parameter(name), parameter), name


def killed_at(kill_at: int, work: Callable[[], object]) -> bool:
    """Run `work` in a child that is killed before a file operation; whether it had so many."""
    child = os.fork()
    if child == 0:
        count_down(kill_at)
        work()
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, KILLED), code
    return code == KILLED


def count_down(kill_at: int) -> None:
    """End this process before its `kill_at`-th file operation from here."""
    done = 0

    def count() -> None:
        nonlocal done
        done += 1
        if done == kill_at:
            os._exit(KILLED)

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            count()
            return function(*args, **kwargs)

        return wrapper

    def counted_blocks(arrays: Any) -> Iterator[Any]:
        for block in blocks(arrays):
            count()
            yield block

    for name in ("rename", "replace", "mkdir", "unlink", "open"):
        setattr(Path, name, counted(getattr(Path, name)))
    os.fsync = counted(os.fsync)
    blocks, tensors._blocks = tensors._blocks, counted_blocks


if __name__ == "__main__":
    main(Path(sys.argv[1]))
