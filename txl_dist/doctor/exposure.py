"""Who can use Ray on this machine: its dashboards, and the file with its token.

The dashboard's port also serves the Jobs API, which runs any command as the user of Ray. So it must
require a token, and listen on the loopback interface only: tokens travel unencrypted. A Ray whose
dashboard requires no token requires none anywhere.
"""

import http.client
import json
import os
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Literal

import psutil

from txl_dist.doctor.finding import Finding, note, ok, problem

DASHBOARD_PORT = 8265
RESPONSE_SECONDS = 3.0
_MAX_RESPONSE_BYTES = 4096

Answer = Literal["open", "protected", "other"]
"""`open`: Ray, without a token. `protected`: 401 or 403. `other`: no Ray, or no answer."""


def check_exposure(ports: Iterable[int] = (DASHBOARD_PORT,)) -> Iterator[Finding]:
    """Check the dashboards at `ports` of this machine, and who can read Ray's token."""
    for port in ports:
        yield from _check_dashboard(port)
    home = Path(os.environ.get("HOME", "/"))
    path = Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or home / ".ray" / "auth_token")
    try:
        mode = stat.S_IMODE(path.stat().st_mode)
    except OSError:
        return
    if mode & 0o077:
        yield problem(
            f"{path}, the token of Ray, has mode {mode:o}: other users of this machine can read it",
            expected="mode 600",
            advice=f"chmod 600 {path}; to create one: umask 077 && ray get-auth-token --generate",
        )


def _check_dashboard(port: int) -> Iterator[Finding]:
    addresses = sorted(
        {
            connection.laddr.ip
            for connection in psutil.net_connections(kind="tcp")
            if connection.status == psutil.CONN_LISTEN
            and connection.laddr
            and connection.laddr.port == port
        }
    )
    answers = {_answer_without_token(address, port) for address in addresses}
    where = f"port {port} on {', '.join(addresses)}"
    if not answers:
        yield ok(f"nothing listens on port {port} (Ray dashboard, Jobs API)")
        return
    if answers == {"other"}:
        yield note(f"{where}: another program than Ray, or no answer", advice="see ray status")
        return
    if "open" in answers:
        yield problem(
            f"{where}: the Ray dashboard and the Jobs API answer without a token, so everyone who "
            "reaches the port can run commands",
            expected="401 without a token",
            advice="stop that Ray (ray stop), create a token (ray get-auth-token --generate), and "
            "start it again: RAY_AUTH_MODE=token ray start ...",
        )
    loopback = ("127.", "::1", "::ffff:127.")
    if other := [address for address in addresses if not address.startswith(loopback)]:
        yield problem(
            f"port {port}: the Ray dashboard and the Jobs API listen on {', '.join(other)}",
            expected="127.0.0.1 only: the token travels unencrypted",
            advice="ray start --dashboard-host=127.0.0.1, and reach it by ssh -L or kubectl "
            "port-forward; where a network policy protects the port: --skip exposure",
        )
    elif "open" not in answers:
        yield ok(f"port {port}: requires a token, on the loopback interface only")


def _answer_without_token(address: str, port: int) -> Answer:
    """Ask Ray's API without a token; `address` is one of this machine."""
    host = "127.0.0.1" if address in ("0.0.0.0", "::") else address.removeprefix("::ffff:")
    connection = http.client.HTTPConnection(host, port, timeout=RESPONSE_SECONDS)
    try:
        connection.request("GET", "/api/version")  # not through a proxy, as urllib would
        response = connection.getresponse()
        content = response.read(_MAX_RESPONSE_BYTES)
        if response.status in (401, 403):
            return "protected"
        is_ray = response.status == 200 and "ray_version" in json.loads(content)
        return "open" if is_ray else "other"
    except (OSError, http.client.HTTPException, ValueError, TypeError):
        return "other"
    finally:
        connection.close()
