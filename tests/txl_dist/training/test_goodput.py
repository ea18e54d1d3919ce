"""Every second of a run has one cause, through kills and resumes."""

import json
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.gloo_ranks import RankGroups
from tests.support.training_runs import NO_EVALUATION, metrics, tiny_job, train
from txl_dist.evaluation.scores import LossSums
from txl_dist.runtime.activity import Activity, Span
from txl_dist.runtime.world import World
from txl_dist.training import goodput
from txl_dist.training.goodput import MAX_CHECKPOINTS, Goodput
from txl_dist.training.job import TrainJob
from txl_dist.training.state import TrainState
from txl_dist.training.step import StepResult, TrainStep

RESULT = StepResult(LossSums(), gradient_norm=1.0, memory_valid=1.0, raised=frozenset())
START_UP_SECONDS, STEP_SECONDS, SAVE_SECONDS = 7.0, 2.0, 1.0


class Clocks:
    """The clocks of a machine."""

    def __init__(self) -> None:
        self.monotonic, self.wall = 500.0, 1e9

    def wait(self, seconds: float) -> None:
        self.monotonic += seconds
        self.wall += seconds


@pytest.fixture
def clocks(monkeypatch: pytest.MonkeyPatch) -> Clocks:
    clocks = Clocks()
    monkeypatch.setattr(time, "monotonic", lambda: clocks.monotonic)
    monkeypatch.setattr(time, "time", lambda: clocks.wall)
    return clocks


class Process:
    """A process of a run: resumes at `step`, reports every step, saves every `interval` steps."""

    def __init__(
        self,
        run: Path,
        clocks: Clocks,
        *,
        step: int = 0,
        interval: int = 5,
        is_finished: bool = False,
    ) -> None:
        self.activity, self.clocks, self.step, self.interval = Activity(), clocks, step, interval
        self.activity.reset()
        clocks.wait(START_UP_SECONDS)
        path = run / "goodput.json"
        self.goodput = Goodput(path, self.activity, step=step, is_finished=is_finished)

    def train(self, num_steps: int) -> "Process":
        for _ in range(num_steps):
            self.activity.enter(Span.FORWARD)
            # The first step of a process is a part of its start-up.
            self.clocks.wait(STEP_SECONDS if self.activity.num_steps else 0)
            self.activity.end_step()
            self.step += 1
            self.goodput.step(TrainState(step=self.step), RESULT)
            if self.step % self.interval == 0:
                self.activity.enter(Span.SAVE_WAIT)
                self.clocks.wait(SAVE_SECONDS)
                self.activity.enter(Span.OTHER)
                self.goodput.save(TrainState(step=self.step))
        return self

    def end(self, *, is_complete: bool = False, is_stopped: bool = False) -> str:
        """The line that is logged."""
        lines: list[str] = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(goodput.log, "info", lambda _, line: lines.append(line))
            state = TrainState(step=self.step)
            self.goodput.end(state, is_complete=is_complete, is_stopped=is_stopped)
        return "".join(lines)


def values_of(goodput: Goodput) -> dict[str, float]:
    """Its metrics in a line."""
    values: dict[str, float] = {}
    goodput.line(TrainState(), values)
    return values


def test_the_causes_of_a_killed_run_add_up_to_its_wall_time(tmp_path: Path, clocks: Clocks) -> None:
    began = clocks.wall
    Process(tmp_path, clocks).train(13)  # killed after step 13, saved at step 10
    clocks.wait(60)
    Process(tmp_path, clocks, step=10)  # killed before its first step
    clocks.wait(30)
    last = Process(tmp_path, clocks, step=10).train(11)
    seconds = last.goodput.seconds
    assert sum(seconds.values()) == pytest.approx(clocks.wall - began)
    assert seconds["steps"] == (9 + 10) * STEP_SECONDS
    assert seconds["lost steps"] == 3 * STEP_SECONDS
    # The second process ended without an update after that of its start.
    assert seconds["down"] == 60 + 30
    assert seconds["start-up"] == 3 * START_UP_SECONDS
    assert seconds["save wait"] == 4 * SAVE_SECONDS
    values = values_of(last.goodput)
    assert (values["restarts"], values["lost_steps"]) == (2, 3)
    assert values["goodput"] == pytest.approx(38 / (clocks.wall - began))
    summary = last.end()
    assert summary.startswith("summary | 2 restarts, 3 steps lost | goodput 23.")
    assert "% of 0:02:" in summary
    assert summary.endswith("start-up 13.2% | save wait 2.5% | lost steps 3.8% | down 56.6%")


@pytest.mark.parametrize("resumed_at", [5, 10])
def test_steps_after_the_last_update_are_lost_too(
    tmp_path: Path, clocks: Clocks, resumed_at: int
) -> None:
    """metrics.jsonl knows of them, but goodput.json is written every two seconds at most."""
    Process(tmp_path, clocks).train(12)
    clocks.wait(0.5)
    activity = Activity()
    activity.reset()
    path = tmp_path / "goodput.json"
    first = Goodput(path, activity, step=resumed_at, reached_step=14)
    assert values_of(first)["lost_steps"] == 14 - resumed_at
    assert first.seconds["lost steps"] == (12 - resumed_at) * STEP_SECONDS
    # If that process is killed too, the next one does not count them again.
    again = Goodput(path, activity, step=resumed_at, reached_step=resumed_at)
    assert values_of(again)["lost_steps"] == 14 - resumed_at


def test_a_start_after_a_stop_request_is_no_restart(tmp_path: Path, clocks: Clocks) -> None:
    """But the time until then counts as down, and a kill of that start as a failure."""
    Process(tmp_path, clocks).train(5).end(is_stopped=True)
    clocks.wait(7)
    resumed = Process(tmp_path, clocks, step=5).train(3).goodput
    assert (values_of(resumed)["restarts"], resumed.seconds["down"]) == (0, 7)
    assert values_of(Process(tmp_path, clocks, step=5).goodput)["restarts"] == 1


def test_a_process_that_ends_before_its_first_line_counts(tmp_path: Path, clocks: Clocks) -> None:
    began = clocks.wall
    Process(tmp_path, clocks)
    clocks.wait(5)
    seconds = Process(tmp_path, clocks).train(2).goodput.seconds
    assert seconds["down"] == 5
    assert sum(seconds.values()) == pytest.approx(clocks.wall - began)
    assert values_of(Process(tmp_path, clocks).goodput)["restarts"] == 2


def test_a_step_that_never_ended_is_not_productive(tmp_path: Path, clocks: Clocks) -> None:
    """A rank hung in it until the time limit."""
    process = Process(tmp_path, clocks).train(5)
    process.activity.enter(Span.BACKWARD)
    clocks.wait(300)
    assert process.end().startswith("summary | 0 restarts, 0 steps lost | goodput 2.5% of 0:05:16")
    stored = json.loads((tmp_path / "goodput.json").read_text())["seconds"]
    assert (stored["steps"], stored["lost steps"]) == (4 * STEP_SECONDS, 300)


def test_the_time_after_the_last_update_is_down_time(tmp_path: Path, clocks: Clocks) -> None:
    Process(tmp_path, clocks).train(5)
    clocks.wait(0.9)  # in a step that never ended
    assert Process(tmp_path, clocks, step=5).goodput.seconds["down"] == pytest.approx(0.9)


@pytest.mark.parametrize("jump", [-1e6, 0.0])
def test_a_wall_clock_that_jumps_back_gives_no_negative_time(
    tmp_path: Path, clocks: Clocks, jump: float
) -> None:
    Process(tmp_path, clocks).train(5)
    clocks.wall += jump
    seconds = Process(tmp_path, clocks, step=5).train(3).goodput.seconds
    assert min(seconds.values()) >= 0
    assert seconds["down"] == 0
    assert seconds["steps"] == (4 + 2) * STEP_SECONDS


def test_a_finished_run_that_is_extended_was_not_down(tmp_path: Path, clocks: Clocks) -> None:
    Process(tmp_path, clocks).train(5).end(is_complete=True)
    before = (tmp_path / "goodput.json").read_bytes()
    clocks.wait(1e6)
    again = Process(tmp_path, clocks, step=5, is_finished=True)
    assert again.end(is_complete=True) == ""
    assert (tmp_path / "goodput.json").read_bytes() == before, "nothing was trained"
    again = Process(tmp_path, clocks, step=5)
    seconds = again.train(2).goodput.seconds
    assert (seconds["down"], values_of(again.goodput)["restarts"]) == (0, 0)


@pytest.mark.parametrize("step", [2, 5])
def test_a_start_that_continues_a_finished_run_counts_if_it_is_killed_at_once(
    tmp_path: Path, clocks: Clocks, step: int
) -> None:
    """From its end, or from an older checkpoint."""
    Process(tmp_path, clocks).train(5).end(is_complete=True)
    clocks.wait(1e6)
    Process(tmp_path, clocks, step=step)
    clocks.wait(7)
    killed = Process(tmp_path, clocks, step=step).goodput
    assert (values_of(killed)["restarts"], killed.seconds["down"]) == (1, 7)


def test_an_old_checkpoint_loses_about_the_time_of_its_steps(
    tmp_path: Path, clocks: Clocks
) -> None:
    """Also where its own line is no longer in the file: interpolated, to one step's time."""
    Process(tmp_path, clocks, interval=1).train(5 * MAX_CHECKPOINTS)
    stored = json.loads((tmp_path / "goodput.json").read_text())["productive"]
    assert len(stored) == MAX_CHECKPOINTS
    seconds = Process(tmp_path, clocks, step=30).goodput.seconds
    assert seconds["steps"] == pytest.approx(29 * STEP_SECONDS, abs=STEP_SECONDS)
    assert seconds["lost steps"] == pytest.approx(70 * STEP_SECONDS, abs=STEP_SECONDS)


def test_a_rollback_inside_a_process_counts_its_steps_as_lost(
    tmp_path: Path, clocks: Clocks
) -> None:
    process = Process(tmp_path, clocks).train(13)
    process.goodput.rollback(TrainState(step=10), 13)
    process.step = 10
    process.train(4)
    seconds = process.goodput.seconds
    assert seconds["lost steps"] == 3 * STEP_SECONDS
    assert seconds["steps"] == (9 + 4) * STEP_SECONDS
    assert values_of(process.goodput)["lost_steps"] == 3


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"updated": 1}', b"\xff"])
def test_after_a_damaged_file_the_goodput_is_counted_anew(
    tmp_path: Path, clocks: Clocks, content: bytes
) -> None:
    (tmp_path / "goodput.json").write_bytes(content)
    process = Process(tmp_path, clocks, step=5).train(5)
    assert process.goodput.seconds["steps"] == 4 * STEP_SECONDS
    assert values_of(Process(tmp_path, clocks, step=10).goodput)["restarts"] == 1


def train_until(world: World, job: TrainJob, last: int) -> int:
    """Fail in the step after `last`, as a bug or a lost GPU would."""
    original = TrainStep.__call__

    def failing(self: TrainStep, *args: Any, **options: Any) -> Any:
        if options["step"] > last:
            raise RuntimeError("failed")
        return original(self, *args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TrainStep, "__call__", failing)
        with pytest.raises(RuntimeError, match="failed"):
            train(world, job)
    return 0


def test_metrics_and_summary_of_a_resumed_run(
    ranks: RankGroups, dataset: Path, tmp_path: Path
) -> None:
    job = tiny_job(dataset, tmp_path, NO_EVALUATION)  # saves every 6 steps
    assert ranks(1).run(train_until, job, 9) == [0]
    assert ranks(1).run(train, job) == [0]
    lines = metrics(tmp_path)
    assert [line["restarts"] for line in lines] == [0] * 6 + [1] * 14
    assert [line["lost_steps"] for line in lines] == [0] * 6 + [3] * 14
    assert all(0 <= line["goodput"] <= 1 and 0 <= line["save_wait"] < 1 for line in lines)
    waits = {line["step"] for line in lines if line["save_wait"] > 0}
    assert waits == {13, 19}, "the steps after the checkpoints of the last process"
    summaries = (tmp_path / "logs" / "rank-0.log").read_text().split(" summary | ")[1:]
    assert [text.partition(" | ")[0] for text in summaries] == [
        "0 restarts, 0 steps lost",
        "1 restart, 3 steps lost",
    ]
