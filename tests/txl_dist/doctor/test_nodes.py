"""Differences between nodes are attributed to the right node, and a slow link is seen."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.commands import ENVIRONMENT
from tests.support.hosts import must, run
from txl_dist.doctor.finding import Finding, ok
from txl_dist.doctor.nodes import (
    SharedProbe,
    compare_probes,
    compare_values,
    judge_connections,
)

NODES = ["a", "b", "c"]
RANK = """
import json, sys
from txl_dist.doctor.nodes import measure_network, open_store
rank, first, port = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
if rank == 0:
    port = open_store(first, port, 3)
    print(port, flush=True)
print(json.dumps(measure_network(rank, 3, (first, port), "gloo")))
"""
REACH = """
import json, sys
from txl_dist.doctor.nodes import unreachable
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
        env={**ENVIRONMENT, "GLOO_SOCKET_IFNAME": "eth0"},
    )


def measure(hosts: dict[str, str]) -> float:
    """Start one rank on each host; the bytes per second that the first one measured."""
    namespaces, first = list(hosts), next(iter(hosts.values()))
    processes = [start(namespaces[0], RANK, 0, first, 0)]
    assert processes[0].stdout is not None
    port = processes[0].stdout.readline().strip()
    processes += [
        start(name, RANK, rank, first, port) for rank, name in enumerate(namespaces[1:], 1)
    ]
    outputs = [process.communicate(timeout=120)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0]
    return float(json.loads(outputs[0])[1])


@pytest.mark.cluster
def test_a_slow_link_limits_the_all_reduce() -> None:
    with hosts_on_a_switch() as hosts:
        fast = measure(hosts)
        *_, slow_host = hosts
        limit = ("tbf", "rate", "40mbit", "burst", "64kb", "latency", "400ms")
        must("ip", "netns", "exec", slow_host, "tc", "qdisc", "add", "dev", "eth0", "root", *limit)
        slow = measure(hosts)
    assert slow < 20e6  # 40 Mbit/s in one direction
    assert fast > 2 * slow


@pytest.mark.cluster
def test_hosts_that_cannot_connect_are_named() -> None:
    with hosts_on_a_switch() as hosts:
        first, second, third = hosts
        listener = start(
            third,
            "from txl_dist.doctor.nodes import listen; import time\n"
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


def dataset(node: str, digest: str) -> Finding:
    finding = ok(f"/data, digest {digest}", equal_on_all_nodes=digest)
    return replace(finding, node=node, check="dataset")


def test_the_node_with_another_dataset_is_named() -> None:
    findings = [dataset("a", "1"), dataset("b", "2"), dataset("c", "1")]
    (difference,) = compare_values(findings)
    assert (difference.node, difference.check, difference.status) == ("b", "dataset", "problem")
    assert "digest 2" in difference.found
    assert "digest 1" in difference.expected
    assert compare_values([findings[0], findings[2]]) == []


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
    first, second = SharedProbe(str(tmp_path)), SharedProbe(str(tmp_path))
    names = {"a": first.place(), "b": second.place()}
    assert second.read(names) == {"a": "seen", "b": "seen"}
    first.remove()
    second.remove()
    assert list(tmp_path.iterdir()) == []


def test_files_and_locks_that_are_not_shared_are_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("txl_dist.doctor.nodes.SHARED_WAIT_SECONDS", 0.0)
    (tmp_path / "other").mkdir()
    first, second = SharedProbe(str(tmp_path)), SharedProbe(str(tmp_path / "other"))
    names = {"a": first.place(), "b": second.place()}
    (tmp_path / names["b"]).write_text("of another file system")
    assert first.read(names) == {"a": "seen", "b": "other content"}
    assert second.read(names) == {"a": "missing", "b": "seen"}
    # A copy of the file has no lock: as if locks were valid on one node only.
    (tmp_path / "other" / names["a"]).write_text(names["a"])
    assert second.read(names) == {"a": "lock not seen", "b": "seen"}
