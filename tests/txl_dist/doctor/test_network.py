"""The slowest pair of three hosts: network namespaces on a bridge, one with a limited rate."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.support.commands import ENVIRONMENT
from tests.support.hosts import must, run
from txl_dist.doctor.connections import judge_connections
from txl_dist.doctor.network import LinkSpeed, NetworkSpeed, judge_network

pytestmark = pytest.mark.cluster

NODES = ["a", "b", "c"]
RANK = """
import json, sys
from txl_dist.doctor.network import connect_store, measure_network, open_store
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
from txl_dist.doctor.connections import unreachable
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
            "from txl_dist.doctor.connections import ConnectionServer; import time\n"
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
