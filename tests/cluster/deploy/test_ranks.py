"""cluster/deploy/ranks.sh: the ranks of one host without torchrun."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster.deploy.jobs import start_job
from tests.support.commands import num_lines, wait_until
from tests.support.training_runs import NO_EVALUATION, TINY, losses

ROOT = Path(__file__).parents[3]
SCRIPT = ROOT / "cluster" / "deploy" / "ranks.sh"

PYTHON = """#!/bin/bash
# One rank: record its variables, and end as told.
ranks="$RANK $LOCAL_RANK $WORLD_SIZE $LOCAL_WORLD_SIZE"
echo "$ranks $MASTER_ADDR:$MASTER_PORT $*" >>"$RECORDS/ranks"
trap 'echo "$RANK" >>"$RECORDS/stopped"; exit 75' TERM
[[ $RANK == "${FAILING_RANK:-}" ]] && exit "$EXIT_CODE"
[[ -n ${WAITS:-} ]] && while true; do sleep 0.02; done
exit 0
"""


def start(tmp_path: Path, *words: object, **environment: str) -> subprocess.Popen[str]:
    return start_job(
        [str(SCRIPT), *map(str, words)],
        {
            "RECORDS": str(tmp_path),
            "NUM_HOSTS": "2",
            "HOST_INDEX": "1",
            "MASTER_ADDR": "host-0",
            "RANKS_PER_HOST": "2",
            **environment,
        },
    )


@pytest.fixture
def python(tmp_path: Path) -> str:
    path = tmp_path / "python"
    path.write_text(PYTHON)
    path.chmod(0o755)
    return str(path)


def test_every_rank_knows_its_place(tmp_path: Path, python: str) -> None:
    process = start(tmp_path, "config.yaml", "seed=2", TXL_PYTHON=python)
    assert process.wait(timeout=30) == 0
    assert sorted((tmp_path / "ranks").read_text().splitlines()) == [
        "2 0 4 2 host-0:29500 -m txl_dist train config.yaml seed=2",
        "3 1 4 2 host-0:29500 -m txl_dist train config.yaml seed=2",
    ]


def test_one_signal_stops_all_ranks_and_the_exit_code_says_so(tmp_path: Path, python: str) -> None:
    process = start(tmp_path, "config.yaml", TXL_PYTHON=python, WAITS="1")
    wait_until(lambda: num_lines(tmp_path / "ranks") == 2, timeout_seconds=30)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=30) == 75
    assert sorted((tmp_path / "stopped").read_text().split()) == ["2", "3"]


def test_the_highest_exit_code_is_that_of_the_host(tmp_path: Path, python: str) -> None:
    process = start(tmp_path, "config.yaml", TXL_PYTHON=python, FAILING_RANK="2", EXIT_CODE="5")
    assert process.wait(timeout=30) == 5


@pytest.mark.fault
def test_ranks_of_two_hosts_train_stop_and_resume(dataset: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    words = (TINY, f"data.path={dataset}", f"directory={run}", NO_EVALUATION)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])

    def start_hosts() -> list[subprocess.Popen[str]]:
        return [
            start(
                tmp_path, *words, "training.num_steps=150", TXL_PYTHON=sys.executable,
                HOST_INDEX=str(host), MASTER_ADDR="127.0.0.1", MASTER_PORT=port, RANKS_PER_HOST="1",
            )
            for host in range(2)
        ]  # fmt: skip

    hosts = start_hosts()
    wait_until(lambda: num_lines(run / "metrics.jsonl") > 10)
    os.kill(hosts[1].pid, signal.SIGTERM)  # Kubernetes drains one host
    assert [host.wait(timeout=90) for host in hosts] == [75, 75]
    stopped_at = max(losses(run))
    assert (run / "checkpoints" / f"step-{stopped_at:08d}" / "manifest.json").exists()
    assert [host.wait(timeout=120) for host in start_hosts()] == [0, 0]
    assert sorted(losses(run)) == list(range(1, 151))
