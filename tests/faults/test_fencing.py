"""Two attempts of one run train at the same time, where no lock can exclude the second one."""

import os
import signal
import subprocess
from pathlib import Path

import pytest

from tests.support.commands import children_of, start_txl, wait_until
from tests.support.gloo_ranks import RankGroups
from tests.support.training_runs import NO_EVALUATION, TINY, losses, tiny_spec, train
from txl_dist.checkpoint.directory import CheckpointDirectory
from txl_dist.checkpoint.manifest import load_checkpoint_manifest

pytestmark = pytest.mark.fault
SETTINGS = (NO_EVALUATION, "training.checkpoint_interval_steps=5", "training.keep_checkpoints=9")


def is_stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


@pytest.mark.fault_row(35, 36)
def test_the_older_attempt_stops_at_its_next_save_and_the_newer_does_not_notice(
    ranks: RankGroups, dataset: Path, tmp_path: Path
) -> None:
    straight, run = tmp_path / "straight", tmp_path / "run"
    assert ranks(1).run(train, tiny_spec(dataset, straight, *SETTINGS)) == [0]
    words = ("train", TINY, f"data.path={dataset}", f"directory={run}", *SETTINGS)

    def stopped_at(call: int) -> tuple[int, subprocess.Popen[str]]:
        """Start an attempt, whose rank is suspended when it begins its step number `call`."""
        # The step before it is slow: until its end the background thread has published its save.
        environment = {"TXL_FAULT": f"step:sleep=3:{call - 1},step:stop:{call}"}
        process = start_txl(*words, "--on", "processes", environment=environment)
        wait_until(lambda: any(map(is_stopped, children_of(process.pid))))
        (rank,) = filter(is_stopped, children_of(process.pid))
        return rank, process

    older_rank, older = stopped_at(13)
    # As on another host of a network file system without locks: the second attempt opens another
    # file than the one that the first has locked.
    (run / "lock").unlink()
    newer_rank, newer = stopped_at(7)  # it has resumed after step 10, and saved step 15
    checkpoints = CheckpointDirectory(run)
    assert checkpoints.steps() == [5, 10, 15]
    saved = (checkpoints.at(15) / "manifest.json").read_bytes()

    os.kill(older_rank, signal.SIGCONT)
    output, _ = older.communicate(timeout=120)
    assert older.returncode == 4, output
    host = os.uname().nodename
    assert f"FencedError: this process, attempt 1 (host {host}, pid {older_rank}, " in output
    assert f"was replaced: attempt 2 (host {host}, pid {newer_rank}, " in output
    assert "took over this run" in output
    assert (checkpoints.at(15) / "manifest.json").read_bytes() == saved
    assert checkpoints.pointer("LATEST") == 15

    os.kill(newer_rank, signal.SIGCONT)
    output, _ = newer.communicate(timeout=120)
    assert newer.returncode == 0, output
    assert losses(run) == losses(straight)
    attempts = [load_checkpoint_manifest(checkpoints.at(step)).attempt for step in (5, 10, 15, 20)]
    assert attempts == [1, 1, 2, 2]
    assert checkpoints.steps() == [5, 10, 15, 20]
    assert not list(checkpoints.path.glob(".*.tmp"))
    assert checkpoints.pointer("LATEST") == 20


def test_a_start_that_is_refused_does_not_stop_the_run(
    ranks: RankGroups, dataset: Path, tmp_path: Path
) -> None:
    spec = tiny_spec(dataset, tmp_path, *SETTINGS, "training.num_steps=10")
    assert ranks(1).run(train, spec) == [0]
    recorded = sorted(path.name for path in (tmp_path / "attempts").iterdir())
    other = tiny_spec(dataset, tmp_path, *SETTINGS, "model.d_inner=24")
    assert ranks(1).run(train, other) == [4]
    never = tiny_spec(dataset, tmp_path, *SETTINGS, resume="never")
    assert ranks(1).run(train, never) == [2]
    assert sorted(path.name for path in (tmp_path / "attempts").iterdir()) == recorded
