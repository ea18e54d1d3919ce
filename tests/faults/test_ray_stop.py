"""Stop signals under `--on ray`, while Ray starts and while workers start or wait for resources."""

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.faults.test_evaluation_kills import words
from tests.support.commands import num_lines, output_of, start_txl, wait_until
from tests.support.nodes import ray_node, token_environment
from tests.support.training_runs import NO_EVALUATION, train_words

pytestmark = pytest.mark.fault
SOON_SECONDS = 20  # generous: seconds where the machine is quiet


def has_child(pid: int, word: str) -> bool:
    try:
        children = psutil.Process(pid).children(recursive=True)
        return any(word in " ".join(child.cmdline()) for child in children)
    except psutil.Error:  # one of them has just ended
        return False


def stop(process: subprocess.Popen[str], number: int, *, group: bool = False) -> str:
    """Signal a command, or its group; what it printed. Nothing that it has started may be left."""
    children = psutil.Process(process.pid).children(recursive=True)
    began = time.monotonic()
    (os.killpg if group else os.kill)(process.pid, number)
    output = output_of(process, 75, timeout_seconds=90)
    assert time.monotonic() - began < SOON_SECONDS
    assert "Traceback" not in output
    assert not psutil.wait_procs(children, timeout=SOON_SECONDS)[1]
    return output


@pytest.mark.fault_row(41)
@pytest.mark.parametrize(
    ("command", "number", "sign"),
    [
        ("train", signal.SIGTERM, "gcs_server"),  # Ray's first process
        ("train", signal.SIGINT, "raylet/raylet"),
        ("train", signal.SIGUSR1, "dashboard/dashboard.py"),
        ("eval", signal.SIGINT, "gcs_server"),
        ("eval", signal.SIGTERM, "raylet/raylet"),
        ("eval", signal.SIGINT, "ray::Worker"),
    ],
)
def test_a_stop_while_ray_starts_or_works_ends_soon_with_75_and_leaves_nothing(
    model: Path,
    dataset: Path,
    tmp_path: Path,
    short_folder: Path,
    command: str,
    number: int,
    sign: str,
) -> None:
    """Of an evaluation, the whole process group gets it, as from Ctrl-C."""
    is_group = command == "eval"
    process = start_txl(
        *(
            words(model, dataset, tmp_path, "--workers", 2, "--on", "ray")
            if is_group
            else train_words(dataset, tmp_path, NO_EVALUATION, on="ray")
        ),
        environment={"TMPDIR": str(short_folder)},
        own_group=is_group,
    )
    wait_until(lambda: has_child(process.pid, sign))
    output = stop(process, number, group=is_group)
    if is_group:
        assert output.splitlines()[-1].startswith("stopped on request"), output
    else:
        assert "stopping: no rank is training" in output


def test_a_stop_while_the_ranks_start_ends_them_before_their_first_step(
    dataset: Path, tmp_path: Path
) -> None:
    # Ranks look for a stop request once a second, in which a fast machine begins to train.
    environment = {"TXL_FAULT": "engine:sleep=3"}
    command = train_words(dataset, tmp_path, NO_EVALUATION, on="ray")
    process = start_txl(*command, environment=environment)
    wait_until((tmp_path / "logs" / "rank-0.log").exists)
    output = stop(process, signal.SIGTERM)
    assert "before the first step; nothing is lost" in output
    assert num_lines(tmp_path / "metrics.jsonl") == 0


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
    process = start_txl(
        *train_words(dataset, tmp_path, NO_EVALUATION, on=address), environment=environment
    )
    assert process.stdout is not None
    message = "for CPUs: 2 ranks need one each, the cluster has 1, of which 1 are free"
    line = next(line for line in process.stdout if message in line)
    assert line.startswith("waiting ")
    stop(process, signal.SIGINT)


def test_a_run_without_resources_ends_after_the_time_limit_with_the_reason(
    one_cpu: tuple[str, dict[str, str]], dataset: Path, tmp_path: Path
) -> None:
    address, environment = one_cpu
    limit = "ray.start_timeout_seconds=25"
    process = start_txl(*train_words(dataset, tmp_path, limit, on=address), environment=environment)
    output = output_of(process, 1, timeout_seconds=90)
    assert "the ranks did not start within 25 s (ray.start_timeout_seconds)" in output
    assert "CPUs: 2 ranks need one each" in output.splitlines()[-1]
