"""Differences between nodes are attributed to the right node."""

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
    compare_probes,
    compare_values,
    judge_connections,
    place_probe,
    read_probes,
    remove_probes,
)

NODES = ["a", "b", "c"]
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
        env=ENVIRONMENT,
    )


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
    (fine,) = judge_connections({"a": {}, "b": {}})
    assert (fine.status, fine.node) == ("ok", "all nodes")


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
    names = {"a": place_probe(str(tmp_path)), "b": place_probe(str(tmp_path))}
    assert read_probes(str(tmp_path), names) == {"a": "seen", "b": "seen"}
    remove_probes()
    assert list(tmp_path.iterdir()) == []


def test_files_and_locks_that_are_not_shared_are_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("txl_dist.doctor.nodes.SHARED_WAIT_SECONDS", 0.0)
    other = tmp_path / "other"
    other.mkdir()
    names = {"a": place_probe(str(tmp_path)), "b": place_probe(str(other))}
    (tmp_path / names["b"]).write_text("of another file system")
    assert read_probes(str(tmp_path), names) == {"a": "seen", "b": "other content"}
    assert read_probes(str(other), names) == {"a": "missing", "b": "seen"}
    # A copy of the file has no lock: as if locks were valid on one node only.
    (other / names["a"]).write_text(names["a"])
    assert read_probes(str(other), names) == {"a": "lock not seen", "b": "seen"}
    remove_probes()
