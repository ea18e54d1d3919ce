"""The interface for gloo and NCCL: that of the node's address, unless the user has set one."""

import os
import socket

import psutil
import pytest

from cluster.network import INTERFACE_VARIABLES, interface_of, use_interface_of


def test_the_interface_of_an_address_has_that_address() -> None:
    for addresses in psutil.net_if_addrs().values():
        for entry in addresses:
            if entry.family == socket.AF_INET:
                interface = interface_of(entry.address)
                assert interface is not None  # one of them, if several have the address
                assert entry.address in {e.address for e in psutil.net_if_addrs()[interface]}
    assert interface_of("192.0.2.254") is None  # reserved for documentation (RFC 5737)


def test_an_interface_that_the_user_has_set_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    gloo, nccl = INTERFACE_VARIABLES
    loopback = interface_of("127.0.0.1")
    assert loopback is not None
    monkeypatch.setenv(gloo, "eth7")
    monkeypatch.delenv(nccl, raising=False)
    use_interface_of("127.0.0.1")
    assert (os.environ[gloo], os.environ[nccl]) == ("eth7", f"={loopback}")
    monkeypatch.delenv(nccl)


def test_an_address_without_an_interface_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in INTERFACE_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    use_interface_of("192.0.2.254")
    assert not set(INTERFACE_VARIABLES) & set(os.environ)
