"""Which network interface the ranks of a node talk through: the one with the node's Ray address.

Left alone, gloo offers the address that the host's own name resolves to, which on Debian is
127.0.1.1: no rank on another host can reach it. NCCL guesses as well. Ray's address of a node is
known to be reachable, because the nodes found each other by it.
"""

import os
import socket

import psutil
import ray
from ray.train.backend import Backend
from ray.train.torch import TorchConfig

INTERFACE_VARIABLES = {"GLOO_SOCKET_IFNAME": "{}", "NCCL_SOCKET_IFNAME": "={}"}
"""And how each names one interface. Without =, NCCL would take eth10 for eth1 as well."""


class NodeInterfaceTorchConfig(TorchConfig):
    """TorchConfig whose ranks use their node's interface. Ray Train looks up `backend_cls`."""

    @property
    def backend_cls(self) -> type[Backend]:
        return _NodeInterfaceBackend


class _NodeInterfaceBackend(TorchConfig().backend_cls):  # type: ignore[misc]
    def on_start(self, worker_group: object, backend_config: TorchConfig) -> None:
        """Ray Train calls this when the ranks are up; the process group is made in here."""
        worker_group.execute(use_node_interface)  # type: ignore[attr-defined]
        super().on_start(worker_group, backend_config)


def use_node_interface() -> None:
    """In a rank, before it connects to the others."""
    use_interface_of(ray.util.get_node_ip_address())


def use_interface_of(address: str) -> None:
    """Choose the interface for gloo and NCCL, unless the user has chosen one."""
    if (interface := interface_of(address)) is not None:
        for name, form in INTERFACE_VARIABLES.items():
            os.environ.setdefault(name, form.format(interface))


def interface_of(address: str) -> str | None:
    """The interface that carries `address`; None if none does (NAT)."""
    for name, addresses in psutil.net_if_addrs().items():
        for found in addresses:
            # An IPv6 address may have its interface appended: fe80::1%eth0.
            if (
                found.family in (socket.AF_INET, socket.AF_INET6)
                and address == (found.address.partition("%")[0])
            ):
                return name
    return None
