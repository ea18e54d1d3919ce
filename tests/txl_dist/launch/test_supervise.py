"""The supervisor starts ranks again after failures and changes, and ends a launch whose ranks fail
too often or do not stop: with a rank group whose ranks are data.
"""

import errno
import os
import signal
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from data_pipeline.system.files import is_locked
from tests.support.training_runs import TINY
from txl_dist.config.config_file import load_run_config
from txl_dist.errors import DataError, LostRankError, PreemptedError, TxlError
from txl_dist.launch import restarts
from txl_dist.launch import supervise as module
from txl_dist.launch.launcher import Launcher
from txl_dist.launch.rank_group import (
    Event,
    NodeLost,
    Preempted,
    RankEnded,
    RankRange,
    RanksUp,
    Room,
)
from txl_dist.training.spec import LaunchFiles, RunDirectory, TrainSpec

Script = Iterator[list[Event]]
"""The events of one start of ranks, one list per poll."""


class ScriptedGroup(Launcher):
    """Each start follows a function of the test; ranks run on nodes `a` and `b`, one each."""

    max_restarts, growth_interval_seconds, waits_for = 0, 0.001, "the script"

    def __init__(self, run: Path, *settings: str) -> None:
        overrides = [f"directory={run}", "training.grace_seconds=0.3"]
        config = load_run_config(TINY, [*overrides, *settings])
        self.spec = TrainSpec(config=config)
        self.directory = RunDirectory(run)
        self.files = LaunchFiles(run, self.spec.launch_id)
        self.lines: list[str] = []
        self.numbers: list[int] = []
        self.news: list[Event] = []
        """What the group reports whether ranks run or not."""
        self.killed: set[int] = set()

    def run(
        self, *starts: Callable[[int], Script], ranks: str = "2", max_restarts: int | None = None
    ) -> list[int]:
        """Run the launch; returns the number of ranks of each start."""
        self._starts = iter(starts)
        self._script: Script = iter(())
        selected = RankRange.parse(ranks)
        numbers = {"num_ranks": selected.maximum, "min_ranks": selected.minimum}
        self.train(self.spec, **numbers, on_line=self.lines.append, max_restarts=max_restarts)
        assert next(self._starts, None) is None
        return self.numbers

    @contextmanager
    def rank_group(self, spec: TrainSpec, ranks: RankRange) -> Iterator["ScriptedGroup"]:
        yield self

    def start(self, spec: TrainSpec, num_ranks: int) -> None:
        self.numbers.append(num_ranks)
        self.killed = set()
        self._script = next(self._starts)(num_ranks)

    def poll(self) -> list[Event]:
        events = next(self._script, [])
        return [*self.news, *events]

    def request_stop(self) -> None:
        pass

    def kill(self, ranks: Collection[int]) -> None:
        self.killed |= set(ranks)

    # --- what ranks do ----------------------------------------------------------------------------

    def up(self, num_ranks: int, *, step: int) -> Script:
        """The ranks start, and rank 0 logs a step."""
        places = {rank: f" (node 10.0.0.{rank + 1}, pid {100 + rank})" for rank in range(num_ranks)}
        yield [RanksUp(places, set("ab"[:num_ranks]))]
        with self.directory.metrics.open("a") as metrics:
            metrics.write(f'{{"step": {step}, "tokens": 1}}\n')
        self.directory.event_log.write("first_line", "first step line", step=step)
        with self.directory.log(0).open("a") as log:
            log.write(f"12:00:00 step {step} | loss 1.0\n")
        yield from self.until(lambda: any(f" step {step} " in line for line in self.lines))

    def until(self, condition: Callable[[], bool]) -> Script:
        while not condition():
            yield []

    def asked_to_stop(self, num_ranks: int) -> Script:
        """A signal reaches the launcher, which asks the ranks to stop."""
        yield from self.up(num_ranks, step=1)
        os.kill(os.getpid(), signal.SIGTERM)
        yield from self.until(self.files.stop.exists)

    def finish(self, num_ranks: int) -> Script:
        yield from self.up(num_ranks, step=20)
        yield [RankEnded(rank, 0) for rank in range(num_ranks)]

    def die(self, num_ranks: int) -> Script:
        """Rank 1 dies, and rank 0 loses the connection."""
        yield from self.up(num_ranks, step=7)
        yield [RankEnded(1, None), RankEnded(0, 1, LostRankError("lost"))]

    def save_on_request(self, num_ranks: int, *, step: int) -> Script:
        """The ranks train until they are asked to stop, then they save."""
        yield from self.up(num_ranks, step=step)
        yield from self.until(self.files.stop.exists)
        self.directory.checkpoints.at(step).mkdir(parents=True)
        yield [RankEnded(rank, 75, PreemptedError("saved")) for rank in range(num_ranks)]


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "POLL_SECONDS", 0.02)
    monkeypatch.setattr(module, "STOP_MARGIN_SECONDS", 0.0)
    monkeypatch.setattr(module, "NODE_LOSS_SECONDS", 0.2)
    monkeypatch.setattr(module, "wait_for_delivery", lambda *_: None)
    monkeypatch.setattr(restarts, "MAX_DELAY_SECONDS", 0.1)
    for limit in ("SETTLE_SECONDS", "STABLE_SECONDS"):
        monkeypatch.setattr(restarts, limit, 0.0)


@pytest.fixture
def group(tmp_path: Path) -> ScriptedGroup:
    return ScriptedGroup(tmp_path)


def preempted(address: str) -> Preempted:
    return Preempted(f"node {address} is preempted in 60 s")


def test_failed_ranks_start_again(group: ScriptedGroup) -> None:
    assert group.run(group.die, group.finish, max_restarts=1) == [2, 2]
    (line,) = [line for line in group.lines if "restart 1 of at most 1" in line]
    assert line.startswith("rank 1 (node 10.0.0.2, pid 101) died; ")
    assert line.endswith("from the beginning")


def test_a_file_server_that_fails_for_a_while_ends_neither_ranks_nor_the_launch(
    group: ScriptedGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every second look at the run directory, while ranks train and after they have failed."""
    looks, is_down = 0, False

    def failing(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(path: Path, *arguments: Any, **named: Any) -> Any:
            nonlocal looks
            looks += is_down and group.directory.path in path.parents
            if looks % 2 and group.directory.path in path.parents:
                raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
            return method(path, *arguments, **named)

        return call

    def die(num_ranks: int) -> Script:
        nonlocal is_down
        yield from group.up(num_ranks, step=7)
        is_down = True
        yield []
        yield [RankEnded(1, None), RankEnded(0, 1, LostRankError("lost"))]

    def finish(num_ranks: int) -> Script:
        nonlocal is_down, looks
        assert looks > 4
        is_down, looks = False, 0
        yield from group.finish(num_ranks)

    for name in ("exists", "iterdir"):
        monkeypatch.setattr(Path, name, failing(getattr(Path, name)))
    assert group.run(die, finish, max_restarts=1) == [2, 2]


def test_too_many_failures_end_the_launch_with_the_last_one(group: ScriptedGroup) -> None:
    with pytest.raises(TxlError) as raised:
        group.run(group.die, group.die, group.finish, max_restarts=1)
    assert "failed again after 1 restart without a new checkpoint (--max-re" in str(raised.value)
    assert "rank 1 (node 10.0.0.2, pid 101) died" in str(raised.value)


def test_the_default_number_of_restarts_is_that_of_the_launcher(group: ScriptedGroup) -> None:
    with pytest.raises(TxlError, match=r"rank 1 \(node 10.0.0.2, pid 101\) died; the run stopped"):
        group.run(group.die, group.finish)
    group.max_restarts = 1
    assert group.run(group.die, group.finish)[1:] == [2, 2]


def test_an_error_of_a_rank_is_not_repeated(group: ScriptedGroup) -> None:
    def fail(num_ranks: int) -> Script:
        yield from group.up(num_ranks, step=1)
        yield [RankEnded(1, 3, DataError("a bad shard")), RankEnded(0, 1, LostRankError("lost"))]

    with pytest.raises(DataError, match="a bad shard"):
        group.run(fail, group.finish, max_restarts=5)


def test_ranks_that_do_not_follow_a_failed_one_are_killed(
    group: ScriptedGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "AFTER_KILL_SECONDS", 0.1)

    def die(num_ranks: int) -> Script:
        yield from group.up(num_ranks, step=1)
        yield [RankEnded(1, -signal.SIGKILL)]
        yield from group.until(lambda: group.killed == {0})
        yield [RankEnded(0, -signal.SIGKILL)]

    assert group.run(die, group.finish, max_restarts=1) == [2, 2]
    assert any("rank 1 (node 10.0.0.2, pid 101) was killed by SIGKILL; " in x for x in group.lines)


@pytest.mark.parametrize("ends_late", [False, True])
def test_killed_ranks_that_do_not_end_are_given_up(
    group: ScriptedGroup, monkeypatch: pytest.MonkeyPatch, ends_late: bool
) -> None:
    """On a node that does not respond. An end before the next start is none of its ranks."""
    monkeypatch.setattr(module, "AFTER_KILL_SECONDS", 0.0)
    monkeypatch.setattr(module, "GIVE_UP_SECONDS", 0.1)

    def die(num_ranks: int) -> Script:
        yield from group.up(num_ranks, step=1)
        yield [RankEnded(1, None)]
        yield from group.until(
            lambda: ends_late and any("restart 1 of" in line for line in group.lines)
        )
        yield [RankEnded(0, None)]

    assert group.run(die, group.finish, max_restarts=1) == [2, 2]


def test_the_loss_of_a_node_does_not_count_even_if_it_is_known_later(group: ScriptedGroup) -> None:
    def lose(num_ranks: int) -> Script:
        yield from group.die(num_ranks)
        yield []
        yield [NodeLost("b")]

    assert group.run(lose, group.finish, max_restarts=0) == [2, 2]
    assert any("with its node, which does not count" in line for line in group.lines)


def test_the_loss_of_a_node_that_is_found_after_the_restart_is_not_counted(
    group: ScriptedGroup,
) -> None:
    def lose(num_ranks: int) -> Script:
        yield [NodeLost("b")]
        yield from group.die(num_ranks)

    assert group.run(group.die, lose, group.finish, max_restarts=3) == [2, 2, 2]
    first, found, second = (line for line in group.lines if "count" in line)
    assert "restart 1 of at most 3" in first
    assert "a lost node is not counted" in first
    assert found == "node b was lost: the last failure does not count"
    assert "with its node, which does not count as a failure; restart" in second


@pytest.mark.parametrize("ranks", ["2", "1:2"])
def test_a_preemption_saves_first_and_does_not_count(ranks: str, group: ScriptedGroup) -> None:
    group.news = [Room(2)]

    def preempt(num_ranks: int) -> Script:
        group.news = [Room(0), preempted("10.0.0.2")]
        yield from group.save_on_request(num_ranks, step=9)
        group.news = [Room(1)]

    expected = 2 if ranks == "2" else 1
    assert group.run(preempt, group.finish, ranks=ranks) == [2, expected]
    assert "node 10.0.0.2 is preempted in 60 s: the ranks save, and start again" in group.lines
    instead = "" if ranks == "2" else " instead of 2"
    number = f"{expected} rank{'' if expected == 1 else 's'}"
    assert f"continuing with {number}{instead} from step 9" in group.lines


def test_a_preemption_that_comes_too_fast_goes_on_from_the_last_checkpoint(
    group: ScriptedGroup,
) -> None:
    # without restarts: the failure does not count
    def die(num_ranks: int) -> Script:
        group.news = [preempted("10.0.0.2")]
        yield from group.up(num_ranks, step=9)
        yield from group.until(group.files.stop.exists)
        group.news = []
        yield [RankEnded(1, None), RankEnded(0, 1, LostRankError("lost"))]

    assert group.run(die, group.finish) == [2, 2]
    assert "continuing with 2 ranks from the beginning" in group.lines
    assert not [line for line in group.lines if "died" in line]


def test_the_next_ranks_are_not_asked_to_stop_for_the_node_of_the_last(
    group: ScriptedGroup,
) -> None:
    def preempt(num_ranks: int) -> Script:
        group.news = [preempted("10.0.0.2")]
        yield from group.save_on_request(num_ranks, step=9)

    def finish(num_ranks: int) -> Script:
        group.news = []
        for _ in range(5):
            assert not group.files.stop.exists()
            yield []
        yield from group.finish(num_ranks)

    assert group.run(preempt, finish) == [2, 2]


def test_a_run_shrinks_after_a_loss_and_grows_when_there_is_room(group: ScriptedGroup) -> None:
    group.news = [Room(2)]

    def lose(num_ranks: int) -> Script:
        group.news = [Room(0)]
        yield from group.die(num_ranks)
        group.news = [Room(1)]

    def grow(num_ranks: int) -> Script:
        group.news = [Room(1)]
        for events in group.save_on_request(num_ranks, step=12):
            if any(isinstance(event, RankEnded) for event in events):
                group.news = [Room(2)]
            yield events

    assert group.run(lose, grow, group.finish, ranks="1:2", max_restarts=1) == [2, 1, 2]
    assert "there is room for 2 ranks instead of 1: the ranks save, and start again" in group.lines
    lines = [line for line in group.lines if line.startswith("continuing")]
    assert lines == [
        "continuing with 1 rank instead of 2 from the beginning",
        "continuing with 2 ranks instead of 1 from step 12",
    ]


def test_ranks_that_cannot_start_are_a_failure_with_its_reason(group: ScriptedGroup) -> None:
    group.news = [Room(2)]

    def give_up(num_ranks: int) -> Script:
        yield [RankEnded(rank, 1, reason="nothing is free") for rank in range(num_ranks)]

    assert group.run(give_up, group.finish, ranks="1:2", max_restarts=1) == [2, 2]
    assert any("(nothing is free); restart 1 of at most 1" in line for line in group.lines)


def test_a_run_that_ends_during_a_change_is_finished(group: ScriptedGroup) -> None:
    def finish(num_ranks: int) -> Script:
        group.news = [preempted("10.0.0.2")]
        yield from group.finish(num_ranks)

    assert group.run(finish) == [2]


def test_ranks_that_do_not_stop_are_killed_after_the_grace_period(group: ScriptedGroup) -> None:
    def hang(num_ranks: int) -> Script:
        yield from group.asked_to_stop(num_ranks)
        yield from group.until(lambda: group.killed == {0, 1})
        yield [RankEnded(rank, None) for rank in range(num_ranks)]

    with pytest.raises(PreemptedError, match="before all ranks had saved"):
        group.run(hang, max_restarts=3)


def test_a_request_reaches_the_ranks_once_the_file_server_works_again(
    group: ScriptedGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    failures, touch = [errno.ESTALE, errno.EIO], Path.touch

    def fails_at_first(path: Path, *arguments: Any, **named: Any) -> None:
        if failures and path == group.files.stop:
            raise OSError(failures.pop(), "failed")
        touch(path, *arguments, **named)

    def stop(num_ranks: int) -> Script:
        yield from group.asked_to_stop(num_ranks)
        yield [RankEnded(rank, 75, PreemptedError("saved")) for rank in range(num_ranks)]

    monkeypatch.setattr(Path, "touch", fails_at_first)
    with pytest.raises(PreemptedError, match="saved"):
        group.run(stop)
    assert not failures


def test_ranks_that_die_after_a_stop_request_are_not_success(group: ScriptedGroup) -> None:
    def die(num_ranks: int) -> Script:
        yield from group.asked_to_stop(num_ranks)
        yield [RankEnded(rank, None) for rank in range(num_ranks)]

    with pytest.raises(PreemptedError, match="before all ranks had saved"):
        group.run(die, group.finish, max_restarts=3)


def test_a_request_that_only_one_rank_got_stops_all(group: ScriptedGroup) -> None:
    def stop(num_ranks: int) -> Script:
        yield from group.up(num_ranks, step=1)
        yield [RankEnded(1, 75, PreemptedError("saved"))]
        yield from group.until(group.files.stop.exists)
        yield [RankEnded(0, 75, PreemptedError("saved"))]

    with pytest.raises(PreemptedError, match="saved"):
        group.run(stop, group.finish, max_restarts=3)


def test_a_request_before_the_ranks_are_up_ends_the_launch(group: ScriptedGroup) -> None:
    def wait(num_ranks: int) -> Script:
        os.kill(os.getpid(), signal.SIGTERM)
        yield from group.until(lambda: False)

    with pytest.raises(PreemptedError, match="no rank was training"):
        group.run(wait)


def test_a_group_that_is_lost_after_a_stop_request_has_stopped(group: ScriptedGroup) -> None:
    def lose_head(num_ranks: int) -> Script:
        yield from group.asked_to_stop(num_ranks)
        raise TxlError("the head of the Ray cluster does not respond")

    with pytest.raises(PreemptedError, match="stopped on request, but the head of the Ray"):
        group.run(lose_head)


def test_a_launch_removes_its_own_files_and_no_others(tmp_path: Path) -> None:
    for name in ("metrics.jsonl", "my.launch-notes.txt", ".launch-01234.stop"):
        (tmp_path / name).touch()
    others, files = set(tmp_path.iterdir()), LaunchFiles(tmp_path, "0123")
    with files.held():
        files.stop.touch()
        files.saved.touch()
        with LaunchFiles(tmp_path, "other").held():
            pass
        assert files.stop.exists()
        assert is_locked(tmp_path / ".launch-0123.launcher"), "how txl status finds the launcher"
    assert set(tmp_path.iterdir()) == others
