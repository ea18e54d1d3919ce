"""Differences between nodes are attributed to the right node, and the slowest pair is named."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import combinations

import pytest

from tests.support.commands import ENVIRONMENT
from tests.support.hosts import must, run
from txl_dist.doctor.finding import Finding, ok
from txl_dist.doctor.nodes import (
    ClockReading,
    LinkSpeed,
    NetworkSpeed,
    compare_clocks,
    compare_probes,
    compare_values,
    judge_connections,
    judge_network,
    pair_rounds,
)

pytestmark = pytest.mark.cluster

NODES = ["a", "b", "c"]
RANK = """
import json, sys
from txl_dist.doctor.nodes import connect_store, measure_network, open_store
rank, first = int(sys.argv[1]), sys.argv[2]
if rank == 0:
    store = open_store(first, 3, limit_seconds=60)
    print(store.port, flush=True)
else:
    store = connect_store(first, int(sys.argv[3]), 3, limit_seconds=60)
speed = measure_network(rank, 3, store, backend="gloo", limit_seconds=60)
print(json.dumps([[*pair, link.latency_seconds, link.bytes_per_second]
                  for pair, link in speed.pairs.items()]))
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


def measure(hosts: dict[str, str]) -> list[NetworkSpeed]:
    """Start one rank on each host; their results."""
    namespaces, first = list(hosts), next(iter(hosts.values()))
    processes = [start(namespaces[0], RANK, 0, first)]
    assert processes[0].stdout is not None
    port = processes[0].stdout.readline().strip()
    processes += [
        start(name, RANK, rank, first, port) for rank, name in enumerate(namespaces[1:], 1)
    ]
    speeds = []
    for process in processes:
        output, _ = process.communicate(timeout=120)
        assert process.returncode == 0
        pairs = {(a, b): LinkSpeed(seconds, speed) for a, b, seconds, speed in json.loads(output)}
        speeds.append(NetworkSpeed("gloo", LinkSpeed(0.001, 1e9), pairs))
    return speeds


def test_the_host_with_the_slow_link_is_named() -> None:
    with hosts_on_a_switch() as hosts:
        *_, slow = hosts
        limit = ("tbf", "rate", "40mbit", "burst", "64kb", "latency", "400ms")
        must("ip", "netns", "exec", slow, "tc", "qdisc", "add", "dev", "eth0", "root", *limit)
        speeds = measure(hosts)
    *_, finding = judge_network(NODES, speeds)
    assert (finding.status, finding.node) == ("problem", "c"), speeds
    assert finding.found.startswith(("slowest pair a - c", "slowest pair b - c"))
    assert "2 of 3 pairs slow" in finding.found
    slow = {pair: link.bytes_per_second for one in speeds for pair, link in one.pairs.items()}
    # A message and its return: one direction has 40 Mbit/s, the other is much faster.
    assert 4e6 < slow[0, 2] < 20e6, slow
    assert slow[0, 1] > 50e6, slow


def test_hosts_that_cannot_connect_are_named() -> None:
    with hosts_on_a_switch() as hosts:
        first, second, third = hosts
        listener = start(
            third,
            "from txl_dist.doctor.nodes import ConnectionServer; import time\n"
            "print(ConnectionServer('10.77.32.3').address[1], flush=True); time.sleep(600)",
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


def test_the_node_whose_clock_differs_is_named_also_if_it_is_the_driver() -> None:
    here = {"this machine": ClockReading(0.0, 0.0), "a": ClockReading(7.0, 0.01)}
    (finding,) = compare_clocks({**here, "b": ClockReading(7.1, 0.01)})
    assert finding.node == "this machine"
    assert "7.0 s behind" in finding.found
    (fine,) = compare_clocks({**here, "a": ClockReading(-0.4, 0.01)})
    assert fine.status == "ok"
    # A slow answer says nothing about the clock.
    (fine,) = compare_clocks({**here, "a": ClockReading(3.0, 2.5)})
    assert fine.status == "ok"


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


def test_all_pairs_are_measured_once_in_rounds_of_disjoint_pairs() -> None:
    for num_ranks in (2, 3, 4, 7, 8):
        rounds = pair_rounds(num_ranks)
        pairs = [pair for pairs in rounds for pair in pairs]
        assert sorted(pairs) == list(combinations(range(num_ranks), 2))
        for pairs in rounds:
            ranks = [rank for pair in pairs for rank in pair]
            assert len(ranks) == len(set(ranks))


def measured(pairs: dict[tuple[int, int], float]) -> list[NetworkSpeed]:
    all_reduce = LinkSpeed(1e-4, 1e9)
    links = {pair: LinkSpeed(1e-4, speed) for pair, speed in pairs.items()}
    return [NetworkSpeed("gloo", all_reduce, links)]


def test_a_slow_link_is_named_and_a_slow_node_if_all_its_links_are_slow() -> None:
    nodes = ["a", "b", "c", "d"]
    even = {(0, 1): 1e9, (0, 2): 0.9e9, (0, 3): 1e9, (1, 2): 1e9, (1, 3): 1e9, (2, 3): 1e9}
    (fine,) = judge_network(nodes, measured(even))
    assert fine.status == "ok"
    assert "slowest pair a - c: 900 MB/s" in fine.found
    *_, link = judge_network(nodes, measured({**even, (1, 2): 1e8}))
    assert (link.status, link.node) == ("problem", "b - c")
    slow_node = {pair: 1e8 if 3 in pair else speed for pair, speed in even.items()}
    *_, node = judge_network([*nodes, "e"], measured({**slow_node, (0, 4): 1e9, (1, 4): 1e9}))
    assert (node.status, node.node) == ("problem", "d")
    three = {(0, 1): 1e9, (0, 2): 1e8, (1, 2): 1e8}
    *_, node = judge_network(nodes[:3], measured(three))
    assert (node.status, node.node) == ("problem", "c")
