"""Whether every node can open connections to every other one, on any port.

gloo and NCCL connect all ranks through ports that the kernel chooses. A firewall that lets only
Ray's own ports through makes the ranks wait for each other until a time limit, without a name.
"""

import socket
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from txl_dist.doctor.finding import Finding, problem

CONNECT_SECONDS = 3.0
_PARALLEL_CONNECTIONS = 16


class ConnectionServer:
    """Accepts and closes connections at a free port of `host`, until `close`."""

    def __init__(self, host: str) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family)
        self.address = host, int(self._listener.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                self._listener.accept()[0].close()
            except OSError:
                return

    def close(self) -> None:
        self._listener.close()


def unreachable(addresses: Mapping[str, tuple[str, int]]) -> dict[str, str]:
    """Node -> error, of the nodes whose address does not accept a connection from here."""

    def error_of(address: tuple[str, int]) -> str:
        try:
            socket.create_connection(address, CONNECT_SECONDS).close()
        except OSError as error:
            return error.strerror or str(error)
        return ""

    with ThreadPoolExecutor(_PARALLEL_CONNECTIONS) as pool:
        errors = dict(zip(addresses, pool.map(error_of, addresses.values()), strict=True))
    return {node: error for node, error in errors.items() if error}


def judge_connections(failures: Mapping[str, Mapping[str, str]]) -> list[Finding]:
    """A problem for every node that cannot reach another; `failures` is node -> other -> error."""
    return [
        replace(
            problem(
                f"cannot connect to {other}: {error}",
                expected="connections between all nodes, on all TCP ports",
                advice="open the ports between the nodes (security group, firewall, network "
                "policy): ranks use ports that the kernel chooses",
            ),
            node=node,
        )
        for node, others in failures.items()
        for other, error in others.items()
    ]
