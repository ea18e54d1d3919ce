"""Training over two hosts, as on one: bad links, partitions, a host that comes back."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.commands import num_lines, run_txl, start_txl, wait_until
from tests.support.hosts import Link, outputs_of, settings, torchrun_on, two_hosts
from tests.support.nodes import ray_node, token_environment
from tests.support.training_runs import (
    NO_EVALUATION,
    TINY,
    ZERO,
    losses,
    metrics,
)

pytestmark = pytest.mark.cluster
NUM_STEPS = 300
LONG = (f"training.num_steps={NUM_STEPS}",)
CUT_SECONDS = 60.0
RAY_CUT_SECONDS = 30.0
SAT_OUT_SECONDS = 120.0
"""After a cut, TCP sends again at intervals that have doubled since its start, at most this."""


@pytest.mark.parametrize("stage", ["1", "3-all-spread"])
def test_two_hosts_train_as_one(
    straight: Callable[..., Path], dataset: Path, tmp_path: Path, stage: str
) -> None:
    run = tmp_path / "run"
    with two_hosts() as hosts, torchrun_on(hosts, *settings(dataset, run, *ZERO[stage])) as agents:
        outputs = outputs_of(agents, timeout_seconds=120)
    assert [agent.returncode for agent in agents] == [0, 0], outputs
    assert losses(run) == losses(straight(NO_EVALUATION, *ZERO[stage]))


@pytest.mark.parametrize("stage", ["1", "3-all-spread"])
def test_a_slow_link_that_loses_packets_changes_nothing_also_with_an_evaluation_meanwhile(
    straight: Callable[..., Path], dataset: Path, tmp_path: Path, stage: str
) -> None:
    run = tmp_path / "run"
    long = ("training.num_steps=120", "training.keep_checkpoints=100", *ZERO[stage])
    checkpoint = run / "checkpoints" / "step-00000005"
    with (
        two_hosts(link=Link(delay_seconds=0.005, loss=0.01)) as hosts,
        torchrun_on(hosts, *settings(dataset, run, *long)) as agents,
    ):
        for host in hosts:
            host.limit_rate(bits_per_second=20_000_000)
        wait_until((checkpoint / "manifest.json").exists)
        meanwhile = score(checkpoint, dataset)
        assert [agent.poll() for agent in agents] == [None, None]
        outputs = outputs_of(agents, timeout_seconds=120)
    assert [agent.returncode for agent in agents] == [0, 0], outputs
    assert losses(run) == losses(straight(NO_EVALUATION, *long))
    assert score(checkpoint, dataset) == meanwhile


def score(checkpoint: Path, dataset: Path) -> dict[str, Any]:
    # In this process: a new one would import torch for longer than the training takes.
    code, output = run_txl(
        "eval", checkpoint, dataset, "--split", "valid", "--on", "processes", "--json"
    )
    assert code == 0, output
    result: dict[str, Any] = json.loads(output.splitlines()[-1])
    return result


@pytest.mark.parametrize("cut_seconds", [5.0, CUT_SECONDS])
def test_a_partition_shorter_than_the_time_limit_ends_without_a_restart(
    straight: Callable[..., Path], dataset: Path, tmp_path: Path, cut_seconds: float
) -> None:
    run = tmp_path / "run"
    words = settings(dataset, run, *LONG, "training.rank_timeout_seconds=300")
    with two_hosts() as hosts, torchrun_on(hosts, *words) as agents:
        wait_until(lambda: num_lines(run / "metrics.jsonl") > 3)
        with hosts[1].cut_off():
            time.sleep(cut_seconds)
            lines = num_lines(run / "metrics.jsonl")
        assert lines < NUM_STEPS  # the cut was during training
        outputs = outputs_of(agents, timeout_seconds=SAT_OUT_SECONDS + 60)
    assert [agent.returncode for agent in agents] == [0, 0], outputs
    assert losses(run) == losses(straight(NO_EVALUATION, *LONG))
    assert metrics(run)[-1]["lost_steps"] == 0


def test_a_partition_longer_than_the_limit_ends_the_run_and_the_same_command_resumes(
    straight: Callable[..., Path], dataset: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    words = settings(dataset, run, *LONG, "training.rank_timeout_seconds=15")
    with two_hosts() as hosts:
        with torchrun_on(hosts, *words) as agents:
            wait_until(lambda: num_lines(run / "metrics.jsonl") > 7)
            with hosts[1].cut_off():
                began = time.monotonic()
                outputs = outputs_of(agents, timeout_seconds=90)
                time.sleep(max(0.0, CUT_SECONDS - (time.monotonic() - began)))
        assert [agent.returncode for agent in agents] == [1, 1], outputs
        with torchrun_on(hosts, *words) as agents:
            outputs = outputs_of(agents, timeout_seconds=120)
    assert [agent.returncode for agent in agents] == [0, 0], outputs
    assert losses(run) == losses(straight(NO_EVALUATION, *LONG))
    last = metrics(run)[-1]
    assert last["restarts"] == 1
    assert last["lost_steps"] <= 5  # the interval of checkpoints


def test_a_host_that_is_cut_off_under_ray_is_replaced_when_it_is_back(
    straight: Callable[..., Path], dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # By default Ray needs more than a minute to find out that a host is gone.
    for name, value in (("period_ms", 1000), ("timeout_ms", 2000), ("failure_threshold", 3)):
        monkeypatch.setenv(f"RAY_health_check_{name}", str(value))
    run = tmp_path / "run"
    with (
        two_hosts() as (first, second),
        ray_node(tmp_path, ip=first.address, inside=first.prefix) as head,
    ):
        words = settings(dataset, run, *LONG)
        launch = ("--on", head.address, "--ranks", "2")
        with ray_node(tmp_path, join=head.address, ip=second.address, inside=second.prefix) as node:
            training = start_txl(
                *("train", TINY, *words, *launch),
                environment=token_environment(tmp_path),
                inside=first.prefix,
            )
            wait_until(lambda: num_lines(run / "metrics.jsonl") > 20)
            with second.cut_off():
                time.sleep(RAY_CUT_SECONDS)
                assert training.poll() is None
            # Ray's processes on the host end when they learn that the head has given them up.
            wait_until(lambda: node.process.poll() is not None, timeout_seconds=60)
        # As a service that starts Ray again.
        with ray_node(tmp_path, join=head.address, ip=second.address, inside=second.prefix):
            output, _ = training.communicate(timeout=180)
    assert training.returncode == 0, output
    assert "restart" in output
    assert losses(run) == losses(straight(NO_EVALUATION, *LONG))
