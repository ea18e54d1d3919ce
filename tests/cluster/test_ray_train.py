"""Training on Ray: the same losses as plain processes; a killed rank, a stop signal."""

import os
import re
import signal
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.support.commands import num_lines, output_of, start_txl, wait_until
from tests.support.training_runs import NO_EVALUATION, losses, saved_last_step, train_words

NUM_STEPS = 400
LONG = (NO_EVALUATION, f"training.num_steps={NUM_STEPS}", "training.checkpoint_interval_steps=50")


def test_a_run_on_ray_has_the_losses_of_plain_processes(
    straight: Callable[..., Path], trained: Path
) -> None:
    assert losses(trained) == losses(straight())


@pytest.mark.fault_row(1)
@pytest.mark.fault
def test_a_killed_rank_is_restarted_with_the_same_losses(
    straight: Callable[..., Path], dataset: Path, tmp_path: Path
) -> None:
    process = start_txl(*train_words(dataset, tmp_path, *LONG, on="ray"))
    wait_until(lambda: num_lines(tmp_path / "metrics.jsonl") > 80)
    (victim, *_) = [
        child
        for child in psutil.Process(process.pid).children(recursive=True)
        if "ray::RankActor" in " ".join(child.cmdline())
    ]
    os.kill(victim.pid, signal.SIGKILL)
    output = output_of(process, 0, timeout_seconds=180)
    assert "resuming at step" in output
    assert re.search(r"rank [01] \(node 127\.0\.0\.1, pid \d+\).* died; restart 1 ", output)
    assert "Traceback" not in output
    assert losses(tmp_path) == losses(straight(*LONG))


@pytest.mark.fault_row(5)
@pytest.mark.fault
def test_sigterm_to_every_process_saves_and_exits_75_and_leaves_no_process(
    dataset: Path, tmp_path: Path
) -> None:
    """Kubernetes, Slurm and systemd signal the whole job: launcher, Ray and ranks."""
    words = train_words(dataset, tmp_path, *LONG)[:-4]  # Ray is the default of --on
    process = start_txl(*words, "--ranks", 2)
    wait_until(lambda: num_lines(tmp_path / "metrics.jsonl") > 20)
    children = psutil.Process(process.pid).children(recursive=True)
    for pid in (process.pid, *(child.pid for child in children)):
        os.kill(pid, signal.SIGTERM)
    output = output_of(process, 75, timeout_seconds=60)
    assert "stopping after this step, then saving" in output
    assert "SIGTERM received" not in output
    saved_last_step(tmp_path)
    assert not psutil.wait_procs(children, timeout=15)[1]
