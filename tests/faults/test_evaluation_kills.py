"""Evaluations whose workers or command are killed: the score of one that was not, to the last bit.

The workers are child processes here; `tests/faults/test_ray_evaluation.py` has those of Ray.
"""

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.support.commands import num_lines, start_txl, txl, wait_until
from tests.support.exported_model import export_small_model

pytestmark = pytest.mark.fault


@pytest.fixture(scope="module")
def model(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export_small_model(tmp_path_factory.mktemp("model") / "small", dataset)


def words(model: Path, dataset: Path, scores: Path, *others: object) -> tuple[object, ...]:
    """16 batches, each of a fraction of a second."""
    options = ("--batch", 1, "--tgt-len", 6, "--on", "processes", "--json")
    return ("eval", model, dataset, "--out", scores, *options, *others)


def finished(scores: Path) -> int:
    """Finished batches in the files of a directory."""
    return sum(num_lines(path) - 1 for path in scores.glob("*.jsonl"))


def nats(output: str) -> float:
    score: float = json.loads(output.splitlines()[-1])["nats"]
    return score


@pytest.fixture(scope="module")
def expected(model: Path, dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> float:
    ended = txl(*words(model, dataset, tmp_path_factory.mktemp("scores")))
    assert ended.returncode == 0, ended.stderr
    return nats(ended.stdout)


@pytest.mark.fault_row(49)
@pytest.mark.parametrize("num_workers", [1, 2])
def test_a_killed_evaluation_is_resumed_with_the_same_result(
    model: Path, dataset: Path, tmp_path: Path, expected: float, num_workers: int
) -> None:
    command = words(model, dataset, tmp_path, "--workers", num_workers)
    process = start_txl(*command)
    wait_until(lambda: finished(tmp_path) > 3)
    children = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    process.communicate(timeout=30)
    num_finished = finished(tmp_path)
    _, alive = psutil.wait_procs(children, timeout=10)
    assert not alive
    ended = txl(*command, "--resume")
    assert ended.returncode == 0, ended.stderr
    assert f"resuming: {num_finished} of " in ended.stderr
    assert nats(ended.stdout) == expected


@pytest.mark.fault_row(49)
def test_the_batches_of_killed_workers_are_scored_by_others(
    model: Path, dataset: Path, tmp_path: Path, expected: float
) -> None:
    process = start_txl(*words(model, dataset, tmp_path, "--workers", 2))
    wait_until(lambda: finished(tmp_path) > 1)
    *_, first, second = psutil.Process(process.pid).children()
    first.kill()
    # Later, because the second worker may take over the batch of the first: a batch that kills two
    # workers ends the evaluation.
    num_batches = finished(tmp_path) + 3
    wait_until(lambda: finished(tmp_path) > num_batches)
    second.kill()
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output
    assert nats(output) == expected


@pytest.mark.fault_row(41)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stopped_evaluation_leaves_no_worker_and_says_how_to_continue(
    model: Path, dataset: Path, tmp_path: Path, expected: float, number: int
) -> None:
    command = words(model, dataset, tmp_path, "--workers", 2)
    process = start_txl(*command, own_group=True)
    wait_until(lambda: finished(tmp_path) > 1)
    children = psutil.Process(process.pid).children(recursive=True)
    assert len(children) >= 2
    os.killpg(process.pid, number)
    output, _ = process.communicate(timeout=30)
    assert process.returncode == 75, output
    assert "Traceback" not in output
    last = output.splitlines()[-1]
    assert last.startswith("stopped on request"), output
    assert f"{tmp_path}: run the same command with --resume" in last
    _, alive = psutil.wait_procs(children, timeout=10)
    assert not alive
    assert nats(txl(*command, "--resume").stdout) == expected


@pytest.mark.fault_row(49)
def test_a_batch_that_kills_its_workers_is_named(
    model: Path, dataset: Path, tmp_path: Path
) -> None:
    process = start_txl(*words(model, dataset, tmp_path, "--workers", 2))
    end = killer(process.pid)
    wait_until(end)
    output, _ = process.communicate(timeout=30)
    assert process.returncode == 1, output
    last = output.splitlines()[-1]
    assert last.startswith("TxlError: the worker for chunks "), output
    assert "died by SIGKILL, and so did a second one" in last
    assert "--resume and fewer --workers (now 2)" in last
    assert "Traceback" not in output


def killer(pid: int) -> Callable[[], bool]:
    """Call it until it is true: kills every worker of a command until the command has ended."""

    def kill() -> bool:
        try:
            parent = psutil.Process(pid)
            if parent.status() == psutil.STATUS_ZOMBIE:
                return True
            for child in parent.children():
                if "spawn_main" in " ".join(child.cmdline()):
                    child.kill()
        except psutil.NoSuchProcess:
            pass
        return False

    return kill
