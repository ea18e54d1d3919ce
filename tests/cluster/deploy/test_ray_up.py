"""The cluster files of `ray up`: cluster/deploy/aws.yaml and gcp.yaml.

No test starts instances. The files are checked against Ray's own schema and by Ray's own code.
"""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from ray.autoscaler._private.util import prepare_config, validate_config

from txl_dist.config.config_file import load_run_config

DEPLOY = Path(__file__).parents[3] / "cluster" / "deploy"
NOTICE_SECONDS = {"aws": 120, "gcp": 30}
"""Between the announcement and the end of a spot instance."""
END_SECONDS = 5
"""What a rank may take to end after its grace period (launch/supervise.py: 3 s)."""

clouds = pytest.mark.parametrize("cloud", ["aws", "gcp"])


def load(cloud: str) -> dict[str, Any]:
    config = yaml.safe_load((DEPLOY / f"{cloud}.yaml").read_text())
    assert isinstance(config, dict)
    return config


def start_commands(config: dict[str, Any]) -> list[str]:
    commands = [*config["head_start_ray_commands"], *config["worker_start_ray_commands"]]
    return [command for command in commands if "ray start" in command]


@clouds
def test_ray_accepts_the_file(cloud: str) -> None:
    config = prepare_config(load(cloud))  # adds Ray's defaults, as `ray up` does
    validate_config(config)
    assert config["provider"]["type"] == cloud


@clouds
def test_every_node_requires_the_token(cloud: str) -> None:
    config = load(cloud)
    assert config["file_mounts"]["~/.ray/auth_token"] == "~/.ray/auth_token"
    for command in start_commands(config):
        assert command.startswith("RAY_AUTH_MODE=token "), command


@clouds
def test_the_dashboard_is_on_loopback(cloud: str) -> None:
    [head] = [command for command in start_commands(load(cloud)) if "--head" in command]
    assert "--dashboard-host=127.0.0.1" in head
    assert "0.0.0.0" not in (DEPLOY / f"{cloud}.yaml").read_text()


def test_no_group_of_ray_admits_ssh_from_everywhere() -> None:
    """Ray makes a group that does so unless every kind of node names its own."""
    config = load("aws")
    assert "security_group" not in config["provider"]
    for kind in config["available_node_types"].values():
        assert kind["node_config"]["SecurityGroupIds"]


@clouds
def test_the_head_is_on_demand_and_takes_no_ranks(cloud: str) -> None:
    config = load(cloud)
    head = config["available_node_types"][config["head_node_type"]]
    assert head["resources"] == {"CPU": 0}
    assert head["max_workers"] == 0
    assert not {"InstanceMarketOptions", "scheduling"} & head["node_config"].keys()
    [start] = [command for command in start_commands(config) if "--head" in command]
    assert "--num-cpus=0" in start


@clouds
def test_workers_are_spot_instances_that_announce_their_end(cloud: str) -> None:
    config = load(cloud)
    node = config["available_node_types"]["gpu_worker"]["node_config"]
    market = node.get("InstanceMarketOptions", {}).get("MarketType")
    assert "spot" in (market, node.get("scheduling", {}).get("provisioningModel", "").lower())
    drain = config["worker_start_ray_commands"][-1]
    seconds = re.search(rf"drain_node --deadline-seconds (\d+) --when-preempted {cloud}", drain)
    assert seconds is not None
    deadline = int(seconds[1])
    assert deadline < NOTICE_SECONDS[cloud]
    config_path = DEPLOY.parents[1] / "configs" / "cluster" / "wt103-cloud.yaml"
    grace = {"aws": load_run_config(config_path).training.grace_seconds, "gcp": 20.0}
    assert grace[cloud] + END_SECONDS <= deadline
    assert f"grace_seconds={grace['gcp']:g}" in (DEPLOY / "gcp.yaml").read_text()


@clouds
def test_the_nodes_wait_for_nobody_and_end_when_idle(cloud: str) -> None:
    config = load(cloud)
    workers = config["available_node_types"]["gpu_worker"]
    assert workers["min_workers"] <= workers["max_workers"] <= config["max_workers"]
    assert config["idle_timeout_minutes"] > 0


@clouds
def test_a_node_without_the_shared_file_system_does_not_start(cloud: str) -> None:
    commands = load(cloud)["initialization_commands"]
    mount = next(index for index, command in enumerate(commands) if "sudo mount" in command)
    assert "mountpoint -q /mnt/txl" in commands[mount + 1]
    assert "--volume=/mnt/txl:/mnt/txl" in load(cloud)["docker"]["run_options"]
