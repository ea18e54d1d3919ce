"""The driver of a job: output, exit codes, no orphans."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.commands import ENVIRONMENT, children_of, is_alive, wait_until
from tests.support.training_runs import TINY

ROOT = TINY.parents[1]


def start(*words: object) -> subprocess.Popen[str]:
    """The driver as Ray starts it, in a package: here that is the source tree."""
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "cluster.job_driver", *map(str, words)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=ROOT,
        env={**ENVIRONMENT, "PYTHONPATH": str(ROOT)},
    )


def test_output_and_exit_code_of_the_command(tmp_path: Path) -> None:
    driver = start("--root", tmp_path, "--", "prepare", "--unknown")
    output, _ = driver.communicate(timeout=60)
    assert driver.returncode == 2, output
    *lines, last = output.splitlines()
    assert "No such option: --unknown" in lines[-1]
    assert last == "txl job: exit code 2"


def test_a_root_that_the_cluster_does_not_have_is_a_config_error(tmp_path: Path) -> None:
    driver = start("--root", tmp_path / "missing", "--", "eval", "a", "b")
    output, _ = driver.communicate(timeout=60)
    assert driver.returncode == 2
    assert "txl job submit --root DIR" in output


@pytest.mark.fault
@pytest.mark.fault_row(2, 41)
def test_the_command_ends_with_its_driver_and_outlives_a_stop_signal_to_it(
    dataset: Path, tmp_path: Path
) -> None:
    settings = (f"data.path={dataset}", "directory=run", "training.num_steps=100000")
    words = ("train", "configs/tiny.yaml", "--on", "processes", *settings, "evaluation.split=null")
    driver = start("--root", tmp_path, "--", *words)
    try:
        wait_until((tmp_path / "run/metrics.jsonl").exists)
        (command,) = children_of(driver.pid)
        driver.send_signal(signal.SIGTERM)  # Ray sends it to the command too; here nobody does
        time.sleep(0.3)
        assert driver.poll() is None
        assert is_alive(command)
    finally:
        driver.kill()
    wait_until(lambda: not is_alive(command), timeout_seconds=30)
    driver.communicate()
