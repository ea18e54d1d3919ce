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
def test_ray_requires_the_token_and_only_the_workers_take_ranks(cloud: str) -> None:
    config = load(cloud)
    assert config["file_mounts"]["~/.ray/auth_token"] == "~/.ray/auth_token"
    commands = start_commands(config)
    assert all(command.startswith("RAY_AUTH_MODE=token ") for command in commands)
    [head] = [command for command in commands if "--head" in command]
    assert "--dashboard-host=127.0.0.1" in head
    assert "--num-cpus=0" in head
    # Otherwise Ray makes a security group that admits SSH from everywhere.
    kinds = config["available_node_types"].values()
    assert cloud != "aws" or all(kind["node_config"]["SecurityGroupIds"] for kind in kinds)


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
