"""The MLflow tracking server or database: reachable, accepts our credentials, version.

Not through mlflow itself, which opens databases for writing and whose calls have no short limit.
"""

import base64
import os
import socket
import urllib.error
import urllib.request
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import unquote, urlsplit

from data_pipeline.system.sources import shown
from txl_dist.doctor.finding import Finding, note, ok, problem
from txl_dist.doctor.storage import existing_parent

RESPONSE_SECONDS = 5.0
"""Time limit of a connection and of each response."""
_MAX_RESPONSE_BYTES = 4096
_DRIVERS = {"postgresql": ("psycopg2", 5432), "mysql": ("pymysql", 3306)}
"""Scheme -> module that SQLAlchemy needs, and the default port."""


def check_tracking(uri: str | None) -> list[Finding]:
    """Check the server or database at `uri`; None: MLFLOW_TRACKING_URI of this process."""
    uri = uri or os.environ.get("MLFLOW_TRACKING_URI")
    if not uri:
        return [ok("no server is set: runs are tracked in mlflow.db next to their directory")]
    scheme = uri.partition("://")[0].partition("+")[0]
    if scheme in ("http", "https"):
        return _check_server(uri)
    if scheme == "sqlite":
        return _check_sqlite(uri)
    if scheme in _DRIVERS:
        return _check_database(uri, *_DRIVERS[scheme])
    return [
        problem(
            f"{shown(uri)}: unknown kind of tracking server",
            expected="http(s)://HOST:PORT, sqlite:///PATH, postgresql://... or mysql://...",
            advice="correct tracking.uri or MLFLOW_TRACKING_URI",
        )
    ]


def _check_server(uri: str) -> list[Finding]:
    name = shown(uri)
    try:
        server_version = _get(uri, "/version").strip()
        _get(uri, "/api/2.0/mlflow/experiments/search?max_results=1")
    except urllib.error.HTTPError as error:
        refused = error.code in (401, 403)
        return [
            problem(
                f"{name} answers {error.code} {error.reason}",
                expected="the answers of an MLflow server",
                advice="set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD (or _TOKEN); for "
                "'Invalid Host header' start the server with --allowed-hosts"
                if refused
                else "see the log of the server; check that the address is MLflow's",
            )
        ]
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        return [
            problem(
                f"{name} does not respond: {reason}",
                expected=f"a response within {RESPONSE_SECONDS:g} s",
                advice="check that the server runs, its host and port, and the firewall between. "
                "Training goes on without it and sends the metrics later",
            )
        ]
    return _compare_versions(name, server_version)


def _compare_versions(name: str, server: str) -> list[Finding]:
    client = version("mlflow")
    summary = f"{name}: MLflow {server[:40]}"
    if server.split(".")[:1] != client.split(".")[:1]:
        return [
            problem(
                summary,
                expected=f"MLflow {client.split('.')[0]}, as the client ({client})",
                advice="upgrade the server, or check that the address is MLflow's",
            )
        ]
    if server.split(".")[:2] != client.split(".")[:2]:
        return [note(summary, expected=f"MLflow {client}", advice="use one version in production")]
    return [ok(summary)]


def _get(uri: str, path: str) -> str:
    """The response to a GET request with the credentials of the URI or of MLflow's variables."""
    parts = urlsplit(uri)
    host = parts.hostname or ""
    host = f"[{host}]" if ":" in host else host
    port = f":{parts.port}" if parts.port else ""
    address = f"{parts.scheme}://{host}{port}{parts.path.rstrip('/')}{path}"
    request = urllib.request.Request(address, headers=_credentials(parts.username, parts.password))
    with urllib.request.urlopen(request, timeout=RESPONSE_SECONDS) as response:
        content: bytes = response.read(_MAX_RESPONSE_BYTES)
    return content.decode("utf-8", errors="replace")


def _credentials(user: str | None, password: str | None) -> dict[str, str]:
    user = unquote(user) if user else os.environ.get("MLFLOW_TRACKING_USERNAME")
    password = unquote(password) if password else os.environ.get("MLFLOW_TRACKING_PASSWORD")
    if user and password:
        encoded = base64.b64encode(f"{user}:{password}".encode()).decode()
        return {"Authorization": f"Basic {encoded}"}
    if token := os.environ.get("MLFLOW_TRACKING_TOKEN"):
        return {"Authorization": f"Bearer {token}"}
    return {}


def _check_sqlite(uri: str) -> list[Finding]:
    path = Path(uri.removeprefix("sqlite:///").partition("?")[0])
    directory = existing_parent(path.parent)
    if not os.access(path if path.exists() else directory, os.W_OK):
        return [
            problem(
                f"{path}: this user may not write it",
                expected="a database that the ranks can write",
                advice="check its permissions and its mount, or choose another tracking.uri",
            )
        ]
    return [ok(f"{path}, a SQLite database")]


def _check_database(uri: str, module: str, default_port: int) -> list[Finding]:
    parts = urlsplit(uri)
    name, host, port = shown(uri), parts.hostname or "127.0.0.1", parts.port or default_port
    if find_spec(module) is None:
        return [
            problem(
                f"{name}: {module} is not installed",
                expected=f"{module} on every node that runs a rank",
                advice=f"pip install {module}, or use a tracking server (http://HOST:PORT)",
            )
        ]
    try:
        socket.create_connection((host, port), RESPONSE_SECONDS).close()
    except OSError as error:
        return [
            problem(
                f"{name}: nothing answers at {host}:{port} ({error})",
                expected=f"a connection within {RESPONSE_SECONDS:g} s",
                advice="check that the database runs, its address, and the firewall between",
            )
        ]
    return [ok(f"{name}: accepts connections (credentials not checked)")]
