"""Nodes of a Ray cluster are preempted, lost and added; the head dies and is started again."""

import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Self

import psutil
import pytest

from tests.support.commands import ENVIRONMENT, num_lines, start_txl, txl, wait_until
from tests.support.nodes import RayNode, ray_node, token_environment
from tests.support.training_runs import NO_EVALUATION, losses, metrics, train_words
from txl_dist.runtime.waiting import Heartbeat

pytestmark = pytest.mark.fault
LONG = (NO_EVALUATION, "training.num_steps=600", "training.checkpoint_interval_steps=50")
# Steps that take long enough for nodes to join meanwhile. The low rate keeps the effect of another
# order of float sums small over hundreds of steps.
SLOW = (
    NO_EVALUATION,
    *("model.n_layer=4", "model.d_model=96", "model.n_head=4", "model.d_head=24"),
    *("model.d_inner=384", "data.tgt_len=32", "model.mem_len=32"),
    *("optimizer.schedule=constant", "optimizer.lr=1e-5", "ray.growth_interval_seconds=5"),
    "training.checkpoint_interval_steps=20",
)
TOLERANCE = 2e-6
"""As in tests/properties/test_elastic_resume.py."""


class Command:
    """One `txl` command and what it has printed. Killed when the context exits."""

    def __init__(self, directory: Path, *words: object) -> None:
        self.path = directory / f"output-{len(list(directory.glob('output-*')))}"
        with self.path.open("w") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "txl_dist", *map(str, words)],
                stdout=file,
                stderr=subprocess.STDOUT,
                env={**ENVIRONMENT, **token_environment(directory)},
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()

    def text(self) -> str:
        return self.path.read_text()

    def wait_for(self, text: str, *, timeout_seconds: float = 180) -> None:
        def is_there() -> bool:
            assert self.process.poll() is None or text in self.text(), self.text()
            return text in self.text()

        wait_until(is_there, timeout_seconds=timeout_seconds)

    def wait(self) -> int:
        return self.process.wait(timeout=240)


def drain(node_id: str, address: str, tmp_path: Path) -> None:
    """The notice of a cloud that takes back a node, as its provider for Ray passes it on."""
    command = (
        *(sys.executable, "-m", "ray.scripts.scripts", "drain-node", "--address", address),
        *("--node-id", node_id, "--reason", "DRAIN_NODE_REASON_PREEMPTION"),
        *("--reason-message", "spot", "--deadline-remaining-seconds", "60"),
    )
    environment = {**ENVIRONMENT, **token_environment(tmp_path)}
    subprocess.run(command, check=True, capture_output=True, env=environment, timeout=60)


def pid_of_rank(run: Path) -> int | None:
    """None between two attempts: a new one starts without heartbeats."""
    path = run / ".heartbeats" / "rank-0.json"
    return Heartbeat.model_validate_json(path.read_bytes()).pid if path.exists() else None


def node_of(pid: int | None) -> str:
    """The id of the Ray node whose raylet has started this process."""
    assert pid is not None
    words = [word for parent in psutil.Process(pid).parents() for word in parent.cmdline()]
    (node_id,) = {
        match[1] for word in words if (match := re.fullmatch(r"--node[-_]id=(\w+)", word))
    }
    return node_id


@pytest.mark.fault_row(5)
def test_a_preemption_notice_saves_in_time_and_the_run_goes_on_elsewhere(
    straight: Callable[..., Path], dataset: Path, tmp_path: Path
) -> None:
    run, settings = tmp_path / "run", (*SLOW, "training.num_steps=300")
    with (
        ray_node(tmp_path, num_cpus=0) as head,
        ray_node(tmp_path, join=head.address),
        ray_node(tmp_path, join=head.address),
    ):
        options = (*settings, "--max-restarts", 0)
        words = train_words(dataset, run, *options, on=head.address, num_ranks=1)
        with Command(tmp_path, *words) as command:
            command.wait_for(" step 30 |")
            first_pid = pid_of_rank(run)
            first = node_of(first_pid)
            noticed_at = time.monotonic()
            drain(first, head.address, tmp_path)
            command.wait_for("continuing with 1 rank from step ")
            seconds_to_save = time.monotonic() - noticed_at
            wait_until(lambda: pid_of_rank(run) not in (None, first_pid))
            second = node_of(pid_of_rank(run))
            assert command.wait() == 0, command.text()
    text = command.text()
    print(text)
    assert second != first
    assert seconds_to_save < 60
    assert re.search(r"node [\d.]+ is preempted in \d+ s: the ranks save", text)
    (saved,) = re.findall(r"continuing with 1 rank from step (\d+)", text)
    assert f"resuming at step {saved} from " in text
    # A start after a preemption notice is planned: it is no restart after a failure.
    assert "summary | 0 restarts, 0 steps lost | goodput " in text
    assert {line["lost_steps"] for line in metrics(run)} == {0}
    assert "Traceback" not in text
    assert losses(run) == losses(straight(*settings, num_ranks=1))


@pytest.mark.fault_row(3, 27)
def test_an_elastic_run_goes_on_with_fewer_ranks_and_grows_again(
    straight: Callable[..., Path], dataset: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    with (
        ray_node(tmp_path, num_cpus=0) as head,
        ray_node(tmp_path, join=head.address) as lost,
        ray_node(tmp_path, join=head.address),
    ):
        settings = (*SLOW, "training.num_steps=100000")
        words = train_words(dataset, run, *settings, on=head.address, num_ranks="1:2")
        with Command(tmp_path, *words) as command:
            command.wait_for(" step 30 |")
            lost.kill()
            command.wait_for("continuing with 1 rank instead of 2 from step ")
            with ray_node(tmp_path, join=head.address):
                command.wait_for("continuing with 2 ranks instead of 1", timeout_seconds=300)
                lines = num_lines(run / "metrics.jsonl")
                wait_until(lambda: num_lines(run / "metrics.jsonl") > lines + 10)
                command.process.send_signal(signal.SIGTERM)
                assert command.wait() == 75, command.text()
    text = command.text()
    print(text)
    assert text.count(" died; ") == 1
    assert len(re.findall(r"continuing with 1 rank instead of 2 from step \d+", text)) == 1
    assert "there is room for 2 ranks instead of 1: the ranks save" in text
    assert re.search(r"with 2 ranks instead of 1 from step \d+", text)
    assert re.findall(r"\| (\d) ranks? on cpu", text) == ["2", "1", "2"]
    assert "Traceback" not in text

    last_step = max(losses(run))
    assert [line["restarts"] for line in metrics(run)][-1] == 1, "growing is no failure"
    expected = losses(straight(*SLOW, f"training.num_steps={last_step}"))
    assert losses(run) == pytest.approx(expected, rel=TOLERANCE)


@pytest.mark.fault_row(4)
def test_after_a_restart_of_the_head_the_same_command_resumes(
    straight: Callable[..., Path], dataset: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"

    def start(head: RayNode) -> Command:
        return Command(tmp_path, *train_words(dataset, run, *LONG, on=head.address))

    with ray_node(tmp_path, num_cpus=2) as head, start(head) as command:
        command.wait_for(" step 80 |")
        head.kill()
        assert command.wait() == 1, command.text()
    last = command.text().splitlines()[-1]
    assert "TxlError: the head of the Ray cluster at" in last
    assert "resumes from the newest checkpoint" in last
    port = int(head.address.rpartition(":")[2])
    with ray_node(tmp_path, num_cpus=2, port=port) as head, start(head) as command:
        assert command.wait() == 0, command.text()
    (resumed_at,) = map(int, re.findall(r"resuming at step (\d+) from ", command.text()))
    assert resumed_at >= 50
    (lost,) = map(int, re.findall(r"summary \| 1 restart, (\d+) steps lost", command.text()))
    assert metrics(run)[-1]["restarts"] == 1
    assert metrics(run)[-1]["lost_steps"] == lost
    assert metrics(run)[-1]["goodput"] < 1
    assert losses(run) == losses(straight(*LONG))


@pytest.mark.fault_row(3)
def test_a_lost_node_is_one_line_and_training_goes_on_when_another_has_joined(
    straight: Callable[..., Path], dataset: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    with ray_node(tmp_path) as head, ray_node(tmp_path, join=head.address) as node:
        words = train_words(dataset, run, *LONG, on=head.address)
        process = start_txl(*words, environment=token_environment(tmp_path))
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
    assert losses(run) == losses(straight(*LONG))


@pytest.mark.fault_row(37)
@pytest.mark.parametrize("command", ["train", "eval", "prepare"])
def test_an_address_without_a_cluster_ends_soon_with_2_and_is_named(
    command: str, model: Path, dataset: Path, tmp_path: Path
) -> None:
    address = "127.0.0.1:9"
    words = {
        "train": train_words(dataset, tmp_path / "run", on=address),
        "eval": ("eval", model, dataset, "--on", address),
        "prepare": ("prepare", dataset.parent, "--out", tmp_path / "out", "--format", "text",
                    "--on", address),
    }[command]  # fmt: skip
    begin = time.monotonic()
    ended = txl(*words)
    assert ended.returncode == 2, ended.stderr
    assert time.monotonic() - begin < 40  # 20 on a quiet machine, imports included
    assert f"no Ray cluster can be used at --on {address}" in ended.stderr
    assert "Traceback" not in ended.stderr
