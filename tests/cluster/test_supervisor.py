"""The supervisor ends a launch whose ranks fail too often, or do not stop. Without Ray itself."""

import os
import signal
import threading
from pathlib import Path

import pytest

from cluster import supervisor as module
from cluster.supervisor import Supervisor
from txl_dist.errors import PreemptedError, TxlError
from txl_dist.launch.launch_files import LaunchFiles, RankLocation
from txl_dist.launch.supervision import RestartBudget
from txl_dist.training.run_directory import RunDirectory


class Launch:
    """A launch of two ranks, whose Ray is a thread that ends with the test."""

    def __init__(self, run: Path, *, max_restarts: int) -> None:
        self.directory = RunDirectory(run)
        self.directory.create()
        self.files = LaunchFiles(run, "0123")
        self.lines: list[str] = []
        self.is_over = threading.Event()
        self.supervisor = Supervisor(
            self.directory,
            self.files,
            num_ranks=2,
            address="127.0.0.1:1",
            start_timeout_seconds=60,
            grace_seconds=0.3,
            budget=RestartBudget(max_restarts),
            on_line=self.lines.append,
        )

    def start_ranks(self) -> None:
        for rank in range(2):
            self.files.write_location(rank, RankLocation("node", "127.0.0.1", 100 + rank))

    def fail(self) -> None:
        """Ray Train reports that rank 1 died."""
        self.start_ranks()
        self.is_over.wait(0.5)  # the supervisor reads where the ranks run
        self.files.append_failure({1: RuntimeError("gone")}, died=(1,))
        self.is_over.wait(0.5)


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "POLL_SECONDS", 0.02)
    monkeypatch.setattr(module, "NODE_LOSS_SECONDS", 0.0)
    monkeypatch.setattr(module, "STOP_MARGIN_SECONDS", 0.0)
    # It would register the end of this process.
    monkeypatch.setattr(module, "abandon_ray", lambda address, exit_code: None)


def test_too_many_failures_end_the_launch_with_the_last_one(tmp_path: Path) -> None:
    launch = Launch(tmp_path, max_restarts=1)

    def run_ray() -> None:
        launch.fail()
        launch.fail()
        launch.is_over.wait(30)

    with pytest.raises(TxlError) as raised:
        launch.supervisor.run(run_ray)
    launch.is_over.set()
    assert "the ranks failed more than 1 times" in str(raised.value)
    assert "rank 1 (node 127.0.0.1, pid 101) died" in str(raised.value)
    assert sum("died; waiting for" in line for line in launch.lines) >= 1


def test_ranks_that_do_not_stop_are_given_up_after_the_grace_period(tmp_path: Path) -> None:
    launch = Launch(tmp_path, max_restarts=0)

    def run_ray() -> None:
        launch.start_ranks()
        launch.is_over.wait(0.5)
        os.kill(os.getpid(), signal.SIGTERM)
        launch.is_over.wait(30)

    with pytest.raises(PreemptedError, match=r"did not end within training\.grace_seconds=0\.3"):
        launch.supervisor.run(run_ray)
    launch.is_over.set()
    assert launch.files.stop.exists()
