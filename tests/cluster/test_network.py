"""The interface that ranks talk through: found by a node's address, left to the user if set."""

import os
import socket

import psutil
import pytest

from cluster.network import INTERFACE_VARIABLES, interface_of, use_interface_of


def test_the_interface_of_an_address_is_the_one_that_carries_it() -> None:
    for addresses in psutil.net_if_addrs().values():
        for one in addresses:
            if one.family == socket.AF_INET:
                found = interface_of(one.address)
                assert found is not None  # one of several, if several carry it
                assert one.address in {other.address for other in psutil.net_if_addrs()[found]}
    assert interface_of("192.0.2.254") is None  # reserved for documentation: nobody has it


def test_an_interface_that_the_user_has_set_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    gloo, nccl = INTERFACE_VARIABLES
    loopback = interface_of("127.0.0.1")
    assert loopback is not None
    monkeypatch.setenv(gloo, "eth7")
    monkeypatch.delenv(nccl, raising=False)
    use_interface_of("127.0.0.1")
    assert (os.environ[gloo], os.environ[nccl]) == ("eth7", f"={loopback}")
    monkeypatch.delenv(nccl)


def test_an_address_of_no_interface_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in INTERFACE_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    use_interface_of("192.0.2.254")
    assert not set(INTERFACE_VARIABLES) & set(os.environ)
