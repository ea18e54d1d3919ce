"""Check that a Ray cluster responds at an address, because `ray.init` has no time limit there."""

import socket

from txl_dist.errors import ConfigError

RESPONSE_SECONDS = 5.0
"""Time limit for the connection, and again for the response."""
_HTTP2_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
"""The first bytes of every gRPC client: connection preface and empty SETTINGS (RFC 9113, 3.4)."""
_SETTINGS_FRAME = 4


def check_cluster(address: str, *, option: str = "--on") -> None:
    """Raise ConfigError, within seconds, unless a Ray cluster responds and accepts our token.

    `option` is that of the command line with the address, for the message.
    """
    host_and_port = _canonical(address, option)
    if not responds(host_and_port):
        raise ConfigError(_unusable(address, f"nothing answers at {host_and_port}", option))
    if "://" in address:
        return  # a Ray client server; GcsClient does not apply, and its client has a time limit
    from ray import exceptions
    from ray._raylet import GcsClient  # type: ignore[attr-defined]

    try:
        GcsClient(address=host_and_port)
    except exceptions.RayError as error:
        raise ConfigError(_unusable(address, str(error), option)) from None


def responds(host_and_port: str) -> bool:
    """Whether a gRPC server responds there. An open port alone may belong to any program."""
    host, _, port = host_and_port.rpartition(":")
    try:
        with socket.create_connection(
            (host.strip("[]"), int(port)), RESPONSE_SECONDS
        ) as connection:
            connection.settimeout(RESPONSE_SECONDS)
            connection.sendall(_HTTP2_PREFACE)
            # An HTTP/2 server sends SETTINGS first; a frame header has 9 bytes, byte 3 is its type.
            header = connection.recv(9, socket.MSG_WAITALL)
    except OSError:
        return False
    return len(header) == 9 and header[3] == _SETTINGS_FRAME


def _canonical(address: str, option: str) -> str:
    """host:port for `auto`, the address of a cluster or the address of a Ray client server."""
    from ray._private.services import canonicalize_bootstrap_address

    try:
        host_and_port = canonicalize_bootstrap_address(address.partition("://")[2] or address)
    except (ConnectionError, ValueError, OSError) as error:
        raise ConfigError(_unusable(address, str(error), option)) from None
    if host_and_port is None or not host_and_port.rpartition(":")[2].isdigit():
        raise ConfigError(_unusable(address, "that is not host:port", option))
    return host_and_port


def _unusable(address: str, reason: str, option: str) -> str:
    private = "; or use --on ray, which starts a private Ray" if option == "--on" else ""
    return (
        f"no Ray cluster can be used at {option} {address}: {reason}. Check that it runs (ray "
        "status there), its port (default 6379), the network, and its token on this machine "
        f"(RAY_AUTH_MODE=token, RAY_AUTH_TOKEN_PATH){private}"
    )
