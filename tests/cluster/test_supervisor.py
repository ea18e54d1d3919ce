"""The supervisor starts ranks again after failures and changes, and ends a launch whose ranks fail
too often or do not stop. Without Ray itself.
"""

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cluster import rank_monitor, rank_plan
from cluster import supervisor as module
from cluster.nodes import ClusterState
from cluster.rank_plan import RankPlan
from cluster.rank_starts import StartOutcome
from cluster.supervisor import Supervisor
from tests.support.commands import wait_until
from tests.support.training_runs import TINY
from txl_dist.config.config_file import load_run_config
from txl_dist.errors import DataError, PreemptedError, TxlError
from txl_dist.launch import supervision
from txl_dist.launch.launch_files import LaunchFiles, RankLocation
from txl_dist.launch.rank_range import RankRange
from txl_dist.launch.supervision import RestartBudget
from txl_dist.training import follow
from txl_dist.training.run_directory import RunDirectory


class Launch:
    """A launch of ranks on nodes `a` and `b`, whose Ray is a thread that ends with the test."""

    def __init__(self, run: Path, *settings: str, max_restarts: int = 0, ranks: str = "2") -> None:
        self.directory = RunDirectory(run)
        self.directory.create()
        self.files = LaunchFiles(run, "0123")
        self.lines: list[str] = []
        self.is_over = threading.Event()
        self.supervisor = Supervisor(
            self.directory,
            self.files,
            plan=RankPlan(RankRange.parse(ranks), growth_interval_seconds=0.0),
            address="127.0.0.1:1",
            config=load_run_config(TINY, ["training.grace_seconds=0.3", *settings]),
            budget=RestartBudget(max_restarts),
            on_line=self.lines.append,
        )
        self.see(free=2)

    def see(self, *, free: int, draining: str = "", alive: str = "ab") -> None:
        """What the monitor of the cluster sees from now on."""
        state = ClusterState(
            node_ids=frozenset(alive),
            total=2,
            free=free,
            num_free_slots=free,
            deadlines=dict.fromkeys(draining, 60.0),
        )
        cluster: Any = SimpleNamespace(
            state=state,
            own_node_id="a",
            head="127.0.0.1:1",
            silent_seconds=0.0,
            describe_wait=lambda num_ranks, waited_seconds: "the ranks to start",
        )
        self.supervisor.monitor = cluster

    def run(self, *starts: Callable[[int], StartOutcome]) -> list[int]:
        """Run the launch: each function is one start, given its number of ranks; those numbers."""
        numbers: list[int] = []

        def run_ray() -> None:
            end = StartOutcome.NOT_STARTED
            for start in starts:
                number = self.supervisor.starts.wait()
                if number is None:
                    break
                numbers.append(number)
                end = start(number)
                self.supervisor.starts.end(end)
            else:
                assert self.supervisor.starts.wait() is None
            self.supervisor.set_ended(None if end is StartOutcome.RETURNED else TxlError("failed"))

        try:
            self.supervisor.run(run_ray)
        finally:
            self.is_over.set()
        return numbers

    def train(self, num_ranks: int, *, step: int = 0) -> None:
        """Ranks start, one per node, and rank 0 logs a step."""
        for rank in range(num_ranks):
            location = RankLocation("ab"[rank], f"10.0.0.{rank + 1}", 100 + rank)
            self.files.write_location(rank, location)
        with self.directory.log(0).open("a") as log:
            log.write(f"12:00:00 step {step} | loss 1.0\n")
        ranks = self.supervisor._ranks
        wait_until(lambda: ranks.are_running or self.is_over.is_set(), timeout_seconds=30)
        wait_until(lambda: any(f" step {step} " in line for line in self.lines))

    def fail(self, num_ranks: int) -> StartOutcome:
        """Ray Train reports that rank 1 died."""
        self.train(num_ranks, step=7)
        self.files.append_failure({1: RuntimeError("gone")}, died=(1,))
        return StartOutcome.FAILED

    def save_on_request(self, num_ranks: int, *, step: int) -> StartOutcome:
        """The ranks train until they are asked to stop, then they save."""
        self.train(num_ranks, step=step)
        wait_until(self.files.stop.exists, timeout_seconds=10)
        self.directory.checkpoints.at(step).mkdir(parents=True)
        for rank in range(num_ranks):
            self.files.write_error(rank, PreemptedError("saved"))
        return StartOutcome.RETURNED

    def finish(self, num_ranks: int) -> StartOutcome:
        self.train(num_ranks, step=20)
        return StartOutcome.RETURNED


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "POLL_SECONDS", 0.02)
    monkeypatch.setattr(follow, "POLL_SECONDS", 0.02)
    monkeypatch.setattr(module, "STOP_MARGIN_SECONDS", 0.0)
    monkeypatch.setattr(supervision, "MAX_DELAY_SECONDS", 0.1)
    for limit in ("SETTLE_SECONDS", "STABLE_SECONDS"):
        monkeypatch.setattr(rank_plan, limit, 0.0)
    for user in (module, rank_monitor):
        monkeypatch.setattr(user, "NODE_LOSS_SECONDS", 0.0)
    # It would register the end of this process.
    monkeypatch.setattr(module, "abandon_ray", lambda address, exit_code: None)


def test_failed_ranks_start_again_and_the_lost_steps_are_printed(tmp_path: Path) -> None:
    launch = Launch(tmp_path, max_restarts=1)
    assert launch.run(launch.fail, launch.finish) == [2, 2]
    (line,) = [line for line in launch.lines if "died; waiting for" in line]
    assert "rank 1 (node 10.0.0.2, pid 101) died" in line
    assert "at least 7 steps are lost" in line


def test_too_many_failures_end_the_launch_with_the_last_one(tmp_path: Path) -> None:
    launch = Launch(tmp_path, max_restarts=1)
    with pytest.raises(TxlError) as raised:
        launch.run(launch.fail, launch.fail, launch.finish)
    assert "the ranks failed again after 1 restart without" in str(raised.value)
    assert "rank 1 (node 10.0.0.2, pid 101) died" in str(raised.value)


def test_an_error_of_a_rank_is_not_repeated(tmp_path: Path) -> None:
    launch = Launch(tmp_path, max_restarts=5)

    def fail(num_ranks: int) -> StartOutcome:
        launch.train(num_ranks)
        launch.files.write_error(1, DataError("a bad shard"))
        launch.files.append_failure({1: DataError("a bad shard")}, died=())
        return StartOutcome.FAILED

    with pytest.raises(DataError, match="a bad shard"):
        launch.run(fail, launch.finish)


@pytest.mark.parametrize("ranks", ["2", "1:2"])
def test_a_preemption_saves_first_and_does_not_count(ranks: str, tmp_path: Path) -> None:
    launch = Launch(tmp_path, ranks=ranks)

    def preempt(num_ranks: int) -> StartOutcome:
        launch.see(free=0, draining="b")
        end = launch.save_on_request(num_ranks, step=9)
        launch.see(free=1, alive="a")
        return end

    expected = 2 if ranks == "2" else 1
    assert launch.run(preempt, launch.finish) == [2, expected]
    assert "node 10.0.0.2 is preempted in 60 s: the ranks save, and start again" in launch.lines
    instead = "" if ranks == "2" else " instead of 2"
    assert f"continuing with {expected}{instead} ranks from step 9; no step is lost" in launch.lines


def test_a_preemption_that_comes_too_fast_goes_on_from_the_last_checkpoint(tmp_path: Path) -> None:
    launch = Launch(tmp_path)  # without restarts: the failure does not count

    def die(num_ranks: int) -> StartOutcome:
        launch.see(free=0, draining="b")
        launch.train(num_ranks, step=9)
        wait_until(launch.files.stop.exists, timeout_seconds=10)
        launch.files.append_failure({1: RuntimeError("gone")}, died=(1,))
        launch.is_over.wait(0.1)
        launch.see(free=1)
        return StartOutcome.FAILED

    assert launch.run(die, launch.finish) == [2, 2]
    expected = "continuing with 2 ranks from the beginning; at least 9 steps are lost"
    assert expected in launch.lines


def test_ranks_that_end_at_their_grace_period_are_not_reported_as_failed(tmp_path: Path) -> None:
    launch = Launch(tmp_path)

    def end(num_ranks: int) -> StartOutcome:
        launch.see(free=0, draining="b")
        launch.save_on_request(num_ranks, step=9)
        launch.files.append_failure({1: RuntimeError("gone")}, died=(1,))
        return StartOutcome.FAILED

    def finish(num_ranks: int) -> StartOutcome:
        launch.is_over.wait(0.2)
        assert not launch.files.stop.exists(), "the node of the last ranks drains, not of these"
        launch.see(free=0)
        return launch.finish(num_ranks)

    assert launch.run(end, finish) == [2, 2]
    assert not [line for line in launch.lines if "died" in line]


def test_a_run_shrinks_after_a_loss_and_grows_when_there_is_room(tmp_path: Path) -> None:
    launch = Launch(tmp_path, max_restarts=1, ranks="1:2")

    def lose(num_ranks: int) -> StartOutcome:
        end = launch.fail(num_ranks)
        launch.see(free=1, alive="a")
        return end

    def grow(num_ranks: int) -> StartOutcome:
        launch.see(free=1)
        end = launch.save_on_request(num_ranks, step=12)
        launch.see(free=2)
        return end

    assert launch.run(lose, grow, launch.finish) == [2, 1, 2]
    assert "there is room for 2 ranks instead of 1: the ranks save, and start again" in launch.lines
    lines = [line for line in launch.lines if line.startswith("continuing")]
    assert lines == [
        "continuing with 1 instead of 2 ranks from the beginning; at least 7 steps are lost",
        "continuing with 2 instead of 1 ranks from step 12; no step is lost",
    ]


def test_a_run_that_ends_during_a_change_is_finished(tmp_path: Path) -> None:
    launch = Launch(tmp_path)

    def finish(num_ranks: int) -> StartOutcome:
        launch.see(free=0, draining="b")
        return launch.finish(num_ranks)

    assert launch.run(finish, launch.finish) == [2]


def test_the_preemption_of_the_launchers_own_node_ends_the_launch(tmp_path: Path) -> None:
    launch = Launch(tmp_path)

    def preempt(num_ranks: int) -> StartOutcome:
        launch.train(num_ranks)
        launch.see(free=0, draining="a")
        return launch.save_on_request(num_ranks, step=9)

    with pytest.raises(PreemptedError, match="saved"):
        launch.run(preempt, launch.finish)
    assert "node of the launcher is preempted in 60 s: the launch ends" in launch.lines


def test_ranks_that_do_not_stop_are_given_up_after_the_grace_period(tmp_path: Path) -> None:
    launch = Launch(tmp_path)

    def hang(num_ranks: int) -> StartOutcome:
        launch.train(num_ranks)
        os.kill(os.getpid(), signal.SIGTERM)
        launch.is_over.wait(30)
        return StartOutcome.FAILED

    with pytest.raises(PreemptedError, match=r"did not end within training\.grace_seconds=0\.3"):
        launch.run(hang)
    assert launch.files.stop.exists()


def test_ranks_that_die_after_a_stop_request_are_not_success(tmp_path: Path) -> None:
    launch = Launch(tmp_path, max_restarts=3)

    def die(num_ranks: int) -> StartOutcome:
        launch.train(num_ranks)
        os.kill(os.getpid(), signal.SIGTERM)
        launch.is_over.wait(0.1)
        return StartOutcome.FAILED

    with pytest.raises(PreemptedError, match="before the ranks had saved"):
        launch.run(die, launch.finish)


def test_starts_that_ray_gives_up_do_not_extend_the_time_limit(tmp_path: Path) -> None:
    launch = Launch(tmp_path, "ray.start_timeout_seconds=0.5", ranks="1:2")

    def give_up(_: int) -> StartOutcome:
        time.sleep(0.2)
        return StartOutcome.NOT_STARTED

    with pytest.raises(TxlError, match=r"did not start within 0\.5 s"):
        launch.run(*[give_up] * 20)
    assert "Ray gave up this start, because the resources are not free" in launch.lines
