"""Tracking servers and dashboards: real servers on loopback that answer, refuse or stay silent."""

import json
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from types import SimpleNamespace

import psutil
import pytest

from txl_dist.doctor import checks
from txl_dist.doctor.checks import check_exposure, check_token_file, check_tracking

Answer = Callable[[str, str | None], tuple[int, str]]
"""(path, Authorization header) -> (status, body)"""


@contextmanager
def server(answer: Answer) -> Iterator[int]:
    """A web server at a free port."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, body = answer(self.path, self.headers.get("Authorization"))
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body.encode())

        do_POST = do_GET

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        Thread(target=http.serve_forever, args=(0.02,), daemon=True).start()
        yield http.server_address[1]
        http.shutdown()


def mlflow_with_password(path: str, authorization: str | None) -> tuple[int, str]:
    if authorization != "Basic dXNlcjpjYW5hcnk=":  # user:canary
        return 401, "who are you"
    return 200, "{}"


def test_refused_credentials_are_a_problem_that_does_not_show_them() -> None:
    with server(mlflow_with_password) as port:
        (finding,) = check_tracking(f"http://user:wrong@127.0.0.1:{port}")
    assert finding.status == "problem"
    assert "401" in finding.found
    assert "MLFLOW_TRACKING_PASSWORD" in finding.advice
    assert "wrong" not in finding.found


def test_a_server_that_never_answers_is_a_problem_after_the_time_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "1")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        begin = time.monotonic()
        (finding,) = check_tracking(f"http://127.0.0.1:{listener.getsockname()[1]}")
        assert time.monotonic() - begin < 10
    assert finding.status == "problem"
    assert "Read timed" in finding.found


def ray_answer(status: int) -> Answer:
    return lambda path, _: (status, json.dumps({"ray_version": "2.60.0"}))


@pytest.mark.fault_row(43)
@pytest.mark.parametrize(("status", "expected"), [(200, "problem"), (401, "ok"), (403, "ok")])
def test_a_dashboard_that_answers_without_a_token_is_a_problem(status: int, expected: str) -> None:
    with server(ray_answer(status)) as port:
        (finding,) = check_exposure(port)
    assert finding.status == expected
    if expected == "problem":
        assert "RAY_AUTH_MODE=token" in finding.advice


@pytest.mark.fault_row(43)
@pytest.mark.parametrize("address", ["0.0.0.0", "::", "10.0.0.5"])
def test_a_dashboard_that_listens_on_other_interfaces_is_a_problem(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def listen_on(*addresses: str) -> None:
        listening = [
            SimpleNamespace(status="LISTEN", laddr=SimpleNamespace(ip=each, port=8265))
            for each in addresses
        ]
        monkeypatch.setattr(psutil, "net_connections", lambda kind: listening)

    monkeypatch.setattr(checks, "_is_open", lambda address, port: False)
    listen_on(address)
    (finding,) = check_exposure()
    assert finding.status == "problem"
    assert f"on {address}: the Ray dashboard and the Jobs API listen" in finding.found
    assert "--dashboard-host=127.0.0.1" in finding.advice
    listen_on("127.0.0.1", "::1")
    assert [finding.status for finding in check_exposure()] == ["ok"]


def test_another_program_on_the_port_is_a_note_and_no_program_is_fine() -> None:
    with server(lambda path, _: (200, "hello")) as port:
        assert [finding.status for finding in check_exposure(port)] == ["note"]
    (finding,) = check_exposure(port)
    assert finding.status == "ok"
    assert "nothing listens" in finding.found


def test_a_token_that_others_can_read_is_a_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_AUTH_TOKEN_PATH")
    monkeypatch.setenv("HOME", str(tmp_path))
    token = tmp_path / ".ray" / "auth_token"
    token.parent.mkdir()
    for mode in (0o600, 0o644, 0o660, 0o601):
        token.touch()
        token.chmod(mode)
        findings = list(check_token_file())
        assert len(findings) == (mode != 0o600)
        assert all(f"chmod 600 {token}" in finding.advice for finding in findings)


@pytest.fixture(autouse=True)
def _without_token(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The user who runs the tests may have one."""
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "no-token"))
