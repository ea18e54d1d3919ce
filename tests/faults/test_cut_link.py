"""Two hosts under torchrun, and a cut link: a short cut is survived, a long one ends the run."""

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.support.commands import ENVIRONMENT, num_lines, wait_until
from tests.support.gloo_ranks import RankGroups
from tests.support.hosts import Host, two_hosts
from tests.support.training_runs import NO_EVALUATION, TINY, losses, tiny_job, train

pytestmark = pytest.mark.fault
NUM_STEPS = 60


@contextmanager
def torchrun_on(hosts: tuple[Host, Host], *words: object) -> Iterator[list[subprocess.Popen[str]]]:
    """Start torchrun with one rank on each host."""
    with ExitStack() as stack:
        agents = []
        for number, host in enumerate(hosts):
            launch = (
                "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1",
                "--node-rank", str(number),
                "--master-addr", hosts[0].address, "--master-port", "29411",
                "-m", "txl_dist", "train", str(TINY),
            )  # fmt: skip
            agent = stack.enter_context(
                subprocess.Popen(
                    [*host.prefix, sys.executable, "-m", *launch, *map(str, words)],
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                    env={**ENVIRONMENT, "GLOO_SOCKET_IFNAME": host.interface},
                )
            )
            stack.callback(agent.kill)
            agents.append(agent)
        yield agents


def words(dataset: Path, run: Path, limit_seconds: int) -> tuple[object, ...]:
    return (
        f"data.path={dataset}", f"directory={run}", NO_EVALUATION, "tracking.enabled=false",
        f"training.num_steps={NUM_STEPS}", "training.checkpoint_interval_steps=5",
        f"training.rank_timeout_seconds={limit_seconds}",
    )  # fmt: skip


def test_a_short_cut_does_not_change_the_losses(
    ranks: RankGroups, dataset: Path, tmp_path: Path
) -> None:
    straight, run = tmp_path / "straight", tmp_path / "run"
    job = tiny_job(dataset, straight, NO_EVALUATION, f"training.num_steps={NUM_STEPS}")
    assert ranks(2).run(train, job) == [0, 0]
    with two_hosts() as hosts, torchrun_on(hosts, *words(dataset, run, 120)) as agents:
        wait_until(lambda: num_lines(run / "metrics.jsonl") > 3)
        with hosts[1].cut_off():
            log = run / "logs" / "rank-0.log"
            wait_until(lambda: "rank 0 has waited 1" in log.read_text(), timeout_seconds=30)
        outputs = [agent.communicate(timeout=120)[0] for agent in agents]
    assert [agent.returncode for agent in agents] == [0, 0], outputs
    assert losses(run) == losses(straight)


@pytest.mark.fault_row(7)
def test_a_link_cut_for_good_ends_both_ranks_with_collective_and_checkpoint(
    dataset: Path, tmp_path: Path
) -> None:
    with two_hosts() as hosts, torchrun_on(hosts, *words(dataset, tmp_path, 12)) as agents:
        wait_until(lambda: num_lines(tmp_path / "metrics.jsonl") > 7)
        with hosts[1].cut_off():
            start = time.monotonic()
            outputs = [agent.communicate(timeout=90)[0] for agent in agents]
            assert time.monotonic() - start < 12 + 60
    for rank, (agent, output) in enumerate(zip(agents, outputs, strict=True)):
        assert agent.returncode == 1, output
        log = (tmp_path / "logs" / f"rank-{rank}.log").read_text()
        assert f"rank {rank} has waited 1" in log
        assert f"rank {rank} waited training.rank_timeout_seconds=12 for the other" in log
        assert "resumes from the newest checkpoint, that of step " in log
