"""Two hosts on one machine: network namespaces that a virtual cable (veth pair) connects."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest


@dataclass(frozen=True)
class Host:
    """One end of the cable."""

    namespace: str
    interface: str
    address: str

    @property
    def prefix(self) -> tuple[str, ...]:
        """Words before a command that run it on this host.

        As on Debian, the host's own name resolves to 127.x on the host.
        """
        named = ("unshare", "--uts", "sh", "-c", 'hostname localhost; exec "$@"', "sh")
        return ("ip", "netns", "exec", self.namespace, *named)

    @contextmanager
    def cut_off(self) -> Iterator[None]:
        """While the context is open the link is down: packets are lost, connections stay open."""
        link = ("ip", "-n", self.namespace, "link", "set", self.interface)
        must(*link, "down")
        try:
            yield
        finally:
            must(*link, "up")


@contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """Create two connected hosts. Skips the test if namespaces cannot be created."""
    if os.geteuid() != 0 or shutil.which("ip") is None or shutil.which("unshare") is None:
        pytest.skip("network namespaces need root and the commands ip and unshare")
    first, second = (
        Host(f"txl-{os.getpid()}-{end}", f"txl{os.getpid() % 10**6}{end}", f"10.77.31.{number}")
        for number, end in enumerate("ab", start=1)
    )
    made = run("ip", "netns", "add", first.namespace)
    if made.returncode != 0:
        pytest.skip(f"no network namespaces here: {made.stderr.decode().strip()}")
    try:
        must("ip", "netns", "add", second.namespace)
        peer = ("type", "veth", "peer", "name", second.interface, "netns", second.namespace)
        must("ip", "link", "add", first.interface, "netns", first.namespace, *peer)
        for host in (first, second):
            address = ("addr", "add", f"{host.address}/24", "dev", host.interface)
            must("ip", "-n", host.namespace, *address)
            must("ip", "-n", host.namespace, "link", "set", host.interface, "up")
            must("ip", "-n", host.namespace, "link", "set", "lo", "up")
        yield first, second
    finally:
        for host in (first, second):
            run("ip", "netns", "delete", host.namespace)


def run(*words: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(words, check=False, capture_output=True)


def must(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True)
