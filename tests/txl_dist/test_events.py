"""Events of a run: only the newest attempt counts, and every second of a run has one cause.

No line that was cut off hides another, through kills and resumes.
"""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from tests.support.run_directories import event, start, write_events
from tests.support.training_runs import NO_EVALUATION, TinyRuns, metrics, train, train_some
from txl_dist.events import EVENTS, Event, EventLog, WallTime, last_start, read_events
from txl_dist.runtime.process import Activity, Span
from txl_dist.training import report
from txl_dist.training.report import Report
from txl_dist.training.state import TrainState


def kinds(events: Sequence[Event]) -> list[str]:
    return [each.kind for each in events]


@pytest.mark.parametrize("cut_off", ['{"kind": "sa', "\0\0", '{"kind": "of the future"}', "\xff"])
def test_a_line_that_was_cut_off_costs_nothing_else(tmp_path: Path, cut_off: str) -> None:
    write_events(tmp_path, event("first_batch"))
    with (tmp_path / EVENTS).open("a") as file:
        file.write(cut_off)
    write_events(tmp_path, event("save", step=1, seconds={"steps": 1.5}))
    first, second = read_events(tmp_path)
    assert (first.kind, second.kind, second.seconds) == ("first_batch", "save", {"steps": 1.5})


def test_an_attempt_that_was_replaced_is_not_heard(tmp_path: Path) -> None:
    write_events(tmp_path, start(0), attempt=1)
    write_events(tmp_path, start(4), attempt=2)
    write_events(tmp_path, event("save", step=9), event("error", "fenced"), attempt=1)
    write_events(tmp_path, event("first_batch"), attempt=2)
    assert kinds(read_events(tmp_path)) == ["start", "start", "first_batch"]


def test_an_event_that_cannot_be_written_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    log = EventLog(tmp_path / "missing" / EVENTS, lambda: 7)
    assert log.write("first_batch", "first batch").attempt == 7
    assert "the run continues" in caplog.text
    assert read_events(tmp_path) == []


def test_an_event_about_any_path_is_written_on_one_line_that_a_terminal_can_show(
    tmp_path: Path,
) -> None:
    write_events(tmp_path, event("failed", "no \udcff\n\x1b[2J"))
    (read,) = read_events(tmp_path)
    assert read.text == r"no \udcff\n\x1b[2J"


def test_a_start_begins_with_its_launcher_or_with_rank_0(tmp_path: Path) -> None:
    up, begin, batch = event("ranks_started"), start(0), event("first_batch")

    def of(*events: dict[str, Any]) -> list[str]:
        (tmp_path / EVENTS).unlink(missing_ok=True)
        write_events(tmp_path, *events)
        return kinds(last_start(read_events(tmp_path)))

    assert of(up, begin, batch) == ["ranks_started", "start", "first_batch"]
    assert of(up, begin, batch, event("restart"), up, begin) == ["ranks_started", "start"]
    assert of(up, begin, batch, event("restart"), up) == ["ranks_started"]
    assert of(up, begin, batch, begin, event("stopped")) == ["start", "stopped"], "by torchrun"
    assert of() == []


# --- the wall time --------------------------------------------------------------------------------


START_UP_SECONDS, STEP_SECONDS, SAVE_SECONDS = 7.0, 2.0, 1.0


NOTHING: Any = Mock()
"""Metrics and config of a report do not matter here."""


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
        num_steps: int = 1000,
        reached_step: int = 0,
    ) -> None:
        self.activity, self.clocks, self.step, self.interval = Activity(), clocks, step, interval
        self.activity.reset()
        clocks.wait(START_UP_SECONDS)
        log, seconds = EventLog(run / EVENTS, lambda: 1), sum(self.activity.seconds().values())
        facts = {"reached_step": reached_step, "process_seconds": seconds}
        log.write(**start(step, num_steps=num_steps, **facts))
        self.goodput = Report(NOTHING, log, self.activity, NOTHING, flops_per_token=1, peak_flops=1)
        self.goodput.start(TrainState(step=step))

    def train(self, num_steps: int) -> "Process":
        for _ in range(num_steps):
            self.goodput.segment(self.step + 1)
            self.activity.enter(Span.FORWARD)
            # The first step of a process is a part of its start-up.
            self.clocks.wait(STEP_SECONDS if self.activity.num_steps else 0)
            self.activity.end_step()
            self.step += 1
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
            patch.setattr(report.log, "info", lambda text, line: lines.append(text % line))
            state = TrainState(step=self.step)
            self.goodput.end(state, is_complete=is_complete, is_stopped=is_stopped)
        return "".join(lines)


def values_of(goodput: Report) -> dict[str, float]:
    """Its metrics in a line."""
    values: dict[str, float] = {}
    goodput.line(TrainState(), values)
    return values


def test_the_causes_of_a_killed_run_add_up_to_its_wall_time(tmp_path: Path, clocks: Clocks) -> None:
    began = clocks.wall
    Process(tmp_path, clocks).train(13)  # killed after step 13, saved at step 10
    # The launcher or another rank notices it.
    write_events(tmp_path, event("rank_lost", "rank 0 is gone"))
    clocks.wait(60)
    Process(tmp_path, clocks, step=10, reached_step=13)  # killed before its first step
    clocks.wait(30)
    last = Process(tmp_path, clocks, step=10).train(11)
    seconds = last.goodput.seconds
    assert sum(seconds.values()) == pytest.approx(clocks.wall - began)
    assert seconds["steps"] == (9 + 10) * STEP_SECONDS
    assert seconds["lost steps"] == 3 * STEP_SECONDS
    # Nobody says when the second process ended.
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
def test_steps_of_metrics_after_the_last_event_are_lost_too(
    tmp_path: Path, clocks: Clocks, resumed_at: int
) -> None:
    Process(tmp_path, clocks).train(12)
    first = Process(tmp_path, clocks, step=resumed_at, reached_step=14).goodput
    assert values_of(first)["lost_steps"] == 14 - resumed_at
    # Until the last save, of step 10: nobody says how long the process lived after it.
    assert first.seconds.get("lost steps", 0) == (10 - resumed_at) * STEP_SECONDS
    # If that process is killed too, the next one does not count them again.
    again = Process(tmp_path, clocks, step=resumed_at, reached_step=resumed_at).goodput
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
    stored = WallTime.of(read_events(tmp_path)).seconds
    assert (stored["steps"], stored["lost steps"]) == (4 * STEP_SECONDS, 300)


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
    Process(tmp_path, clocks, num_steps=5).train(5).end(is_complete=True)
    before = WallTime.of(read_events(tmp_path)).seconds
    clocks.wait(1e6)
    again = Process(tmp_path, clocks, step=5, num_steps=5)
    assert again.end(is_complete=True) == ""
    assert WallTime.of(read_events(tmp_path)).seconds == before, "nothing was trained"
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
    """Also where its own event was lost: interpolated, to one step's time."""
    Process(tmp_path, clocks, interval=1).train(100)
    lines = (tmp_path / EVENTS).read_text().splitlines()
    (tmp_path / EVENTS).write_text("\n".join(x for x in lines if '"step":30,' not in x) + "\n")
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


def test_metrics_and_summary_of_a_resumed_run(tiny: TinyRuns) -> None:
    spec = tiny.spec(tiny.path, NO_EVALUATION)  # saves every 6 steps
    assert tiny.ranks(1).run(train_some, spec, num_steps=9) == [1]
    assert tiny.ranks(1).run(train, spec) == [0]
    lines = metrics(tiny.path)
    assert [line["restarts"] for line in lines] == [0] * 6 + [1] * 14
    assert [line["lost_steps"] for line in lines] == [0] * 6 + [3] * 14
    assert all(0 <= line["goodput"] <= 1 and 0 <= line["save_wait"] < 1 for line in lines)
    waits = {line["step"] for line in lines if line["save_wait"] > 0}
    assert waits == {13, 19}, "the steps after the checkpoints of the last process"
    summaries = (tiny.path / "logs" / "rank-0.log").read_text().split(" summary | ")[1:]
    assert [text.partition(" | ")[0] for text in summaries] == [
        "0 restarts, 0 steps lost",
        "1 restart, 3 steps lost",
    ]
