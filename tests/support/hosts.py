"""Two hosts on one machine, and runs on them: network namespaces that a virtual cable connects.

The cable is a veth pair of the kernel, or with a `Link` a `Cable` in user space that delays and
loses frames: `tc netem` does the same, but not every kernel has it.
"""

import fcntl
import heapq
import os
import random
import selectors
import shutil
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

import pytest

from tests.support.commands import ENVIRONMENT
from tests.support.training_runs import NO_EVALUATION, TINY

TUN = Path("/dev/net/tun")
# From linux/if_tun.h.
SET_INTERFACE = 0x400454CA
TAP, NO_PACKET_INFO = 0x0002, 0x1000
MAX_FRAME_BYTES = 1 << 16
POLL_SECONDS = 0.2


@dataclass(frozen=True)
class Link:
    """How bad a cable is, in each direction."""

    delay_seconds: float = 0.0
    loss: float = 0.0
    """Probability that a frame is lost."""


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


# --- the cable in user space ----------------------------------------------------------------------


class Cable:
    """A cable that delays and loses Ethernet frames: a thread moves them between two TAP devices.

    A context manager: its entry creates both interfaces, its exit removes them. `start`, after they
    have been moved to their hosts, connects them. Skips the test if there are no TAP devices.
    """

    def __init__(self, link: Link, *interfaces: str) -> None:
        if not TUN.exists():
            pytest.skip(f"{TUN} does not exist: this kernel cannot delay or lose packets")
        self._link, self._interfaces = link, interfaces
        self._ends: list[int] = []
        self._random = random.Random(0)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._move_frames, name="cable", daemon=True)

    def __enter__(self) -> Self:
        for name in self._interfaces:
            end = os.open(TUN, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
            self._ends.append(end)
            fcntl.ioctl(
                end, SET_INTERFACE, struct.pack("16sH", name.encode(), TAP | NO_PACKET_INFO)
            )
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()
        for end in self._ends:
            os.close(end)

    def start(self) -> None:
        self._thread.start()

    def _move_frames(self) -> None:
        first, second = self._ends
        selector = selectors.DefaultSelector()
        selector.register(first, selectors.EVENT_READ, second)
        selector.register(second, selectors.EVENT_READ, first)
        frames: list[tuple[float, int, int, bytes]] = []  # a heap: when, number, to, frame
        number = 0
        while not self._stop.is_set():
            wait = frames[0][0] - time.monotonic() if frames else POLL_SECONDS
            for key, _ in selector.select(min(max(wait, 0.0), POLL_SECONDS)):
                with suppress(OSError):  # BlockingIOError: all frames are read; else: link down
                    while True:
                        frame = os.read(key.fd, MAX_FRAME_BYTES)
                        if self._random.random() >= self._link.loss:
                            number += 1
                            when = time.monotonic() + self._link.delay_seconds
                            heapq.heappush(frames, (when, number, key.data, frame))
            while frames and frames[0][0] <= time.monotonic():
                _, _, end, frame = heapq.heappop(frames)
                with suppress(OSError):  # the other end is down, or its queue is full
                    os.write(end, frame)


# --- training runs --------------------------------------------------------------------------------


def settings(dataset: Path, run: Path, *overrides: str) -> tuple[str, ...]:
    """A tiny run that saves every 5 steps."""
    return (
        f"data.path={dataset}", f"directory={run}", NO_EVALUATION, "tracking.enabled=false",
        "training.checkpoint_interval_steps=5", *overrides,
    )  # fmt: skip


@contextmanager
def torchrun_on(hosts: tuple[Host, Host], *overrides: str) -> Iterator[list[subprocess.Popen[str]]]:
    with ExitStack() as stack:
        agents = []
        for number, host in enumerate(hosts):
            launch = (
                "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1",
                "--node-rank", str(number),
                "--master-addr", hosts[0].address, "--master-port", "29411",
                "-m", "txl_dist", "train", str(TINY),
            )  # fmt: skip
            agent = stack.enter_context(
                subprocess.Popen(
                    [*host.prefix, sys.executable, "-m", *launch, *overrides],
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                    env={**ENVIRONMENT, "GLOO_SOCKET_IFNAME": host.interface},
                )
            )
            stack.callback(agent.kill)
            agents.append(agent)
        yield agents


def outputs_of(agents: list[subprocess.Popen[str]], *, timeout_seconds: float) -> list[str]:
    """Wait for the end of all agents; what each has printed."""
    return [agent.communicate(timeout=timeout_seconds)[0] for agent in agents]
