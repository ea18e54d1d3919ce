"""Two hosts under torchrun, and a cut link: a short cut is survived, a long one ends the run."""

import time
from pathlib import Path

import pytest

from tests.support.commands import num_lines, wait_until
from tests.support.gloo_ranks import RankGroups
from tests.support.hosts import two_hosts
from tests.support.training_runs import NO_EVALUATION, losses, tiny_spec, train
from tests.support.two_host_runs import outputs_of, settings, torchrun_on

pytestmark = pytest.mark.fault
NUM_STEPS = "training.num_steps=60"


def test_a_short_cut_does_not_change_the_losses(
    ranks: RankGroups, dataset: Path, tmp_path: Path
) -> None:
    straight, run = tmp_path / "straight", tmp_path / "run"
    spec = tiny_spec(dataset, straight, NO_EVALUATION, NUM_STEPS)
    assert ranks(2).run(train, spec) == [0, 0]
    words = settings(dataset, run, NUM_STEPS, "training.rank_timeout_seconds=120")
    with two_hosts() as hosts, torchrun_on(hosts, *words) as agents:
        wait_until(lambda: num_lines(run / "metrics.jsonl") > 3)
        with hosts[1].cut_off():
            log = run / "logs" / "rank-0.log"
            wait_until(lambda: "rank 0 has waited 1" in log.read_text(), timeout_seconds=30)
        outputs = outputs_of(agents, timeout_seconds=120)
    assert [agent.returncode for agent in agents] == [0, 0], outputs
    assert losses(run) == losses(straight)


@pytest.mark.fault_row(7)
def test_a_link_cut_for_good_ends_both_ranks_with_collective_and_checkpoint(
    dataset: Path, tmp_path: Path
) -> None:
    words = settings(dataset, tmp_path, NUM_STEPS, "training.rank_timeout_seconds=12")
    with two_hosts() as hosts, torchrun_on(hosts, *words) as agents:
        wait_until(lambda: num_lines(tmp_path / "metrics.jsonl") > 7)
        with hosts[1].cut_off():
            start = time.monotonic()
            outputs = outputs_of(agents, timeout_seconds=90)
            assert time.monotonic() - start < 12 + 60
    for rank, (agent, output) in enumerate(zip(agents, outputs, strict=True)):
        assert agent.returncode == 1, output
        log = (tmp_path / "logs" / f"rank-{rank}.log").read_text()
        assert f"rank {rank} has waited 1" in log
        assert f"rank {rank} waited training.rank_timeout_seconds=12 for the other" in log
        assert "resumes from the newest checkpoint, that of step " in log
