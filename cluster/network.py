"""The network interface that gloo and NCCL use: the interface with the node's Ray address.

By default gloo announces the address that the host's own name resolves to. On Debian that is
127.0.1.1, which no rank on another host can reach. NCCL has heuristics too. Ray's address of a node
is known to be reachable, because the nodes connect to each other through it.
"""

import os
import socket

import psutil

INTERFACE_VARIABLES = {"GLOO_SOCKET_IFNAME": "{}", "NCCL_SOCKET_IFNAME": "={}"}
"""Variable -> format of its value. Without =, NCCL matches prefixes: eth1 matches eth10."""


def use_interface_of(address: str) -> None:
    """Select the interface for gloo and NCCL, unless the user has selected one."""
    if (interface := interface_of(address)) is not None:
        for name, form in INTERFACE_VARIABLES.items():
            os.environ.setdefault(name, form.format(interface))


def interface_of(address: str) -> str | None:
    """The interface that has `address`; None if no interface has it (NAT)."""
    for name, entries in psutil.net_if_addrs().items():
        for entry in entries:
            # An IPv6 address may end with its interface: fe80::1%eth0.
            is_ip = entry.family in (socket.AF_INET, socket.AF_INET6)
            if is_ip and entry.address.partition("%")[0] == address:
                return name
    return None
