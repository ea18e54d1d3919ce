"""Whether a running Ray cluster can be used without a token, and whether it reports its usage."""

import os
import subprocess
import sys
from collections.abc import Iterable

from txl_dist.doctor.finding import Finding, note, ok, problem

CONNECT_SECONDS = 20.0
_CONNECT = """
import sys
from ray._raylet import GcsClient
GcsClient(address=sys.argv[1])
"""


def check_token() -> list[Finding]:
    """Connect to the head node without a token. Requires a Ray connection."""
    import ray

    address = ray.get_runtime_context().gcs_address
    # In a separate process: Ray reads the token once per process. HOME has the default token.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    try:
        ended = subprocess.run(
            [sys.executable, "-c", _CONNECT, address],
            capture_output=True,
            text=True,
            timeout=CONNECT_SECONDS,
            check=False,
            env={**environment, "HOME": "/nonexistent", "RAY_AUTH_MODE": "disabled"},
        )
    except subprocess.TimeoutExpired:
        return [
            note(
                f"the head at {address} did not answer within {CONNECT_SECONDS:g} s to a "
                "connection without a token",
                expected="a refusal",
                advice="check again when the head is less busy",
            )
        ]
    if ended.returncode == 0:
        return [
            problem(
                f"the head at {address} accepts connections without a token, so everyone who "
                "reaches it can run commands on all nodes",
                expected="token authentication",
                advice="ray get-auth-token --generate, copy ~/.ray/auth_token to all nodes and to "
                "this machine, and start the cluster again with RAY_AUTH_MODE=token",
            )
        ]
    if "Authentication" in ended.stderr:
        return [ok("Ray requires a token")]
    last_line = next(reversed(ended.stderr.strip().splitlines()), "no output")
    return [
        note(
            f"whether Ray requires a token is unknown: {last_line}",
            expected="a refusal without a token",
            advice="check that the head is reachable from this machine",
        )
    ]


def check_usage_statistics() -> list[Finding]:
    """A note if the Ray of this node reports its usage. [] on nodes that are not the head."""
    import ray
    from ray._common.usage.usage_lib import usage_stats_enabled

    node = next(
        one for one in ray.nodes() if one["NodeID"] == ray.get_runtime_context().get_node_id()
    )
    if "node:__internal_head__" not in node["Resources"]:
        return []
    if usage_stats_enabled():
        return [
            note(
                "the head reports usage statistics to usage-stats.ray.io",
                expected="no reports from private clusters",
                advice="ray disable-usage-stats on the head, or RAY_USAGE_STATS_ENABLED=0 ray "
                "start ...",
            )
        ]
    return [ok("Ray's usage statistics are disabled")]


def dashboard_ports(ports: Iterable[int]) -> tuple[int, ...]:
    """`ports` and the port of the connected cluster's dashboard."""
    import ray

    url = ray._private.worker.get_dashboard_url() or ""
    number = url.rpartition(":")[2]
    return tuple(dict.fromkeys([*ports, *([int(number)] if number.isdigit() else [])]))
