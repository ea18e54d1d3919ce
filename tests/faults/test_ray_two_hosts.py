"""Training on Ray over two hosts: network namespaces with one Ray node in each.

As on Debian, the name of each host resolves to 127.x on that host.
"""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.commands import ENVIRONMENT
from tests.support.gloo_ranks import RankGroups
from tests.support.hosts import two_hosts
from tests.support.nodes import ray_node, token_environment
from tests.support.training_runs import NO_EVALUATION, TINY, losses, tiny_spec, train

pytestmark = pytest.mark.fault


def test_two_hosts_train_as_one_where_their_names_resolve_to_loopback(
    ranks: RankGroups, dataset: Path, tmp_path: Path
) -> None:
    straight, run = tmp_path / "straight", tmp_path / "run"
    assert ranks(2).run(train, tiny_spec(dataset, straight, NO_EVALUATION)) == [0, 0]
    environment = {**ENVIRONMENT, **token_environment(tmp_path)}
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        environment.pop(name, None)
    overrides = (f"data.path={dataset}", f"directory={run}", NO_EVALUATION, "--ranks", "2")
    with (
        two_hosts() as (first, second),
        ray_node(tmp_path, ip=first.address, inside=first.prefix) as head,
        ray_node(tmp_path, join=head.address, ip=second.address, inside=second.prefix),
    ):
        command = (sys.executable, "-m", "txl_dist", "train", str(TINY), *overrides)
        ended = subprocess.run(
            (*first.prefix, *command, "--on", head.address),
            check=False,
            capture_output=True,
            text=True,
            timeout=150,
            env=environment,
        )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert losses(run) == losses(straight)
