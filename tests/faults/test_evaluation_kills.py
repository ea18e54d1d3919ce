"""Evaluations whose workers, nodes or command are lost: the score of one without, to the last bit.

Also the preparation of a dataset on a node of Ray that is lost, because its workers are the same.
"""

import json
import os
import signal
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.support.commands import num_lines, output_of, start_txl, txl, wait_until
from tests.support.nodes import ray_node, token_environment

pytestmark = pytest.mark.fault
SOON_SECONDS = 20  # generous: seconds where the machine is quiet


def words(model: Path, dataset: Path, scores: Path, *others: object) -> tuple[object, ...]:
    """16 batches, each of a fraction of a second."""
    options = ("--batch", 1, "--tgt-len", 6, "--on", "processes", "--json")
    return ("eval", model, dataset, "--out", scores, *options, *others)


def finished(scores: Path) -> int:
    return sum(num_lines(path) - 1 for path in scores.glob("*.jsonl"))


def workers_of(pid: int, on: str) -> list[psutil.Process]:
    sign = {"processes": "spawn_main", "ray": "ray::Worker"}[on]
    try:
        below = psutil.Process(pid).children(recursive=True)
        return [each for each in below if sign in " ".join(each.cmdline())]
    except psutil.Error:  # one of them has just ended
        return []


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
    assert not psutil.wait_procs(children, timeout=10)[1]
    ended = txl(*command, "--resume")
    assert ended.returncode == 0, ended.stderr
    assert f"resuming: {num_finished} of " in ended.stderr
    assert nats(ended.stdout) == expected


@pytest.mark.fault_row(49)
@pytest.mark.parametrize("on", ["processes", "ray"])
def test_the_batches_of_killed_workers_are_scored_by_others(
    model: Path, dataset: Path, tmp_path: Path, expected: float, on: str
) -> None:
    process = start_txl(*words(model, dataset, tmp_path, "--workers", 2, "--on", on))
    wait_until(lambda: finished(tmp_path) > 1)
    victims = workers_of(process.pid, on)
    for victim in victims:
        # Apart, because the second worker may take over the batch of the first: a batch that kills
        # two workers ends the evaluation.
        num_batches = finished(tmp_path) + 2
        wait_until(lambda: finished(tmp_path) > num_batches)  # noqa: B023
        victim.kill()
    output = output_of(process, 0, timeout_seconds=150)
    assert nats(output) == expected
    assert json.loads(output.splitlines()[-1])["workers"] == 2
    assert "raylet" not in output
    if on == "ray":
        assert f"pid {victims[0].pid} died while it worked on chunks" in output


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
    output = output_of(process, 75, timeout_seconds=30)
    assert "Traceback" not in output
    last = output.splitlines()[-1]
    assert last.startswith("stopped on request"), output
    assert f"{tmp_path}: run the same command with --resume" in last
    assert not psutil.wait_procs(children, timeout=10)[1]
    assert nats(txl(*command, "--resume").stdout) == expected


@pytest.mark.fault_row(49)
def test_a_batch_that_kills_its_workers_is_named(
    model: Path, dataset: Path, tmp_path: Path
) -> None:
    process = start_txl(*words(model, dataset, tmp_path, "--workers", 2))

    def has_ended() -> bool:
        for worker in workers_of(process.pid, "processes"):
            with suppress(psutil.NoSuchProcess):
                worker.kill()
        return process.poll() is not None

    wait_until(has_ended)
    output = output_of(process, 1, timeout_seconds=30)
    last = output.splitlines()[-1]
    assert last.startswith("TxlError: the worker for chunks "), output
    assert "died by SIGKILL, and so did a second one" in last
    assert "--resume and fewer --workers (now 2)" in last
    assert "Traceback" not in output


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
    model: Path, dataset: Path, tmp_path: Path, expected: float
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
                    wait_until(lambda: bool(workers_of(node.process.pid, "ray")))
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
    model: Path, dataset: Path, tmp_path: Path
) -> None:
    environment = token_environment(tmp_path)
    scores = (tmp_path / "first", tmp_path / "second")
    with ray_node(tmp_path) as head:
        on = ("--on", head.address)
        first = start_txl(*words(model, dataset, scores[0], *on), environment=environment)
        wait_until(lambda: finished(scores[0]) > 0)
        (worker,) = workers_of(head.process.pid, "ray")
        worker.suspend()  # else it may have finished before the second one asks for its CPU
        second = start_txl(*words(model, dataset, scores[1], *on), environment=environment)
        assert second.stdout is not None
        line = next(line for line in second.stdout if "CPU" in line)
        assert line.startswith("waiting ")
        assert "1 worker needs one, the cluster has 1, of which 0 are free" in line
        worker.resume()
        for process, scores_of in ((second, scores[1]), (first, scores[0])):
            process.send_signal(signal.SIGINT)
            output = output_of(process, 75, timeout_seconds=SOON_SECONDS)
            assert f"{scores_of}: run the same command with --resume" in output
        wait_until(lambda: not workers_of(head.process.pid, "ray"), timeout_seconds=10)


def test_a_lost_head_ends_the_evaluation_and_resume_goes_on(
    model: Path, dataset: Path, tmp_path: Path, expected: float
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
