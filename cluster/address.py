"""Whether a Ray cluster answers at an address, asked before Ray itself asks without end."""

import socket

from txl_dist.errors import ConfigError

ANSWER_SECONDS = 5.0
"""How long a connection, and then an answer, is waited for."""
_HTTP2_HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
"""What every gRPC client says first: the preface of HTTP/2 (RFC 9113, 3.4), no settings."""
_SETTINGS_FRAME = 4


def check_cluster(address: str) -> None:
    """Raises ConfigError, within seconds, unless a Ray cluster answers and accepts our token."""
    host_and_port = _canonical(address)
    if not answers(host_and_port):
        raise ConfigError(_no_cluster(address, f"nothing answers at {host_and_port}"))
    if "://" in address:
        return  # not the server asked below; the Ray client has its own time limit
    from ray import exceptions
    from ray._raylet import GcsClient  # type: ignore[attr-defined]

    try:
        GcsClient(address=host_and_port)
    except exceptions.RayError as error:
        raise ConfigError(_no_cluster(address, str(error))) from None


def answers(host_and_port: str) -> bool:
    """Whether a gRPC server answers there: a port that is merely open may belong to anything."""
    host, _, port = host_and_port.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), ANSWER_SECONDS) as connection:
            connection.settimeout(ANSWER_SECONDS)
            connection.sendall(_HTTP2_HELLO)
            header = connection.recv(9, socket.MSG_WAITALL)
    except OSError:
        return False
    return len(header) == 9 and header[3] == _SETTINGS_FRAME


def _canonical(address: str) -> str:
    """host:port of `auto`, a cluster's address or that of a Ray client server."""
    from ray._private.services import canonicalize_bootstrap_address

    try:
        host_and_port = canonicalize_bootstrap_address(address.partition("://")[2] or address)
    except (ConnectionError, ValueError, OSError) as error:
        raise ConfigError(_no_cluster(address, str(error))) from None
    if host_and_port is None or not host_and_port.rpartition(":")[2].isdigit():
        raise ConfigError(_no_cluster(address, "that is not host:port"))
    return host_and_port


def _no_cluster(address: str, reason: str) -> str:
    return (
        f"no Ray cluster can be used at --on {address}: {reason}. Check that it runs (ray status "
        "there), its address and port (6379 unless it was started with another), the network "
        "between, and that its token is here (RAY_AUTH_MODE=token, RAY_AUTH_TOKEN_PATH); or leave "
        "the address out: --on ray starts one here"
    )
