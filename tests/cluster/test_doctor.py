"""`txl doctor --on ADDRESS`: differences between nodes are attributed to the right node; two hosts
(network and mount namespaces), and open dashboards.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cluster.doctor import (
    compare_datasets,
    compare_probes,
    judge_connections,
    place_probe,
    read_probes,
    remove_probes,
)
from data_pipeline.preparation.prepare import prepare_dataset
from data_pipeline.shards.prepare_settings import PrepareSettings
from tests.support.commands import ENVIRONMENT, wait_until
from tests.support.hosts import Host, must, run, two_hosts
from tests.support.nodes import RayNode, ray_node, token_environment
from txl_dist.doctor.finding import Finding, ok
from txl_dist.doctor.services import DASHBOARD_PORT

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
def test_every_difference_of_a_host_is_named_and_two_equal_hosts_are_fine(
    dataset: Path, tmp_path: Path
) -> None:
    shared, private, code = tmp_path / "shared", tmp_path / "private", tmp_path / "code.py"
    for directory in (shared, private):
        directory.mkdir()
    module = ROOT / "txl_dist" / "doctor" / "__init__.py"
    code.write_text(module.read_text() + "# changed\n")
    other_data = tmp_path / "other"
    prepare_dataset([code], other_data, PrepareSettings())
    mounts = other_mounts(
        f"mount -t tmpfs tmpfs {private}",
        f"mount --bind {other_data} {dataset}",
        f"mount --bind {code} {module}",
    )
    environment = token_environment(tmp_path)
    with (
        two_hosts() as (first, second),
        ray_node(tmp_path, ip=first.address, inside=first.prefix) as head,
        ray_node(tmp_path, join=head.address, ip=second.address, inside=(*second.prefix, *mounts)),
    ):
        on = ("--on", head.address, "--min-free-gib", "0")
        exit_code, fine = doctor(
            first, environment, *on, "--run", shared / "run", "--skip", "versions"
        )
        assert (exit_code, problems(fine)) == (0, {}), fine
        reported = {(one["check"], one["node"]) for one in fine}
        assert {("storage", first.address), ("storage", second.address)} <= reported
        assert ("network", "all nodes") in reported
        assert list(shared.iterdir()) == [], "the probe files were removed"

        exit_code, findings = doctor(
            first, environment, *on, "--run", private, "--data", dataset, "--skip", "network"
        )
    found = problems(findings)
    assert exit_code == 1
    assert set(found) == {
        ("versions", second.address),
        ("storage", first.address),
        ("storage", second.address),
        ("dataset", second.address),
    }, findings
    assert "sources" in found["versions", second.address]
    assert f"files that {second.address} wrote are not seen" in found["storage", first.address]
    advised = [one for one in findings if one["status"] == "problem"]
    assert all(one["expected"] and one["advice"] for one in advised)


@contextmanager
def head_with_dashboard(
    host: Host, directory: Path, environment: Mapping[str, str], dashboard_host: str
) -> Iterator[None]:
    """`ray start --head` as an administrator starts it, with its dashboard."""
    log = directory / "head.log"
    command = (sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--head")
    options = (
        f"--node-ip-address={host.address}", f"--dashboard-host={dashboard_host}", "--num-cpus=1",
        "--object-store-memory=100000000",
    )  # fmt: skip
    with log.open("wb") as file:
        process = subprocess.Popen(
            (*host.prefix, *command, *options),
            stdout=file,
            stderr=file,
            env={**os.environ, "RAY_USAGE_STATS_ENABLED": "0", **environment},
        )
    node = RayNode(host.address, process, log)
    try:
        wait_until(lambda: b"Ray runtime started" in log.read_bytes())
        yield
    finally:
        node.kill()


@pytest.mark.cluster
@pytest.mark.fault_row(43)
@pytest.mark.parametrize(
    ("has_token", "dashboard_host", "expected"),
    [
        (True, "127.0.0.1", []),
        (True, "0.0.0.0", ["listen on"]),
        (False, "0.0.0.0", ["answer without a token", "listen on"]),
    ],
)
def test_a_dashboard_without_a_token_or_open_to_the_network_fails_the_doctor(
    tmp_path: Path, has_token: bool, dashboard_host: str, expected: list[str]
) -> None:
    token = token_environment(tmp_path) if has_token else {"RAY_AUTH_MODE": "disabled"}
    with two_hosts() as (host, _), head_with_dashboard(host, tmp_path, token, dashboard_host):
        exit_code, findings = doctor(host, token, "--skip", "versions", "--skip", "devices")
        bad = [one for one in findings if one["status"] == "problem"]
        assert exit_code == bool(expected)
        assert len(bad) == len(expected), findings
        for finding, text in zip(bad, expected, strict=True):
            assert text in finding["found"]
            assert str(DASHBOARD_PORT) in finding["found"]
        if not has_token:  # the same on the cluster: the head itself needs no token
            exit_code, findings = doctor(host, token, "--on", f"{host.address}:6379")
            assert exit_code == 1
            assert (
                "accepts connections without a token" in problems(findings)["exposure", "all nodes"]
            )


# --- comparisons, without Ray ---------------------------------------------------------------------

NODES = ["a", "b", "c"]
REACH = """
import json, sys
from cluster.doctor import unreachable
print(json.dumps(unreachable(json.loads(sys.argv[1]))))
"""


@contextmanager
def hosts_on_a_switch() -> Iterator[dict[str, str]]:
    """Namespace -> address of three hosts. Skips the test if namespaces cannot be created."""
    names = [f"txl-{os.getpid()}-{node}" for node in NODES]
    switch = f"txl-{os.getpid()}-switch"
    if os.geteuid() != 0 or run("ip", "netns", "add", switch).returncode != 0:
        pytest.skip("network namespaces need root and the command ip")
    try:
        must("ip", "-n", switch, "link", "add", "br0", "type", "bridge")
        must("ip", "-n", switch, "link", "set", "br0", "up")
        for number, name in enumerate(names, start=1):
            must("ip", "netns", "add", name)
            peer = ("type", "veth", "peer", "name", f"port{number}", "netns", switch)
            must("ip", "link", "add", "eth0", "netns", name, *peer)
            must("ip", "-n", switch, "link", "set", f"port{number}", "master", "br0", "up")
            must("ip", "-n", name, "addr", "add", f"10.77.32.{number}/24", "dev", "eth0")
            must("ip", "-n", name, "link", "set", "eth0", "up")
            must("ip", "-n", name, "link", "set", "lo", "up")
        yield {name: f"10.77.32.{number}" for number, name in enumerate(names, start=1)}
    finally:
        for name in (*names, switch):
            run("ip", "netns", "delete", name)


def start(namespace: str, program: str, *words: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        ["ip", "netns", "exec", namespace, sys.executable, "-c", program, *map(str, words)],
        stdout=subprocess.PIPE,
        text=True,
        env=ENVIRONMENT,
    )


@pytest.mark.cluster
def test_hosts_that_cannot_connect_are_named() -> None:
    with hosts_on_a_switch() as hosts:
        first, second, third = hosts
        listener = start(
            third,
            "from cluster.doctor import listen; import time\n"
            "print(listen('10.77.32.3')[1], flush=True); time.sleep(600)",
        )
        assert listener.stdout is not None
        addresses = json.dumps({"c": ["10.77.32.3", int(listener.stdout.readline())]})
        try:
            reached, _ = start(first, REACH, addresses).communicate(timeout=60)
            # As a firewall that drops packets: the host does not answer.
            must("ip", "-n", third, "link", "set", "eth0", "down")
            dropped, _ = start(second, REACH, addresses).communicate(timeout=60)
        finally:
            listener.kill()
            listener.wait()
    assert json.loads(reached) == {}
    (finding,) = judge_connections({"b": json.loads(dropped)})
    assert (finding.status, finding.node) == ("problem", "b")
    assert "cannot connect to c" in finding.found
    (fine,) = judge_connections({"a": {}, "b": {}})
    assert (fine.status, fine.node) == ("ok", "all nodes")


def dataset_of(node: str, digest: str) -> Finding:
    finding = ok(f"/data, digest {digest}", dataset=digest)
    return replace(finding, node=node, check="dataset")


def test_the_node_with_another_dataset_is_named() -> None:
    findings = [dataset_of("a", "1"), dataset_of("b", "2"), dataset_of("c", "1")]
    (difference,) = compare_datasets(findings)
    assert (difference.node, difference.check, difference.status) == ("b", "dataset", "problem")
    assert "digest 2" in difference.found
    assert "digest 1" in difference.expected
    assert compare_datasets([findings[0], findings[2]]) == []


def test_the_node_that_does_not_see_the_shared_directory_is_named() -> None:
    everyone = {"a": "seen", "b": "seen", "c": "seen"}
    (finding,) = compare_probes("/runs", {"a": everyone, "b": everyone, "c": everyone})
    assert (finding.status, finding.node) == ("ok", "all nodes")
    alone = {"a": "missing", "b": "missing", "c": "seen"}
    others = {"a": "seen", "b": "seen", "c": "missing"}
    findings = compare_probes("/runs", {"a": others, "b": others, "c": alone})
    assert [finding.node for finding in findings] == ["a", "b", "c"]
    assert "files that a, b wrote are not seen" in findings[2].found
    (finding,) = compare_probes("/runs", {"a": everyone, "b": {**everyone, "a": "lock not seen"}})
    assert (finding.status, finding.node) == ("note", "all nodes")


def test_nodes_that_share_a_directory_see_files_and_locks(tmp_path: Path) -> None:
    run = str(tmp_path / "runs" / "new")
    paths = {"a": place_probe(run), "b": place_probe(run)}
    assert read_probes(paths) == {"a": "seen", "b": "seen"}
    remove_probes()
    assert list(tmp_path.iterdir()) == []


def test_files_and_locks_that_are_not_shared_are_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cluster.doctor.SHARED_WAIT_SECONDS", 0.0)
    other = tmp_path / "other"
    other.mkdir()
    names = {"a": Path(place_probe(str(tmp_path))).name, "b": Path(place_probe(str(other))).name}

    def seen_in(directory: Path) -> dict[str, str]:
        return dict(read_probes({node: str(directory / name) for node, name in names.items()}))

    (tmp_path / names["b"]).write_text("of another file system")
    assert seen_in(tmp_path) == {"a": "seen", "b": "other content"}
    assert seen_in(other) == {"a": "missing", "b": "seen"}
    # A copy of the file has no lock: as if locks were valid on one node only.
    (other / names["a"]).write_text(names["a"])
    assert seen_in(other) == {"a": "lock not seen", "b": "seen"}
    remove_probes()
