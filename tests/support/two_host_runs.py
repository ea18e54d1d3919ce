"""Training runs over two hosts: torchrun with one rank on each."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tests.support.commands import ENVIRONMENT
from tests.support.hosts import Host
from tests.support.training_runs import NO_EVALUATION, TINY


def settings(dataset: Path, run: Path, *overrides: str) -> tuple[str, ...]:
    """A tiny run that saves every 5 steps."""
    return (
        f"data.path={dataset}", f"directory={run}", NO_EVALUATION, "tracking.enabled=false",
        "training.checkpoint_interval_steps=5", *overrides,
    )  # fmt: skip


@contextmanager
def torchrun_on(hosts: tuple[Host, Host], *overrides: str) -> Iterator[list[subprocess.Popen[str]]]:
    """Start torchrun with one rank on each host."""
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
