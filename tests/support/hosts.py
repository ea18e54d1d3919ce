"""Two hosts on one machine: network namespaces that a virtual cable connects.

The cable is a veth pair of the kernel, or with a `Link` a cable in user space (`cable.py`) that
delays and loses frames: `tc netem` does the same, but not every kernel has it.
"""

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from tests.support.cable import Cable, Link


@dataclass(frozen=True)
class Host:
    """One end of the cable."""

    namespace: str
    interface: str
    address: str
    name: str = "localhost"
    """By default the host's own name resolves to 127.x on the host, as on Debian."""
    hosts_file: Path | None = None
    """What its programs see as /etc/hosts, if that is not the file of this machine."""

    @property
    def prefix(self) -> tuple[str, ...]:
        """Words before a command that run it on this host."""
        # `ip netns exec` gives the command its own mounts, which nothing else sees.
        hosts_file = f"mount --bind '{self.hosts_file}' /etc/hosts && " if self.hosts_file else ""
        script = f'hostname "$0" && {hosts_file}exec "$@"'
        named = ("unshare", "--uts", "sh", "-c", script, self.name)
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

    def limit_rate(self, *, bits_per_second: int) -> None:
        """Limit what this host sends, with the kernel's token bucket filter."""
        bucket = ("tbf", "rate", f"{bits_per_second}bit", "burst", "32kb", "latency", "100ms")
        must("tc", "-n", self.namespace, "qdisc", "add", "dev", self.interface, "root", *bucket)

    def kill_processes(self) -> None:
        """Kill what still runs on this host, such as daemons that have left their parents."""
        for pid in run("ip", "netns", "pids", self.namespace).stdout.split():
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)


@contextmanager
def two_hosts(
    *, link: Link | None = None, names_in: Path | None = None
) -> Iterator[tuple[Host, Host]]:
    """Create two connected hosts. Skips the test if namespaces cannot be created.

    With `names_in`, a directory, their names are host-a and host-b, and both hosts resolve both
    names to the addresses of the cable.
    """
    if os.geteuid() != 0 or shutil.which("ip") is None or shutil.which("unshare") is None:
        pytest.skip("network namespaces need root and the commands ip and unshare")
    first, second = hosts = [
        Host(f"txl-{os.getpid()}-{end}", f"txl{os.getpid() % 10**6}{end}", f"10.77.31.{number}")
        for number, end in enumerate("ab", start=1)
    ]
    if names_in is not None:
        file = names_in / "hosts"
        lines = [f"{host.address} host-{host.namespace[-1]}\n" for host in hosts]
        file.write_text("".join(["127.0.0.1 localhost\n", *lines]))
        hosts = [replace(h, name=f"host-{h.namespace[-1]}", hosts_file=file) for h in hosts]
    made = run("ip", "netns", "add", first.namespace)
    if made.returncode != 0:
        pytest.skip(f"no network namespaces here: {made.stderr.decode().strip()}")
    with ExitStack() as stack:
        for host in hosts:
            stack.callback(run, "ip", "netns", "delete", host.namespace)
            stack.callback(host.kill_processes)
        must("ip", "netns", "add", second.namespace)
        if link is None:
            peer = ("type", "veth", "peer", "name", second.interface, "netns", second.namespace)
            must("ip", "link", "add", first.interface, "netns", first.namespace, *peer)
        else:
            cable = stack.enter_context(Cable(link, first.interface, second.interface))
            for host in hosts:
                must("ip", "link", "set", host.interface, "netns", host.namespace)
            cable.start()
        for host in hosts:
            address = ("addr", "add", f"{host.address}/24", "dev", host.interface)
            must("ip", "-n", host.namespace, *address)
            must("ip", "-n", host.namespace, "link", "set", host.interface, "up")
            must("ip", "-n", host.namespace, "link", "set", "lo", "up")
        yield hosts[0], hosts[1]


def run(*words: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(words, check=False, capture_output=True)


def must(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True)
