"""`--on`: the name of an installed launcher, or the address of a Ray cluster."""

import pytest

from cluster.launcher import RayLauncher
from txl_dist.errors import ConfigError
from txl_dist.launch.launcher import find_launcher
from txl_dist.launch.processes import ProcessLauncher


def test_a_launcher_is_found_by_name() -> None:
    assert isinstance(find_launcher("processes"), ProcessLauncher)
    assert isinstance(find_launcher("ray"), RayLauncher)


@pytest.mark.parametrize("address", ["auto", "10.0.0.1:6379", "ray://10.0.0.1:10001"])
def test_an_address_is_that_of_a_ray_cluster(address: str) -> None:
    launcher = find_launcher(address)
    assert isinstance(launcher, RayLauncher)
    assert launcher._address == address


def test_an_unknown_name_is_rejected_with_the_installed_ones() -> None:
    with pytest.raises(ConfigError, match=r"--on slurm is neither .*\(processes, ray\)"):
        find_launcher("slurm")
