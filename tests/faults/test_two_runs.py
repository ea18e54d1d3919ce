"""Two runs at the same time, on one machine or in one directory, and after a kill.

Also where the lock does not exclude the second one: both train, until the older one saves.
"""

import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.commands import (
    children_of,
    is_alive,
    num_lines,
    output_of,
    start_txl,
    txl,
    wait_until,
)
from tests.support.training_runs import NO_EVALUATION, TinyRuns, losses, train, train_words
from txl_dist.checkpoint.directory import CheckpointDirectory
from txl_dist.checkpoint.manifest import load_checkpoint_manifest

pytestmark = pytest.mark.fault
LONG = (NO_EVALUATION, "training.num_steps=50000", "training.checkpoint_interval_steps=20")
SETTINGS = (NO_EVALUATION, "training.checkpoint_interval_steps=5", "training.keep_checkpoints=9")


@pytest.mark.fault_row(37)
def test_runs_on_one_machine_do_not_take_each_others_port(dataset: Path, tmp_path: Path) -> None:
    runs = [tmp_path / name for name in ("one", "two")]
    processes = [start_txl(*train_words(dataset, run, NO_EVALUATION)) for run in runs]
    for process in processes:
        output_of(process, 0, timeout_seconds=120)
    assert losses(runs[0]) == losses(runs[1])


@pytest.mark.fault_row(35, 36)
def test_the_directory_of_a_living_run_is_refused_and_that_of_a_killed_one_is_not(
    dataset: Path, tmp_path: Path
) -> None:
    first = start_txl(*train_words(dataset, tmp_path, *LONG))
    wait_until(lambda: num_lines(tmp_path / "metrics.jsonl") > 25)
    ranks = children_of(first.pid)

    second = txl(*train_words(dataset, tmp_path, *LONG))
    assert second.returncode == 2
    assert "in use by another run (host " in second.stderr
    assert "UTC)" in second.stderr, "since when"
    lines = num_lines(tmp_path / "metrics.jsonl")
    wait_until(lambda: num_lines(tmp_path / "metrics.jsonl") > lines)

    for pid in (first.pid, *ranks):
        os.kill(pid, signal.SIGKILL)
    first.communicate(timeout=60)
    wait_until(lambda: not any(is_alive(rank) for rank in ranks), timeout_seconds=30)
    third = start_txl(*train_words(dataset, tmp_path, *LONG, num_ranks=1))
    wait_until(lambda: "resuming at step" in log_of(tmp_path))
    third.send_signal(signal.SIGTERM)
    output_of(third, 75, timeout_seconds=120)


def log_of(run: Path) -> str:
    return (run / "logs" / "rank-0.log").read_text()


def is_stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


@pytest.mark.fault_row(35, 36)
def test_after_a_forced_start_the_older_attempt_stops_at_its_next_save(
    straight: Callable[..., Path], dataset: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    words = train_words(dataset, run, *SETTINGS, num_ranks=1)

    def stopped_at(call: int, *options: str) -> tuple[int, subprocess.Popen[str]]:
        """Start an attempt, whose rank is suspended when it begins its step number `call`."""
        # The step before it is slow: until its end the background thread has published its save.
        environment = {"TXL_FAULT": f"step:sleep=3:{call - 1},step:stop:{call}"}
        process = start_txl(*words, *options, environment=environment)
        wait_until(lambda: any(map(is_stopped, children_of(process.pid))))
        (rank,) = filter(is_stopped, children_of(process.pid))
        return rank, process

    older_rank, older = stopped_at(13)
    # As that of a host that does not respond, the older rank keeps its lock.
    newer_rank, newer = stopped_at(7, "--force-unlock")  # resumed after step 10, saved step 15
    checkpoints = CheckpointDirectory(run)
    assert checkpoints.steps() == [5, 10, 15]
    saved = (checkpoints.at(15) / "manifest.json").read_bytes()

    os.kill(older_rank, signal.SIGCONT)
    output = output_of(older, 4, timeout_seconds=120)
    host = os.uname().nodename
    assert f"FencedError: this process, attempt 1 (host {host}, pid {older_rank}, " in output
    assert f"was replaced: attempt 2 (host {host}, pid {newer_rank}, " in output
    assert "took over this run" in output
    assert (checkpoints.at(15) / "manifest.json").read_bytes() == saved
    assert checkpoints.pointer("LATEST") == 15

    os.kill(newer_rank, signal.SIGCONT)
    output = output_of(newer, 0, timeout_seconds=120)
    assert "continued by --force-unlock" in output
    assert losses(run) == losses(straight(*SETTINGS, num_ranks=1))
    attempts = [load_checkpoint_manifest(checkpoints.at(step)).attempt for step in (5, 10, 15, 20)]
    assert attempts == [1, 1, 2, 2]
    assert checkpoints.steps() == [5, 10, 15, 20]
    assert not list(checkpoints.path.glob(".*.tmp"))
    assert checkpoints.pointer("LATEST") == 20


def test_a_start_that_is_refused_does_not_stop_the_run(tiny: TinyRuns) -> None:
    tiny.trained(tiny.path, *SETTINGS, "training.num_steps=10", num_ranks=1)
    recorded = sorted(path.name for path in (tiny.path / "attempts").iterdir())
    other = tiny.spec(tiny.path, *SETTINGS, "model.d_inner=24")
    assert tiny.ranks(1).run(train, other) == [4]
    never = tiny.spec(tiny.path, *SETTINGS, resume="never")
    assert tiny.ranks(1).run(train, never) == [2]
    assert sorted(path.name for path in (tiny.path / "attempts").iterdir()) == recorded
