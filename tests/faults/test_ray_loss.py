"""Failures under Ray: a lost node, head or launcher. Evaluation: `test_ray_evaluation.py`."""

import time
from pathlib import Path

import psutil
import pytest

from tests.support.commands import num_lines, start_txl, txl, wait_until
from tests.support.gloo_ranks import RankGroups
from tests.support.nodes import ray_node, token_environment
from tests.support.training_runs import NO_EVALUATION, TINY, losses, tiny_spec, train

pytestmark = pytest.mark.fault
LONG = (NO_EVALUATION, "training.num_steps=600", "training.checkpoint_interval_steps=50")


@pytest.mark.fault_row(3)
def test_a_lost_node_is_one_line_and_training_goes_on_when_another_has_joined(
    ranks: RankGroups, dataset: Path, tmp_path: Path
) -> None:
    straight, run = tmp_path / "straight", tmp_path / "run"
    assert ranks(2).run(train, tiny_spec(dataset, straight, *LONG)) == [0, 0]
    environment = token_environment(tmp_path)
    with ray_node(tmp_path) as head, ray_node(tmp_path, join=head.address) as node:
        overrides = (f"data.path={dataset}", f"directory={run}", *LONG, "--on", head.address)
        process = start_txl("train", TINY, *overrides, "--ranks", 2, environment=environment)
        wait_until(lambda: num_lines(run / "metrics.jsonl") > 80)
        node.kill()
        with ray_node(tmp_path, join=head.address):
            output, _ = process.communicate(timeout=200)
    assert process.returncode == 0, output
    lines = output.splitlines()
    # A start takes a `waiting` line every few seconds.
    other_lines = [
        line
        for line in lines
        if " | loss " not in line
        and " checkpoint at step " not in line
        and not line.startswith("waiting ")
    ]
    died = [line for line in other_lines if "died; " in line]
    assert len(died) == 1, output
    assert "(node " in died[0]
    assert "restart" in died[0]
    # What is left are the lines of two starts (10 each), of the loss and of the end, and no dump of
    # Ray's, which has dozens. The rank that stays may have time for its summary, or not.
    assert len(other_lines) < 30, output
    assert "Traceback" not in output
    assert "raylet" in (run / "logs" / "ray.log").read_text().lower()
    assert losses(run) == losses(straight)


@pytest.mark.fault_row(4)
def test_a_lost_head_ends_the_run_with_an_error_that_names_it(
    dataset: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    with ray_node(tmp_path) as head, ray_node(tmp_path, join=head.address) as node:
        overrides = (f"data.path={dataset}", f"directory={run}", *LONG, "training.num_steps=100000")
        process = start_txl(
            *("train", TINY, *overrides, "--on", head.address, "--ranks", 2),
            environment=token_environment(tmp_path),
        )
        wait_until(lambda: num_lines(run / "metrics.jsonl") > 60)
        head.kill()
        node.kill()
        output, _ = process.communicate(timeout=100)
    assert process.returncode == 1, output
    last = output.splitlines()[-1]
    assert "TxlError: the head of the Ray cluster at" in last, output
    assert "resumes from the newest checkpoint" in last


@pytest.mark.fault_row(2)
def test_a_private_ray_ends_some_time_after_its_launcher_was_killed(
    dataset: Path, tmp_path: Path
) -> None:
    overrides = (f"data.path={dataset}", f"directory={tmp_path / 'run'}", *LONG)
    process = start_txl("train", TINY, *overrides, "--ranks", 2)
    wait_until(lambda: num_lines(tmp_path / "run" / "metrics.jsonl") > 20)
    children = psutil.Process(process.pid).children(recursive=True)
    ray = [child for child in children if "ray" in " ".join(child.cmdline()[:3])]
    assert len(ray) > 5
    process.kill()
    process.communicate()
    _, alive = psutil.wait_procs(ray, timeout=150)  # Ray's agents wait for their head for a minute
    assert not alive


@pytest.mark.fault_row(37)
@pytest.mark.parametrize("command", ["train", "eval", "prepare"])
def test_an_address_without_a_cluster_ends_soon_with_2_and_is_named(
    command: str, dataset: Path, tmp_path: Path
) -> None:
    if command == "eval":
        run = tmp_path / "run"
        ended = txl("train", TINY, f"data.path={dataset}", f"directory={run}", "--on", "processes")
        assert ended.returncode == 0, ended.stderr
    words = {
        "train": ("train", TINY, f"data.path={dataset}", f"directory={tmp_path / 'run'}"),
        "eval": ("eval", tmp_path / "run", dataset),
        "prepare": ("prepare", dataset.parent, "--out", tmp_path / "out", "--format", "text"),
    }[command]
    begin = time.monotonic()
    ended = txl(*words, "--on", "127.0.0.1:9")
    assert ended.returncode == 2, ended.stderr
    assert time.monotonic() - begin < 40  # 20 on a quiet machine, imports included
    assert "no Ray cluster can be used at --on 127.0.0.1:9" in ended.stderr
    assert "Traceback" not in ended.stderr
