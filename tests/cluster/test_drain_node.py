"""Announcing that a host will be taken away: metadata services of clouds, `txl train`, Ray."""

import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler

import psutil
import pytest

from cluster import drain_node
from tests.support.web_server import web_server

TOKEN = "metadata-token"


@pytest.mark.parametrize("is_preempted", [False, True])
def test_the_notice_of_a_cloud_is_recognised(is_preempted: bool) -> None:
    """The metadata services of both clouds, for a host with or without a notice."""

    def answer(request: BaseHTTPRequestHandler) -> tuple[int, str]:
        if request.command == "PUT":
            assert request.headers["X-aws-ec2-metadata-token-ttl-seconds"]
            return 200, TOKEN
        if request.path == "/latest/meta-data/spot/instance-action":
            assert request.headers["X-aws-ec2-metadata-token"] == TOKEN
            return 200 if is_preempted else 404, '{"action": "terminate"}'
        assert request.path == "/computeMetadata/v1/instance/preempted"
        assert request.headers["Metadata-Flavor"] == "Google"
        return 200, "TRUE" if is_preempted else "FALSE"

    with web_server(answer) as url:
        assert drain_node.is_preempted_by_aws(url) == is_preempted
        assert drain_node.is_preempted_by_google(url) == is_preempted


def test_a_proxy_is_not_asked_for_the_notice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    with web_server(lambda request: (200, "TRUE")) as url:
        assert drain_node.is_preempted_by_google(url)


def test_a_host_outside_a_cloud_has_no_notice() -> None:
    closed = "http://127.0.0.1:9"
    assert not drain_node.is_preempted_by_aws(closed)
    assert not drain_node.is_preempted_by_google(closed)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["/usr/bin/python", "-m", "txl_dist", "train", "config.yaml"], True),
        (["/opt/python", "/usr/local/bin/txl", "train", "config.yaml"], True),
        (["txl", "train", "config.yaml"], True),
        (["/opt/python", "-P", "-m", "txl_dist", "train", "config.yaml"], True),
        (["bash", "-c", "txl train config.yaml"], False),
        (["python", "-m", "txl_dist", "eval", "train"], False),
        (["ray::RankActor"], False),
    ],
)
def test_only_launchers_of_training_are_stopped(words: list[str], expected: bool) -> None:
    assert drain_node._is_train_command(words) == expected


def test_the_command_stops_txl_train_and_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process like `txl train`, which takes a moment to save."""
    save = (
        "import signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: (time.sleep(0.3), sys.exit(75)))\n"
        "print('ready', flush=True)\n"
        "time.sleep(60)"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", save, "txl", "train"], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    monkeypatch.setattr(drain_node, "_announce_preemption", lambda *_: None)
    monkeypatch.setattr(drain_node, "POLL_SECONDS", 0.05)
    # Other tests may train on this machine at the same time.
    monkeypatch.setattr(drain_node, "ranks", list)
    trains = [psutil.Process(process.pid)]
    monkeypatch.setattr(
        drain_node, "train_commands", lambda: trains if process.poll() is None else []
    )
    drain_node.drain_this_host(deadline_seconds=30)
    assert process.poll() == 75


def test_the_deadline_ends_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drain_node, "_announce_preemption", lambda *_: None)
    monkeypatch.setattr(drain_node, "POLL_SECONDS", 0.05)
    monkeypatch.setattr(drain_node, "train_commands", list)
    monkeypatch.setattr(drain_node, "ranks", lambda: [psutil.Process()])
    start = time.monotonic()
    drain_node.drain_this_host(deadline_seconds=0.2)
    assert 0.2 <= time.monotonic() - start < 10
