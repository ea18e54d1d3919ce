"""A head node with the Jobs API and a token, as an administrator starts it, on 127.0.0.1 only."""

import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.commands import ENVIRONMENT, start_txl, wait_until
from tests.support.nodes import RayNode, token_environment

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
        with ExitStack() as stack:  # all open at once, so that they differ
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
        """Run the head while the context is open."""
        # Sockets are in this directory, and their paths have at most 107 characters.
        sockets = tempfile.mkdtemp(prefix="txl-jobs-")
        command = (
            *(sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block"),
            *("--node-ip-address=127.0.0.1", "--dashboard-host=127.0.0.1"),
            *("--include-dashboard=true", f"--num-cpus={num_cpus}", f"--temp-dir={sockets}"),
            *(f"--{option}={port}" for option, port in self.ports.items()),
            "--object-store-memory=100000000",
        )
        environment = {
            **ENVIRONMENT,
            **token_environment(self.directory),
            # Otherwise Ray replaces 127.0.0.1 by the host's address (cluster/connection.py).
            "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        }
        # The code of a job must come from its package.
        environment.pop("PYTHONPATH", None)
        log = self.directory / f"head-{len(list(self.directory.glob('head-*.log')))}.log"
        with log.open("wb") as file:
            process = subprocess.Popen(
                command, stdout=file, stderr=file, env=environment, cwd=sockets
            )
        node = RayNode(f"127.0.0.1:{self.ports['port']}", process, log)
        try:
            wait_until(lambda: b"Ray runtime started" in log.read_bytes())
            yield node
        finally:
            node.kill()
            shutil.rmtree(sockets, ignore_errors=True)

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
