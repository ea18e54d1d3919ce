"""NodeProbe: the actor of `txl doctor` on one node of a cluster."""

import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from cluster.exposure import check_usage_statistics
from cluster.network import use_interface_of
from txl_dist.doctor.connections import ConnectionServer, unreachable
from txl_dist.doctor.finding import Finding
from txl_dist.doctor.network import NetworkSpeed, connect_store, measure_network, open_store
from txl_dist.doctor.request import DoctorRequest, check_this_machine
from txl_dist.doctor.storage import ProbeResult, SharedProbe, existing_parent

NETWORK_SECONDS = 60.0
"""Time limit for the rendezvous of the nodes, and for one collective."""


class NodeProbe:
    """An actor on one node."""

    def check(self, request: DoctorRequest, node: str) -> list[Finding]:
        """The findings of all checks that concern one node."""
        findings = check_this_machine(request, node=node)
        if "exposure" not in request.skip:
            findings += [
                replace(one, check="exposure", node=node) for one in check_usage_statistics()
            ]
        return findings

    def seconds(self) -> float:
        """The clock of the node."""
        return time.time()

    def run_directory(self, run: str) -> str:
        """`run`, or the nearest parent that exists on this node."""
        return str(existing_parent(Path(run)))

    def place_file(self, directory: str) -> str:
        """Write and lock a file; returns its name."""
        self._probe = SharedProbe(directory)
        return self._probe.place()

    def read_probes(self, directory: str, names: Mapping[str, str]) -> dict[str, ProbeResult]:
        """How this node sees the files that the nodes have written."""
        return SharedProbe(directory).read(names)

    def remove_file(self) -> None:
        """Remove what `place_file` wrote."""
        self._probe.remove()

    def listen(self, host: str) -> tuple[str, int]:
        """Accept connections; returns the address."""
        self._server = ConnectionServer(host)
        return self._server.address

    def unreachable(self, addresses: Mapping[str, tuple[str, int]]) -> dict[str, str]:
        """Node -> error, of the nodes to which this one cannot connect."""
        return unreachable(addresses)

    def has_gpu(self) -> bool:
        import torch

        return torch.cuda.is_available()

    def open_store(self, host: str, num_nodes: int) -> int:
        """Of the first node: open the store of the process group; returns its port."""
        self._store = open_store(host, num_nodes, limit_seconds=NETWORK_SECONDS)
        return int(self._store.port)

    def measure(
        self, rank: int, num_nodes: int, own_host: str, store: tuple[str, int], backend: str
    ) -> NetworkSpeed:
        """Measure the network together with the other nodes."""
        use_interface_of(own_host)
        own_store = (
            self._store
            if rank == 0
            else connect_store(*store, num_nodes, limit_seconds=NETWORK_SECONDS)
        )
        return measure_network(
            rank, num_nodes, own_store, backend=backend, limit_seconds=NETWORK_SECONDS
        )
