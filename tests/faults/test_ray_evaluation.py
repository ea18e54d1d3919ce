"""Evaluation and preparation on Ray: lost workers and nodes, busy clusters, stop signals."""

import json
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.faults.test_evaluation_kills import expected, finished, model, nats, words  # noqa: F401
from tests.support.commands import start_txl, txl, wait_until
from tests.support.nodes import ray_node, token_environment

pytestmark = pytest.mark.fault
SOON_SECONDS = 20  # generous: seconds where the machine is quiet


def actors(pid: int) -> list[psutil.Process]:
    """The workers of Ray below a process."""
    try:
        children = psutil.Process(pid).children(recursive=True)
        return [child for child in children if "ray::Worker" in " ".join(child.cmdline())]
    except psutil.Error:  # one of them has just ended
        return []


@pytest.mark.fault_row(49)
def test_the_chunks_of_a_killed_worker_are_scored_by_another(
    model: Path,  # noqa: F811
    dataset: Path,
    tmp_path: Path,
    expected: float,  # noqa: F811
) -> None:
    process = start_txl(*words(model, dataset, tmp_path, "--workers", 2, "--on", "ray"))
    wait_until(lambda: finished(tmp_path) > 2)
    victim = actors(process.pid)[0].pid
    os.kill(victim, signal.SIGKILL)
    output, _ = process.communicate(timeout=150)
    assert process.returncode == 0, output
    assert nats(output) == expected
    (line,) = [line for line in output.splitlines() if "died" in line]
    assert f"pid {victim} died while it worked on chunks" in line
    assert "raylet" not in output


def large_corpus(directory: Path) -> Path:
    """240 MB of text, so that the workers of a preparation live for some seconds."""
    corpus = directory / "corpus"
    corpus.mkdir()
    text = Path(__file__).read_text()
    for number in range(40):
        (corpus / f"{number}.txt").write_text(f"{number}\n" + text * (6_000_000 // len(text)))
    return corpus


@pytest.mark.fault_row(3, 49)
def test_chunks_and_units_of_a_lost_node_are_done_on_the_others(
    model: Path,  # noqa: F811
    dataset: Path,
    tmp_path: Path,
    expected: float,  # noqa: F811
) -> None:
    environment = token_environment(tmp_path)
    prepare = ("prepare", large_corpus(tmp_path), "--format", "text", "--shard-size", 16)
    assert txl(*prepare, "--out", tmp_path / "here").returncode == 0
    with ray_node(tmp_path) as head:
        on = ("--workers", 2, "--on", head.address)
        for command in ("eval", "prepare"):
            out = tmp_path / command
            with ray_node(tmp_path, join=head.address) as node:
                if command == "eval":
                    process = start_txl(*words(model, dataset, out, *on), environment=environment)
                    wait_until(lambda: finished(out) > 3)  # noqa: B023
                else:
                    process = start_txl(*prepare, "--out", out, *on, environment=environment)
                    wait_until(lambda: bool(actors(node.process.pid)))
                node.kill()
                output, _ = process.communicate(timeout=150)
            assert process.returncode == 0, output
            assert "Traceback" not in output
            if command == "eval":
                assert nats(output) == expected
    contents = [
        {path.name: path.read_bytes() for path in (tmp_path / name).iterdir()}
        for name in ("here", "prepare")
    ]
    assert contents[0] == contents[1]


@pytest.mark.fault_row(41)
def test_a_busy_cluster_is_named_and_a_stop_leaves_no_worker_there(
    model: Path,  # noqa: F811
    dataset: Path,
    tmp_path: Path,
) -> None:
    environment = token_environment(tmp_path)
    scores = (tmp_path / "first", tmp_path / "second")
    with ray_node(tmp_path) as head:
        on = ("--on", head.address)
        first = start_txl(*words(model, dataset, scores[0], *on), environment=environment)
        wait_until(lambda: finished(scores[0]) > 0)
        (worker,) = actors(head.process.pid)
        worker.suspend()  # else it may have finished before the second one asks for its CPU
        second = start_txl(*words(model, dataset, scores[1], *on), environment=environment)
        assert second.stdout is not None
        line = next(line for line in second.stdout if "CPU" in line)
        assert line.startswith("waiting ")
        assert "1 worker needs one, the cluster has 1, of which 0 are free" in line
        worker.resume()
        for process, scores_of in ((second, scores[1]), (first, scores[0])):
            process.send_signal(signal.SIGINT)
            output, _ = process.communicate(timeout=SOON_SECONDS)
            assert process.returncode == 75, output
            assert f"{scores_of}: run the same command with --resume" in output
        wait_until(lambda: not actors(head.process.pid), timeout_seconds=10)


@pytest.fixture
def temporary() -> Iterator[Path]:
    """A TMPDIR for Ray with a short path, because the paths of its sockets are limited."""
    directory = Path(tempfile.mkdtemp(prefix="txl-", dir="/tmp"))
    yield directory
    shutil.rmtree(directory, ignore_errors=True)


@pytest.mark.fault_row(41)
@pytest.mark.parametrize(
    ("number", "sign"),
    [
        (signal.SIGINT, "gcs_server"),  # Ray's first process
        (signal.SIGTERM, "raylet/raylet"),
        (signal.SIGINT, "ray::Worker"),
    ],
)
def test_a_stop_while_ray_starts_or_works_ends_soon_and_leaves_nothing(
    model: Path,  # noqa: F811
    dataset: Path,
    tmp_path: Path,
    temporary: Path,
    number: int,
    sign: str,
) -> None:
    process = start_txl(
        *words(model, dataset, tmp_path, "--workers", 2, "--on", "ray"),
        environment={"TMPDIR": str(temporary)},
        own_group=True,
    )
    wait_until(lambda: has_child(process, sign))
    children = psutil.Process(process.pid).children(recursive=True)
    os.killpg(process.pid, number)
    output, _ = process.communicate(timeout=2 * SOON_SECONDS)
    assert process.returncode == 75, output
    assert output.splitlines()[-1].startswith("stopped on request"), output
    assert "Traceback" not in output
    _, alive = psutil.wait_procs(children, timeout=10)
    assert not alive


def has_child(process: "subprocess.Popen[str]", word: str) -> bool:
    try:
        children = psutil.Process(process.pid).children(recursive=True)
        return any(word in " ".join(child.cmdline()) for child in children)
    except psutil.Error:  # one of them has just ended
        return False


def test_a_lost_head_ends_the_evaluation_and_resume_goes_on(
    model: Path,  # noqa: F811
    dataset: Path,
    tmp_path: Path,
    expected: float,  # noqa: F811
) -> None:
    environment, scores = token_environment(tmp_path), tmp_path / "scores"
    with ray_node(tmp_path) as head:
        process = start_txl(
            *words(model, dataset, scores, "--on", head.address), environment=environment
        )
        wait_until(lambda: finished(scores) > 1)
        head.kill()
        output, _ = process.communicate(timeout=120)
    assert process.returncode == 1, output
    assert "the head of the Ray cluster at" in output.splitlines()[-1], output
    ended = txl(*words(model, dataset, scores, "--resume"))
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout)
    assert nats(ended.stdout) == expected
