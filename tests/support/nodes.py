"""Ray nodes as an administrator starts them, with `ray start`, for tests of `--on ADDRESS`."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.support.commands import wait_until


@dataclass
class RayNode:
    """One `ray start --block`. `address` is the address of its cluster."""

    address: str
    process: subprocess.Popen[bytes]
    log: Path

    def processes(self) -> list[psutil.Process]:
        """`ray start` and its descendants."""
        with suppress(psutil.NoSuchProcess):
            parent = psutil.Process(self.process.pid)
            return [parent, *parent.children(recursive=True)]
        return []

    def kill(self) -> None:
        """Kill all processes of the node, as a power cut does."""
        for process in self.processes():
            with suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGKILL)
        self.process.wait()


def token_environment(directory: Path) -> dict[str, str]:
    """The environment variables that all nodes and drivers of one cluster need."""
    token = directory / "token"
    if not token.exists():
        token.touch(mode=0o600)
        token.write_text("0123456789abcdef" * 4)
    # Ray prefers RAY_AUTH_TOKEN, which a private Ray of this process may have set.
    return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token), "RAY_AUTH_TOKEN": ""}


@contextmanager
def ray_node(
    directory: Path,
    *,
    join: str | None = None,
    ip: str = "127.0.0.1",
    num_cpus: int = 1,
    inside: Sequence[str] = (),
    words: Sequence[str] = (),
    port: int | None = None,
) -> Iterator[RayNode]:
    """Start a head, or a node that joins the cluster at `join`.

    `inside` are words before the command, `words` more options of `ray start`. `port` of a head: a
    free one by default.
    """
    if join is None:
        port = port or _free_port()
        options, address = ("--head", f"--port={port}", "--include-dashboard=false"), f"{ip}:{port}"
    else:
        options, address = (f"--address={join}",), join
    log = directory / f"node-{len(list(directory.glob('node-*.log')))}.log"
    command = (
        *inside,
        *(sys.executable, "-m", "ray.scripts.scripts", "start", "--block"),
        *(*options, f"--node-ip-address={ip}", f"--num-cpus={num_cpus}"),
        "--object-store-memory=100000000",
        *words,
    )
    with log.open("wb") as file:
        process = subprocess.Popen(
            command, stdout=file, stderr=file, env={**os.environ, **token_environment(directory)}
        )
    node = RayNode(address, process, log)
    try:
        wait_until(lambda: b"Ray runtime started" in log.read_bytes())
        yield node
    finally:
        node.kill()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
