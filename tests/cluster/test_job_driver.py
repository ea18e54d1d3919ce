"""The driver of a job: a copy of the output, exit codes, lines of failed ranks, no orphans."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cluster.job_driver import failed_rank_lines
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
    log = tmp_path / "run/logs/driver.log"
    driver = start("--root", tmp_path, "--log", log, "--", "prepare", "--unknown")
    output, _ = driver.communicate(timeout=60)
    assert driver.returncode == 2, output
    *lines, last = output.splitlines()
    assert "No such option: --unknown" in lines[-1]
    assert last == "txl job: exit code 2"
    header, *copied = log.read_text().splitlines()
    assert header.endswith("prepare --unknown")
    assert copied == lines


def test_a_full_disk_costs_only_the_copy_of_the_output(tmp_path: Path) -> None:
    driver = start("--root", tmp_path, "--log", "/dev/full", "--", "prepare", "--unknown")
    output, _ = driver.communicate(timeout=60)
    assert driver.returncode == 2, output
    assert "Traceback" not in output
    assert output.splitlines()[-1] == "txl job: exit code 2"


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


def test_the_last_lines_of_the_ranks_that_an_error_names(tmp_path: Path) -> None:
    now = time.time()
    for rank in range(4):
        lines = [f"rank {rank} line {number}" for number in range(30)]
        (tmp_path / f"rank-{rank}.log").write_text("\n".join([*lines, "api_key=CANARY"]))
    os.utime(tmp_path / "rank-3.log", (now - 99, now - 99))
    error = "TxlError: rank 2 (node a, pid 1) and rank 1 died, rank 3 not, rank 7 is unknown"
    lines = failed_rank_lines(tmp_path, error, since=now - 9)
    assert lines[0] == f"--- last lines of {tmp_path / 'rank-2.log'}"
    assert "rank 2 line 29" in lines
    assert "rank 2 line 9" not in lines
    assert "rank 1 line 29" in lines
    assert not any("rank 3" in line or "rank 0" in line or "CANARY" in line for line in lines)
    assert failed_rank_lines(tmp_path, "DataError: no rank here", since=0) == []
