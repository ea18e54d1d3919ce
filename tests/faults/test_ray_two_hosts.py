"""Ray over two hosts: network namespaces with one cable between them, one Ray node in each.

As on Debian, the name of either host resolves to 127.x on that host.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.nodes import ray_node, token_environment
from tests.commands import ENVIRONMENT
from tests.gloo_ranks import RankGroups
from tests.training_runs import NO_EVALUATION, TINY, losses, tiny_job, train

pytestmark = pytest.mark.fault
ADDRESSES = ("10.77.31.1", "10.77.31.2")


@pytest.fixture
def hosts() -> Iterator[list[tuple[str, ...]]]:
    """What to put before a command to run it on the first or the second host."""
    if os.geteuid() != 0 or shutil.which("ip") is None or shutil.which("unshare") is None:
        pytest.skip("network namespaces need root and the commands ip and unshare")
    names = [f"txl-{os.getpid()}-{number}" for number in (0, 1)]
    made = subprocess.run(["ip", "netns", "add", names[0]], check=False, capture_output=True)
    if made.returncode != 0:
        pytest.skip(f"no network namespaces here: {made.stderr.decode().strip()}")
    try:
        ip("netns", "add", names[1])
        cable = [f"txl{os.getpid() % 10**6}{end}" for end in "ab"]
        ends = ("netns", names[0], "type", "veth", "peer", "name", cable[1], "netns", names[1])
        ip("link", "add", cable[0], *ends)
        for name, end, address in zip(names, cable, ADDRESSES, strict=True):
            ip("-n", name, "addr", "add", f"{address}/24", "dev", end)
            ip("-n", name, "link", "set", end, "up")
            ip("-n", name, "link", "set", "lo", "up")
        called_localhost = ("unshare", "--uts", "sh", "-c", 'hostname localhost; exec "$@"', "sh")
        yield [("ip", "netns", "exec", name, *called_localhost) for name in names]
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


def test_two_hosts_train_as_one_where_their_names_resolve_to_loopback(
    hosts: list[tuple[str, ...]], ranks: RankGroups, dataset: Path, tmp_path: Path
) -> None:
    straight, run = tmp_path / "straight", tmp_path / "run"
    assert ranks(2).run(train, tiny_job(dataset, straight, NO_EVALUATION)) == [0, 0]
    environment = {**ENVIRONMENT, **token_environment(tmp_path)}
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        environment.pop(name, None)
    given = (f"data.path={dataset}", f"directory={run}", NO_EVALUATION, "--ranks", "2")
    with (
        ray_node(tmp_path, ip=ADDRESSES[0], inside=hosts[0]) as head,
        ray_node(tmp_path, join=head.address, ip=ADDRESSES[1], inside=hosts[1]),
    ):
        command = (sys.executable, "-m", "txl_dist", "train", str(TINY), *given)
        ended = subprocess.run(
            (*hosts[0], *command, "--on", head.address),
            check=False,
            capture_output=True,
            text=True,
            timeout=150,
            env=environment,
        )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert losses(run) == losses(straight)
