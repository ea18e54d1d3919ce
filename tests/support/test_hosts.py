"""The cable in user space delays and loses what it says."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.support.commands import wait_until
from tests.support.hosts import Host, Link, two_hosts

pytestmark = pytest.mark.cluster
ECHO = """
import socket
server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
server.bind(("0.0.0.0", 7))
while True:
    data, sender = server.recvfrom(100)
    server.sendto(data, sender)
"""
PROBE = """
import socket, sys, time
client = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
client.settimeout(0.3)
for number in range(int(sys.argv[2])):
    began = time.monotonic()
    client.sendto(b"%d" % number, (sys.argv[1], 7))
    try:
        while client.recv(100) != b"%d" % number:
            pass
        print(time.monotonic() - began)
    except OSError:
        print("lost")
"""


@contextmanager
def echoing_hosts(link: Link) -> Iterator[tuple[Host, Host]]:
    """Two hosts; the second one sends every packet back."""
    with two_hosts(link=link) as hosts:
        echo = subprocess.Popen([*hosts[1].prefix, sys.executable, "-c", ECHO])
        try:
            wait_until(lambda: "lost" not in probe(hosts, num_packets=1))
            yield hosts
        finally:
            echo.kill()
            echo.wait()


def probe(hosts: tuple[Host, Host], *, num_packets: int) -> list[str]:
    """Round-trip times in seconds, or `lost`."""
    command = (*hosts[0].prefix, sys.executable, "-c", PROBE, hosts[1].address, str(num_packets))
    ended = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
    return ended.stdout.split()


def test_a_cable_delays_and_loses_what_it_says_and_carries_nothing_while_it_is_cut() -> None:
    with echoing_hosts(Link(delay_seconds=0.02, loss=0.2)) as hosts:
        answers = probe(hosts, num_packets=60)
        assert min(float(word) for word in answers if word != "lost") >= 2 * 0.02
        assert 5 < answers.count("lost") < 45  # expected: 60 * (1 - 0.8 ** 2) = 22
        with hosts[1].cut_off():
            assert probe(hosts, num_packets=2) == ["lost"] * 2
        assert probe(hosts, num_packets=20)[1:].count("lost") < 19
