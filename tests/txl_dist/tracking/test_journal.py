"""The journal: complete lines after a kill and after a full disk."""

import json
import logging
import math
import resource
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from txl_dist.tracking.journal import (
    READ_BYTES,
    JournalTail,
    MetricsJournal,
    last_trained_step,
    read_metrics,
)


def _steps(path: Path) -> list[int]:
    return [line["step"] for line in read_metrics(path)]


@given(num_lines=st.integers(1, 6), data=st.data())
def test_a_journal_cut_at_any_byte_keeps_its_complete_lines_and_continues(
    num_lines: int, data: st.DataObject
) -> None:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "metrics.jsonl"
        with MetricsJournal(path) as journal:
            for step in range(num_lines):
                journal.write({"step": step, "tokens": step, "time": 1.5, "loss": step / 3})
        whole = path.read_bytes()
        cut = data.draw(st.integers(0, len(whole)))
        path.write_bytes(whole[:cut])

        with MetricsJournal(path) as journal:
            journal.write({"step": 100, "tokens": 1, "time": 2.0})

        # A line that lacks only its line end is complete as well.
        num_kept = whole[:cut].count(b"\n") + (whole[cut : cut + 1] == b"\n")
        assert _steps(path) == [*range(num_kept), 100]
        assert all(json.loads(line) for line in path.read_text().splitlines())


def test_truncated_steps_are_kept_elsewhere_and_each_step_is_there_once(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricsJournal(path) as journal:
        for step in range(1, 8):
            journal.write({"step": step, "tokens": step, "time": 0.0})
        journal.truncate_after(5)
        for step in range(6, 9):
            journal.write({"step": step, "tokens": step, "time": 9.0})
    assert _steps(path) == list(range(1, 9))
    assert _steps(tmp_path / "logs/metrics-superseded.jsonl") == [6, 7]


def test_lines_that_are_not_objects_are_skipped(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(
        b'{"step": 1}\n\0\0\0\n[1]\n{"step": "x"}\n{"step": 2}\n' + b"[" * 9999 + b"\n"
    )
    assert _steps(path) == [1, 2]
    with MetricsJournal(path) as journal:
        journal.truncate_after(1)
    assert path.read_bytes() == b'{"step": 1}\n'


def test_the_last_trained_step_is_the_highest_of_the_last_lines(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    assert last_trained_step(path) == 0
    with MetricsJournal(path) as journal:
        for step in (1, 2, 5):
            journal.write({"step": step, "tokens": step, "time": 0.0})
        journal.write({"step": 3, "tokens": 3, "time": 0.0, "valid/loss": 1.0})  # scored later
    path.write_bytes(path.read_bytes() + b'{"step": 9, "tok')
    assert last_trained_step(path) == 5


def test_values_that_json_lacks_are_written_as_valid_json_and_read_back(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    values = {"a": math.inf, "b": -math.inf, "c": math.nan, "d": 1e-300}
    with MetricsJournal(path) as journal:
        journal.write({"step": 1, "tokens": 2, "time": 3.0, **values})

    def reject(constant: str) -> float:
        raise AssertionError(constant)

    json.loads(path.read_text(), parse_constant=reject)
    (line,) = read_metrics(path)
    assert math.isnan(line.pop("c"))
    assert line == {"step": 1, "tokens": 2, "time": 3.0, "a": math.inf, "b": -math.inf, "d": 1e-300}


def test_a_sender_gets_past_more_bytes_without_a_line_than_it_reads_at_once(
    tmp_path: Path,
) -> None:
    path = tmp_path / "metrics.jsonl"
    for junk in (b"\0" * (2 * READ_BYTES), b"\0\n" * READ_BYTES):
        path.write_bytes(b'{"step": 1}\n' + junk + b'\n{"step": 2}\n{"step": 3')
        tail = JournalTail(path)
        assert [[line["step"] for line in tail.lines()] for _ in range(3)] == [[1], [2], []]
        with path.open("ab") as file:
            file.write(b"}\n")
        assert [line["step"] for line in tail.lines()] == [3]


@pytest.mark.fault_row(42)
def test_a_full_disk_causes_one_warning_and_no_line_is_lost(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "metrics.jsonl"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with MetricsJournal(path) as journal, caplog.at_level(logging.WARNING):
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))  # inside the third line
        try:
            for step in range(5):
                journal.write({"step": step, "tokens": step, "time": 1700000000.0})
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert len(_steps(path)) < 5
        journal.write({"step": 5, "tokens": 5, "time": 1700000000.0})
    assert _steps(path) == list(range(6))
    assert len(caplog.records) == 1
