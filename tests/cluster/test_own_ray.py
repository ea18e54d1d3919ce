"""What a killed launcher leaves: the next one removes it, and nothing else."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.own_ray import TOKEN_VARIABLE, remove_leftovers
from tests.support.commands import ENVIRONMENT, is_alive

LAUNCHER = (
    "import time; from cluster.own_ray import own_token; print(own_token(), flush=True); "
    "time.sleep(600)"
)


@pytest.fixture
def launcher(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """A process with a token of its own below `tmp_path`."""
    with subprocess.Popen(
        [sys.executable, "-c", LAUNCHER],
        stdout=subprocess.PIPE,
        text=True,
        env={**ENVIRONMENT, "TMPDIR": str(tmp_path)},
    ) as process:
        assert process.stdout is not None
        yield process, Path(process.stdout.readline().strip())
        process.kill()


def start(title: str, token: Path) -> subprocess.Popen[bytes]:
    """A process called `title` that was started with `token`."""
    return subprocess.Popen(
        ["bash", "-c", f"exec -a {title} sleep 600"],
        env={**ENVIRONMENT, TOKEN_VARIABLE: str(token)},
    )


def test_the_token_folder_and_the_ray_processes_of_a_killed_launcher_are_removed(
    launcher: tuple[subprocess.Popen[str], Path], tmp_path: Path
) -> None:
    process, token = launcher
    assert token.parent.parent == tmp_path
    assert token.stat().st_mode & 0o077 == 0
    agent, sender = start("ray::DashboardAgent", token), start("tracking-sender", token)
    stranger = start("ray::DashboardAgent", tmp_path / "token")
    unrelated = tmp_path / "txl-ray-of-somebody"
    unrelated.mkdir()
    try:
        remove_leftovers(tmp_path)
        assert token.exists(), "the launcher is alive"
        assert all(is_alive(one.pid) for one in (agent, sender, stranger))
        process.kill()
        process.wait()
        remove_leftovers(tmp_path)
        assert not is_alive(agent.pid)
        assert [path.name for path in tmp_path.iterdir()] == [unrelated.name]
        assert is_alive(sender.pid), "no process of Ray's"
        assert is_alive(stranger.pid), "of another token"
    finally:
        for one in (agent, sender, stranger):
            one.kill()
            one.wait()
