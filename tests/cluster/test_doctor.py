"""`txl doctor --on ADDRESS`: differences between nodes are attributed to the right node; two hosts
(network and mount namespaces), and open dashboards.
"""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from cluster.nodes import compare_nodes, remove_probe, sees_probe, write_probe
from tests.support.commands import ENVIRONMENT
from tests.support.hosts import Host, two_hosts
from tests.support.nodes import RayNode, ray_node, ray_start, token_environment
from txl_dist.launch.doctor import DASHBOARD_PORT, Finding

ROOT = Path(__file__).parents[2]


def doctor(
    host: Host, environment: Mapping[str, str], *options: object
) -> tuple[int, list[dict[str, Any]]]:
    """Exit code and findings of `txl doctor` on a host."""
    command = (sys.executable, "-m", "txl_dist", "doctor", "--json", *map(str, options))
    ended = subprocess.run(
        (*host.prefix, *command),
        check=False,
        capture_output=True,
        text=True,
        timeout=150,
        env={**ENVIRONMENT, **environment},
    )
    assert ended.returncode in (0, 1), ended.stderr
    return ended.returncode, json.loads(ended.stdout)["findings"]


def problems(findings: Sequence[Mapping[str, Any]]) -> dict[tuple[str, str], str]:
    return {
        (one["check"], one["node"]): one["found"] for one in findings if one["status"] == "problem"
    }


def other_mounts(*commands: str) -> tuple[str, ...]:
    """Words before a command that run it with its own mounts."""
    return ("unshare", "--mount", "sh", "-c", " && ".join([*commands, 'exec "$@"']), "sh")


@pytest.mark.cluster
def test_every_difference_of_a_host_is_named_and_two_equal_hosts_are_fine(tmp_path: Path) -> None:
    shared, private, code = tmp_path / "shared", tmp_path / "private", tmp_path / "code.py"
    for directory in (shared, private):
        directory.mkdir()
    module = ROOT / "txl_dist" / "launch" / "__init__.py"
    code.write_text(module.read_text() + "# changed\n")
    mounts = other_mounts(
        f"mount -t tmpfs tmpfs {private}",
        f"mount --bind {code} {module}",
    )
    environment = token_environment(tmp_path)
    with (
        two_hosts() as (first, second),
        ray_node(tmp_path, ip=first.address, inside=first.prefix) as head,
        ray_node(tmp_path, join=head.address, ip=second.address, inside=(*second.prefix, *mounts)),
    ):
        on = ("--on", head.address)
        exit_code, fine = doctor(
            first, environment, *on, "--run", shared / "run", "--skip", "versions"
        )
        assert (exit_code, problems(fine)) == (0, {}), fine
        reported = {(one["check"], one["node"]) for one in fine}
        assert {("storage", first.address), ("storage", second.address)} <= reported
        assert list(shared.iterdir()) == [], "the probe files were removed"

        exit_code, findings = doctor(first, environment, *on, "--run", private)
    found = problems(findings)
    assert exit_code == 1
    assert set(found) == {("versions", second.address), ("storage", second.address)}, findings
    assert "sources" in found["versions", second.address]
    assert f"a file that {first.address} wrote is not seen" in found["storage", second.address]
    advised = [one for one in findings if one["status"] == "problem"]
    assert all(one["expected"] and one["advice"] for one in advised)


def head_with_dashboard(
    host: Host, directory: Path, environment: Mapping[str, str], dashboard_host: str
) -> AbstractContextManager[RayNode]:
    """`ray start --head` as an administrator starts it, with its dashboard."""
    command = (
        *(*host.prefix, sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--head"),
        *(f"--node-ip-address={host.address}", f"--dashboard-host={dashboard_host}"),
        *("--num-cpus=1", "--object-store-memory=100000000"),
    )
    variables = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0", **environment}
    return ray_start(command, host.address, directory, env=variables)


@pytest.mark.cluster
@pytest.mark.fault_row(43)
@pytest.mark.parametrize(
    ("has_token", "dashboard_host", "expected"),
    [
        (True, "127.0.0.1", ""),
        (True, "0.0.0.0", "listen on other interfaces"),
        (False, "0.0.0.0", "answer without a token"),
    ],
)
def test_a_dashboard_without_a_token_or_open_to_the_network_fails_the_doctor(
    tmp_path: Path, has_token: bool, dashboard_host: str, expected: str
) -> None:
    token = token_environment(tmp_path) if has_token else {"RAY_AUTH_MODE": "disabled"}
    with two_hosts() as (host, _), head_with_dashboard(host, tmp_path, token, dashboard_host):
        exit_code, findings = doctor(host, token, "--skip", "versions", "--skip", "devices")
        bad = problems(findings)
        assert (exit_code, len(bad)) == (bool(expected), bool(expected)), findings
        for found in bad.values():
            assert expected in found
            assert str(DASHBOARD_PORT) in found
        if not has_token:  # the same on the cluster
            exit_code, findings = doctor(host, token, "--on", f"{host.address}:6379")
            assert exit_code == 1
            assert ("exposure", host.address) in problems(findings)


# --- comparisons, without Ray ---------------------------------------------------------------------


def test_the_node_that_differs_from_most_is_named_with_what_differs() -> None:
    findings = [
        Finding("ok", found, check="versions", node=node)
        for node, found in (
            ("a", "torch 2.13.0+cpu, ray 2.60"),
            ("b", "torch 2.13.0, ray 2.59"),
            ("c", "torch 2.13.0+cu130, ray 2.60"),
        )
    ]
    (difference,) = compare_nodes(findings)
    assert (difference.node, difference.check, difference.status) == ("b", "versions", "problem")
    assert (difference.found, difference.expected) == ("ray 2.59", "as on a: ray 2.60")
    assert list(compare_nodes([findings[0], findings[2]])) == []


def test_a_file_of_another_node_is_seen_or_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cluster.nodes.SHARED_WAIT_SECONDS", 0.3)
    path = Path(write_probe(str(tmp_path / "runs" / "new")))
    other = tmp_path / "other" / path.name  # on another file system
    other.parent.mkdir()
    assert sees_probe(str(path))
    assert not sees_probe(str(other))
    other.write_text("something else")
    assert not sees_probe(str(other))
    remove_probe(str(path))
    assert not path.exists()
