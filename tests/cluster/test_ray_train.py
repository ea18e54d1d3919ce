"""Training on Ray: the same losses as plain processes; a killed rank, a stop signal."""

import os
import re
import signal
from pathlib import Path

import psutil
import pytest

from tests.support.commands import num_lines, start_txl, wait_until
from tests.support.gloo_ranks import RankGroups
from tests.support.training_runs import NO_EVALUATION, TINY, losses, tiny_spec, train

NUM_STEPS = 400
LONG = (NO_EVALUATION, f"training.num_steps={NUM_STEPS}", "training.checkpoint_interval_steps=50")


def test_a_run_on_ray_has_the_losses_of_plain_processes(
    ranks: RankGroups, dataset: Path, trained: Path, tmp_path: Path
) -> None:
    assert ranks(2).run(train, tiny_spec(dataset, tmp_path)) == [0, 0]
    assert losses(trained) == losses(tmp_path)


@pytest.mark.fault_row(1)
@pytest.mark.fault
def test_a_killed_rank_is_restarted_with_the_same_losses(
    ranks: RankGroups, dataset: Path, tmp_path: Path
) -> None:
    straight, run = tmp_path / "straight", tmp_path / "run"
    assert ranks(2).run(train, tiny_spec(dataset, straight, *LONG)) == [0, 0]
    overrides = (f"data.path={dataset}", f"directory={run}", *LONG)
    process = start_txl("train", TINY, *overrides, "--ranks", 2)
    wait_until(lambda: num_lines(run / "metrics.jsonl") > 80)
    (victim, *_) = [
        child
        for child in psutil.Process(process.pid).children(recursive=True)
        if "ray::RankActor" in " ".join(child.cmdline())
    ]
    os.kill(victim.pid, signal.SIGKILL)
    output, _ = process.communicate(timeout=180)
    assert process.returncode == 0, output
    assert "resuming at step" in output
    assert re.search(r"rank [01] \(node 127\.0\.0\.1, pid \d+\).* died; restart 1 ", output)
    assert "Traceback" not in output
    assert losses(run) == losses(straight)


@pytest.mark.fault_row(5)
@pytest.mark.fault
def test_sigterm_to_every_process_saves_and_exits_75_and_leaves_no_process(
    dataset: Path, tmp_path: Path
) -> None:
    """Kubernetes, Slurm and systemd signal the whole job: launcher, Ray and ranks."""
    overrides = (f"data.path={dataset}", f"directory={tmp_path}", *LONG)
    process = start_txl("train", TINY, *overrides, "--ranks", 2)
    wait_until(lambda: num_lines(tmp_path / "metrics.jsonl") > 20)
    children = psutil.Process(process.pid).children(recursive=True)
    for pid in (process.pid, *(child.pid for child in children)):
        os.kill(pid, signal.SIGTERM)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 75, output
    assert "stopping after this step, then saving" in output
    assert "SIGTERM received" not in output
    stopped_at = max(losses(tmp_path))
    assert (tmp_path / "checkpoints" / f"step-{stopped_at:08d}" / "manifest.json").exists()
    _, alive = psutil.wait_procs(children, timeout=15)
    assert not alive
