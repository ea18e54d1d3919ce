"""Ray nodes as an administrator starts them, with `ray start`, for `--on ADDRESS` and `txl job`."""

import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from tests.support.commands import ENVIRONMENT, start_txl, wait_until


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
    port: int | None = None,
) -> Iterator[RayNode]:
    """Start a head, or a node that joins the cluster at `join`.

    `inside` are words before the command. `port` of a head: a free one by default.
    """
    if join is None:
        port = port or free_port()
        options, address = ("--head", f"--port={port}", "--include-dashboard=false"), f"{ip}:{port}"
    else:
        options, address = (f"--address={join}",), join
    command = (
        *inside,
        *(sys.executable, "-m", "ray.scripts.scripts", "start", "--block"),
        *(*options, f"--node-ip-address={ip}", f"--num-cpus={num_cpus}"),
        "--object-store-memory=100000000",
    )
    environment = {**os.environ, **token_environment(directory)}
    with ray_start(command, address, directory, env=environment) as node:
        yield node


@contextmanager
def ray_start(
    command: Sequence[str], address: str, directory: Path, **options: Any
) -> Iterator[RayNode]:
    log = directory / f"node-{len(list(directory.glob('node-*.log')))}.log"
    with log.open("wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file, **options)
    node = RayNode(address, process, log)
    try:
        wait_until(lambda: b"Ray runtime started" in log.read_bytes())
        yield node
    finally:
        node.kill()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


PORT_OPTIONS = (
    *("port", "dashboard-port", "dashboard-agent-listen-port", "dashboard-agent-grpc-port"),
    *("runtime-env-agent-port", "metrics-export-port", "ray-client-server-port"),
)


@dataclass
class JobsHead:
    """`ray start --head`, with ports that stay the same when it is started again."""

    directory: Path
    ports: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        with ExitStack() as stack:  # open until all are bound, so that they differ
            for option in PORT_OPTIONS:
                probe = stack.enter_context(socket.socket())
                probe.bind(("127.0.0.1", 0))
                self.ports[option] = probe.getsockname()[1]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.ports['dashboard-port']}"

    @property
    def environment(self) -> dict[str, str]:
        """For users of the cluster."""
        variables = {**token_environment(self.directory), "RAY_API_SERVER_ADDRESS": self.url}
        return {**variables, "RAY_ADDRESS": ""}

    @contextmanager
    def running(self, *, num_cpus: int = 2) -> Iterator[RayNode]:
        environment = {
            **ENVIRONMENT,
            **token_environment(self.directory),
            # Otherwise Ray replaces 127.0.0.1 by the host's address (cluster/connection.py).
            "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        }
        # The code of a job must come from its package.
        environment.pop("PYTHONPATH", None)
        address = f"127.0.0.1:{self.ports['port']}"
        # Sockets are in this directory, and their paths have at most 107 characters.
        with tempfile.TemporaryDirectory(prefix="txl-jobs-", ignore_cleanup_errors=True) as sockets:
            command = (
                *(sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block"),
                *("--node-ip-address=127.0.0.1", "--dashboard-host=127.0.0.1"),
                *("--include-dashboard=true", f"--num-cpus={num_cpus}", f"--temp-dir={sockets}"),
                *(f"--{option}={port}" for option, port in self.ports.items()),
                "--object-store-memory=100000000",
            )
            with ray_start(command, address, self.directory, env=environment, cwd=sockets) as node:
                yield node

    def start(self, *words: object, **environment: str) -> subprocess.Popen[str]:
        """Start `txl job ...` as a user of the cluster."""
        return start_txl("job", *words, environment={**self.environment, **environment})

    def txl(
        self, *words: object, timeout_seconds: float = 240, **environment: str
    ) -> tuple[int, str]:
        """Run `txl job ...`; its exit code and output."""
        process = self.start(*words, **environment)
        output, _ = process.communicate(timeout=timeout_seconds)
        return process.returncode, output
