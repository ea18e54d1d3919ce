"""Servers that a run uses, or that anyone could use: MLflow, and Ray's dashboard and head.

The dashboard's port also serves the Jobs API, which runs any command as the user of Ray. So it must
require a token, and listen on the loopback interface only: tokens travel unencrypted. The head node
must require the token too.
"""

import http.client
import json
import os
import stat
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Literal

import psutil

from data_pipeline.system.sources import shown
from txl_dist.doctor.finding import Finding, note, ok, problem

DASHBOARD_PORT = 8265
RESPONSE_SECONDS = 3.0
_MAX_RESPONSE_BYTES = 4096
_ALL_INTERFACES = ("0.0.0.0", "::")
_LOOPBACK = ("127.", "::1", "::ffff:127.")

Answer = Literal["open", "protected", "other"]
"""`open`: Ray, without a token. `protected`: 401 or 403. `other`: no Ray, or no answer."""


def check_exposure(ports: Iterable[int] = (DASHBOARD_PORT,)) -> list[Finding]:
    """Check the dashboards at `ports` of this machine, and who can read Ray's token."""
    return [*_check_dashboards(ports), *check_token_file(os.environ)]


def check_token_file(environment: Mapping[str, str]) -> list[Finding]:
    """A problem if other users of this machine can read the token file. [] if there is none."""
    default = Path(environment.get("HOME", "/")) / ".ray" / "auth_token"
    path = Path(environment.get("RAY_AUTH_TOKEN_PATH") or default)
    try:
        mode = stat.S_IMODE(path.stat().st_mode)
    except OSError:
        return []
    if not mode & 0o077:
        return [ok("only this user can read Ray's token")]
    return [
        problem(
            f"{path}, the token of Ray, has mode {mode:o}: other users of this machine can read it",
            expected="mode 600",
            advice=f"chmod 600 {path}; to create one: umask 077 && ray get-auth-token --generate",
        )
    ]


def _check_dashboards(ports: Iterable[int]) -> list[Finding]:
    listening = {port: listening_addresses(port) for port in ports}
    numbers = ", ".join(map(str, listening))
    if not any(listening.values()):
        return [ok(f"nothing listens on port {numbers} (Ray dashboard, Jobs API)")]
    findings = [
        finding
        for port, addresses in listening.items()
        for finding in judge_exposure(
            port, {address: answer_without_token(address, port) for address in addresses}
        )
    ]
    return findings or [ok(f"port {numbers}: requires a token, on the loopback interface only")]


def judge_exposure(port: int, answers: Mapping[str, Answer]) -> list[Finding]:
    """The problems of one port; `answers` is address on which it listens -> its answer."""
    if not answers:
        return []
    shown = f"port {port} on {', '.join(answers)}"
    if set(answers.values()) == {"other"}:
        return [note(f"{shown}: another program than Ray, or no answer", advice="see ray status")]
    findings = []
    if "open" in answers.values():
        findings.append(
            problem(
                f"{shown}: the Ray dashboard and the Jobs API answer without a token, so everyone "
                "who reaches the port can run commands",
                expected="401 without a token",
                advice="stop that Ray (ray stop), create a token (ray get-auth-token --generate), "
                "and start it again: RAY_AUTH_MODE=token ray start ...",
            )
        )
    if other := [address for address in answers if not address.startswith(_LOOPBACK)]:
        findings.append(
            problem(
                f"port {port}: the Ray dashboard and the Jobs API listen on {', '.join(other)}",
                expected="127.0.0.1 only: the token travels unencrypted",
                advice="ray start --dashboard-host=127.0.0.1, and reach it by ssh -L or kubectl "
                "port-forward; where a network policy protects the port: --skip exposure",
            )
        )
    return findings


def listening_addresses(port: int) -> list[str]:
    """The addresses of this machine on which a process listens at `port`."""
    return sorted(
        {
            connection.laddr.ip
            for connection in psutil.net_connections(kind="tcp")
            if connection.status == psutil.CONN_LISTEN
            and connection.laddr
            and connection.laddr.port == port
        }
    )


def answer_without_token(address: str, port: int) -> Answer:
    """What a request to Ray's API without a token gives; `address` is one of this machine."""
    host = "127.0.0.1" if address in _ALL_INTERFACES else address.removeprefix("::ffff:")
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


CONNECT_SECONDS = 20.0
_CONNECT = """
import sys
from ray._raylet import GcsClient
GcsClient(address=sys.argv[1])
"""


def check_token(address: str) -> Finding:
    """Connect to the head node of a Ray cluster without a token."""
    # In a separate process: Ray reads the token once per process. HOME has the default token.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    try:
        ended = subprocess.run(
            [sys.executable, "-c", _CONNECT, address],
            capture_output=True,
            text=True,
            timeout=CONNECT_SECONDS,
            check=False,
            env={**environment, "HOME": "/nonexistent", "RAY_AUTH_MODE": "disabled"},
        )
        last_line = next(reversed(ended.stderr.strip().splitlines()), "no output")
    except subprocess.TimeoutExpired:
        return _unknown_token(f"no answer within {CONNECT_SECONDS:g} s")
    if ended.returncode == 0:
        return problem(
            f"the head at {address} accepts connections without a token, so everyone who "
            "reaches it can run commands on all nodes",
            expected="token authentication",
            advice="ray get-auth-token --generate, copy ~/.ray/auth_token to all nodes and to "
            "this machine, and start the cluster again with RAY_AUTH_MODE=token",
        )
    if "Authentication" in ended.stderr:
        return ok("Ray requires a token")
    return _unknown_token(last_line)


def _unknown_token(reason: str) -> Finding:
    return note(
        f"whether Ray requires a token is unknown: {reason}",
        expected="a refusal without a token",
        advice="check that the head is reachable from this machine, and not too busy",
    )


def check_tracking(uri: str | None) -> list[Finding]:
    """Whether an MLflow server answers at `uri`, the value of MLFLOW_TRACKING_URI."""
    if not uri:
        return [ok("no server is set: runs are tracked in mlflow.db next to their directory")]
    name = shown(uri)
    if not uri.startswith(("http://", "https://")):  # mlflow opens databases for writing
        return [note(f"{name}: not checked", advice="txl doctor checks servers (http, https)")]
    from txl_dist.tracking.mlflow_tracker import require_server
    from txl_dist.tracking.tracker import UnavailableError

    try:
        require_server(uri)
    except UnavailableError as error:
        return [
            problem(
                f"{name} does not work: {error}",
                expected="the answers of an MLflow server",
                advice="check its address, that it runs, and the firewall between; for 401 and 403 "
                "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD (or _TOKEN), and its "
                "option --allowed-hosts. Training goes on without it and sends the metrics later",
            )
        ]
    return [ok(f"{name}: an MLflow server")]


def existing_parent(path: Path) -> Path:
    """`path`, or the nearest parent that exists."""
    return next(parent for parent in (path, *path.parents) if parent.exists())
