"""Processes end with their launcher.

Ctrl-C at a terminal reaches the whole process group: 10 s later no process is left. After a SIGKILL
of a launcher that has started Ray, Ray's processes end by themselves within about a minute.
"""

import os
import signal
from pathlib import Path

import psutil
import pytest

from tests.support.commands import num_lines, start_txl, wait_until
from tests.support.training_runs import NO_EVALUATION, TINY

pytestmark = pytest.mark.fault


@pytest.mark.fault_row(41)
@pytest.mark.parametrize("num_presses", [1, 2])
def test_nothing_is_left_running_after_ctrl_c(
    dataset: Path, tmp_path: Path, num_presses: int
) -> None:
    overrides = (f"data.path={dataset}", f"directory={tmp_path}", NO_EVALUATION)
    words = ("train", TINY, *overrides, "training.num_steps=100000")
    process = start_txl(*words, "--on", "processes", "--ranks", 2, own_group=True)
    wait_until(lambda: num_lines(tmp_path / "metrics.jsonl") > 20)
    children = psutil.Process(process.pid).children(recursive=True)
    assert len(children) >= 2
    for _ in range(num_presses):
        os.killpg(process.pid, signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == 75
    _, alive = psutil.wait_procs(children, timeout=10)
    assert not alive


@pytest.mark.fault_row(2, 41)
def test_the_processes_of_a_private_ray_end_after_a_kill_of_the_launcher(
    dataset: Path, tmp_path: Path
) -> None:
    overrides = (f"data.path={dataset}", f"directory={tmp_path}", NO_EVALUATION)
    words = ("train", TINY, *overrides, "training.num_steps=100000")
    process = start_txl(*words, "--on", "ray", "--ranks", 2)
    wait_until(lambda: num_lines(tmp_path / "metrics.jsonl") > 20)
    children = psutil.Process(process.pid).children(recursive=True)
    assert any("raylet" in child.name() for child in children)
    process.kill()
    process.communicate(timeout=60)
    _, alive = psutil.wait_procs(children, timeout=150)
    assert not alive
