"""`--on`: the name of an installed launcher, or the address of a Ray cluster; and `--ranks`."""

import os
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cluster.launcher import RayLauncher
from txl_dist.errors import ConfigError
from txl_dist.launch.launcher import find_launcher
from txl_dist.launch.processes import ProcessGroup, ProcessLauncher
from txl_dist.launch.rank_group import RankRange
from txl_dist.training.spec import RunDirectory


def test_a_launcher_is_found_by_name() -> None:
    assert isinstance(find_launcher("processes"), ProcessLauncher)
    assert isinstance(find_launcher("ray"), RayLauncher)


@pytest.mark.parametrize(
    "address", ["auto", "10.0.0.1:6379", "ray://10.0.0.1:10001", "ray:6379", "slurm:6379"]
)
def test_an_address_is_that_of_a_ray_cluster(address: str) -> None:
    launcher = find_launcher(address)
    assert isinstance(launcher, RayLauncher)
    assert launcher._address == address


def test_an_unknown_name_is_rejected_with_the_installed_ones() -> None:
    for on in ("slurm", "slurm:partition"):  # a colon alone does not make an address
        with pytest.raises(ConfigError, match=rf"--on {on} is neither .*\(processes, ray\)"):
            find_launcher(on)
    with pytest.raises(ConfigError, match="--on processes:2: processes takes nothing after"):
        find_launcher("processes:2")


def test_ranks_share_the_cores_that_this_process_may_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[str] = []

    def start(command: list[str], *, env: dict[str, str], **_: Any) -> subprocess.Popen[bytes]:
        threads.append(env["OMP_NUM_THREADS"])
        return popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)

    popen = subprocess.Popen
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 64)  # of the machine
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3, 4, 5, 6, 7, 8})
    monkeypatch.setattr(subprocess, "Popen", start)
    RunDirectory(tmp_path).create()
    spec: Any = SimpleNamespace(run_path=tmp_path, to_json=str)
    group = ProcessGroup()
    group.start(spec, 2)
    group.close()
    assert threads == ["3", "3"]


@pytest.mark.parametrize(("text", "low", "high"), [("4", 4, 4), ("2:8", 2, 8)])
def test_a_number_is_fixed_and_a_range_is_elastic(text: str, low: int, high: int) -> None:
    ranks = RankRange.parse(text)
    assert ranks == RankRange(low, high)
    assert ranks.is_elastic == (low < high)
    assert str(ranks) == text


@pytest.mark.parametrize("text", ["", "0", "0:2", "-1", "2:", ":2", "3:2", "1:2:3", "two", "٢"])
def test_anything_else_is_refused_with_examples(text: str) -> None:
    with pytest.raises(ConfigError, match=r"a number such as 4, or a range such as 2:8"):
        RankRange.parse(text)
