"""Stop signals under `--on ray`, while Ray starts and while the ranks wait for resources."""

import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.support.commands import num_lines, start_txl, wait_until
from tests.support.nodes import ray_node, token_environment
from tests.support.training_runs import NO_EVALUATION, TINY

pytestmark = pytest.mark.fault
SOON_SECONDS = 20  # generous: seconds where the machine is quiet


def has_child(pid: int, word: str) -> bool:
    """Whether a process of that command runs below `pid`."""
    try:
        children = psutil.Process(pid).children(recursive=True)
        return any(word in " ".join(child.cmdline()) for child in children)
    except psutil.Error:  # one of them has just ended
        return False


def stop(process: subprocess.Popen[str], number: int) -> float:
    """Send a signal to `process`; how long it took to end."""
    begin = time.monotonic()
    process.send_signal(number)
    process.wait(timeout=90)
    return time.monotonic() - begin


@pytest.fixture
def temporary() -> Iterator[Path]:
    """A TMPDIR for Ray with a short path, because the paths of its sockets are limited."""
    directory = Path(tempfile.mkdtemp(prefix="txl-", dir="/tmp"))
    yield directory
    shutil.rmtree(directory, ignore_errors=True)


@pytest.mark.parametrize(
    ("number", "sign"),
    [
        (signal.SIGTERM, "gcs_server"),  # Ray's first process
        (signal.SIGINT, "raylet/raylet"),
        (signal.SIGUSR1, "dashboard/dashboard.py"),
    ],
)
def test_a_stop_while_ray_starts_ends_soon_with_75_and_leaves_nothing(
    number: int, sign: str, dataset: Path, tmp_path: Path, temporary: Path
) -> None:
    overrides = (f"data.path={dataset}", f"directory={tmp_path / 'run'}", NO_EVALUATION)
    environment = {"TMPDIR": str(temporary)}
    process = start_txl("train", TINY, *overrides, "--ranks", 2, environment=environment)
    wait_until(lambda: has_child(process.pid, sign))
    children = psutil.Process(process.pid).children(recursive=True)
    seconds = stop(process, number)
    assert process.stdout is not None
    output = process.stdout.read()
    assert process.returncode == 75, output
    assert seconds < SOON_SECONDS
    assert "stopping: no rank is training" in output
    assert "Traceback" not in output
    _, alive = psutil.wait_procs(children, timeout=SOON_SECONDS)
    assert not alive


def test_a_stop_while_the_ranks_start_ends_them_before_their_first_step(
    dataset: Path, tmp_path: Path
) -> None:
    overrides = (f"data.path={dataset}", f"directory={tmp_path}", NO_EVALUATION)
    process = start_txl("train", TINY, *overrides, "--ranks", 2)
    wait_until((tmp_path / "logs" / "rank-0.log").exists)
    children = psutil.Process(process.pid).children(recursive=True)
    seconds = stop(process, signal.SIGTERM)
    assert process.stdout is not None
    output = process.stdout.read()
    assert process.returncode == 75, output
    assert seconds < SOON_SECONDS
    assert "before the first step; nothing is lost" in output
    assert num_lines(tmp_path / "metrics.jsonl") == 0
    _, alive = psutil.wait_procs(children, timeout=SOON_SECONDS)
    assert not alive


@pytest.fixture(scope="module")
def one_cpu(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, dict[str, str]]]:
    """Address of a cluster with one CPU, and the environment that reaches it."""
    directory = tmp_path_factory.mktemp("cluster")
    with ray_node(directory, num_cpus=1) as head:
        yield head.address, token_environment(directory)


def test_a_run_without_resources_prints_what_it_waits_for_and_can_be_stopped(
    one_cpu: tuple[str, dict[str, str]], dataset: Path, tmp_path: Path
) -> None:
    address, environment = one_cpu
    overrides = (f"data.path={dataset}", f"directory={tmp_path}", NO_EVALUATION, "--on", address)
    process = start_txl("train", TINY, *overrides, "--ranks", 2, environment=environment)
    message = "for CPUs: 2 ranks need one each, the cluster has 1, of which 1 are free"
    lines = read_until(process, message)
    assert any(line.startswith("waiting ") for line in lines)
    assert stop(process, signal.SIGINT) < SOON_SECONDS
    assert process.returncode == 75


def test_a_run_without_resources_ends_after_the_time_limit_with_the_reason(
    one_cpu: tuple[str, dict[str, str]], dataset: Path, tmp_path: Path
) -> None:
    address, environment = one_cpu
    overrides = (f"data.path={dataset}", f"directory={tmp_path}", "ray.start_timeout_seconds=25")
    process = start_txl(
        *("train", TINY, *overrides, "--ranks", 2, "--on", address), environment=environment
    )
    output, _ = process.communicate(timeout=90)
    assert process.returncode == 1, output
    assert "the ranks did not start within 25 s (ray.start_timeout_seconds)" in output
    assert "CPUs: 2 ranks need one each" in output.splitlines()[-1]


def read_until(process: subprocess.Popen[str], text: str) -> list[str]:
    """The lines of a process up to the first with `text`; AssertionError if it ends before."""
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line)
        if text in line:
            return lines
    raise AssertionError("".join(lines))
