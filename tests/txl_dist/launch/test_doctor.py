"""Checks of one node: versions, devices, network, the run directory on real file systems, tracking
servers and dashboards that answer, refuse or stay silent.

A check that blocks or fails is reported, and does not hide the others.
"""

import os
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch

from tests.support.web_server import web_server
from txl_dist.launch import doctor as checks
from txl_dist.launch.doctor import (
    Finding,
    check_exposure,
    check_gpus,
    check_network,
    check_run_directory,
    check_token_file,
    check_tracking,
    check_versions,
    installed_versions,
    pinned_versions,
    run_checks,
)

Mount = Callable[[str], Path]


def test_the_versions_of_constraints_txt_are_installed() -> None:
    assert set(pinned_versions()) >= {"torch", "ray", "mlflow"}
    assert [finding.status for finding in check_versions()] == ["ok"]


def test_every_difference_is_named_with_both_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = installed_versions()
    build = installed["torch"].partition("+")[0] + "+cu999"
    pins = {**pinned_versions(), "torch": build, "ray": "2.59.1"}
    monkeypatch.setattr(checks, "pinned_versions", lambda: pins)
    _, ray = check_versions()
    assert (ray.status, ray.found) == ("problem", f"ray {installed['ray']}")
    assert ray.expected == "ray 2.59.1 (constraints.txt)"
    assert "same sources" in ray.advice


@pytest.mark.parametrize(
    ("has_cuda", "reason", "expected"),
    [
        (False, "", "finds no usable GPU"),
        (True, "no C compiler", "GPUs need triton"),
        (True, "", ""),
    ],
)
def test_gpus_that_torch_or_triton_cannot_use_are_a_problem(
    has_cuda: bool, reason: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_cuda)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "H100")
    monkeypatch.setattr("txl_dist.model.devices.triton_unavailable_reason", lambda _: reason)
    finding, *_ = check_gpus()
    assert (finding.status, expected in finding.found) == ("problem" if expected else "ok", True)
    assert reason in finding.found


@pytest.mark.parametrize(
    ("address", "status"), [("10.0.0.7", "ok"), ("127.0.1.1", "note"), ("10.0.0.8", "note")]
)
def test_a_host_name_that_is_no_address_of_the_machine_is_a_note(
    address: str, status: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = {
        name: [SimpleNamespace(address=a)] for name, a in (("lo", "127.0.1.1"), ("e", "10.0.0.7"))
    }
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: own)
    monkeypatch.setattr(socket, "gethostbyname", lambda _: address)
    (finding,) = check_network()
    assert (finding.status, address in finding.found) == (status, True)


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Mount]:
    """Mounts a tmpfs with the given options."""
    mounted: list[Path] = []

    def mount_tmpfs(options: str) -> Path:
        path = tmp_path / f"mount-{len(mounted)}"
        path.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(path)]
        if os.geteuid() != 0 or subprocess.run(command, check=False).returncode:
            pytest.skip("mounting a file system needs root and a kernel that allows it")
        mounted.append(path)
        return path

    yield mount_tmpfs
    for path in mounted:
        subprocess.run(["umount", str(path)], check=True)


def storage(run: Path) -> list[Finding]:
    return run_checks({"storage": lambda: check_run_directory(str(run))}, node="a")


def test_a_usable_directory_is_left_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks, "FEW_BYTES", 0)
    (finding,) = storage(tmp_path / "runs" / "new")
    assert (finding.status, str(tmp_path) in finding.found) == ("ok", True)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "status", "text"),
    [
        ("size=64k", "problem", "No space left"),
        ("ro", "problem", "Read-only file system"),
        ("size=8m", "note", "0.01 GiB free"),
    ],
)
def test_a_full_or_a_read_only_file_system_is_a_problem_and_a_small_one_a_note(
    mount: Mount, options: str, status: str, text: str
) -> None:
    disk = mount(options)
    (finding,) = storage(disk / "run")
    assert (finding.status, text in finding.found) == (status, True), finding
    assert list(disk.iterdir()) == []


def test_a_check_that_blocks_is_abandoned_after_the_limit(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "file")  # a read blocks, as on a dead mount
    begin = time.monotonic()
    blocked, fine = run_checks(
        {
            "storage": lambda: [Finding("ok", (tmp_path / "file").read_text())],
            "devices": lambda: [Finding("ok", "2")],
        },
        node="a",
        limit_seconds=0.3,
    )
    assert time.monotonic() - begin < 5
    assert (blocked.status, blocked.check, blocked.node) == ("problem", "storage", "a")
    assert "no result after 0.3 s" in blocked.found
    assert (fine.status, fine.found) == ("ok", "2")


def test_an_unexpected_error_is_a_problem_without_its_secrets() -> None:
    def fail() -> list[Finding]:
        raise RuntimeError("http://user:canary@host answered\x1b[2J")

    (finding,) = run_checks({"tracking": fail}, node="a", limit_seconds=5)
    assert finding.status == "problem"
    assert "RuntimeError" in finding.found
    assert "canary" not in finding.found
    assert "\x1b" not in finding.found


# --- tracking and exposure ------------------------------------------------------------------------


def test_refused_credentials_are_a_problem_that_does_not_show_them() -> None:
    with web_server(lambda _: (401, "who are you")) as url:
        (finding,) = check_tracking(url.replace("//", "//user:wrong@"))
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


def port_of(url: str) -> int:
    return int(url.rpartition(":")[2])


@pytest.mark.fault_row(43)
@pytest.mark.parametrize(("status", "expected"), [(200, "problem"), (401, "ok"), (403, "ok")])
def test_a_dashboard_that_answers_without_a_token_is_a_problem(status: int, expected: str) -> None:
    with web_server(lambda _: (status, '{"ray_version": "2.60.0"}')) as url:
        (finding,) = check_exposure(port_of(url))
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
    with web_server(lambda _: (200, "hello")) as url:
        assert [finding.status for finding in check_exposure(port_of(url))] == ["note"]
    (finding,) = check_exposure(port_of(url))
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
