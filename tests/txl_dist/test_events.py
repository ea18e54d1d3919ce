"""Events of a run: no line that was cut off hides another, and only the newest attempt counts."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support.run_directories import event, start, write_events
from txl_dist.events import EVENTS, Event, EventLog, last_start, read_events


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
