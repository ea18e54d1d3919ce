"""Progress: a live display on a terminal, and rates of work done, not of work that was skipped."""

import os
import pty
import re
import subprocess
import sys
from collections.abc import Callable, Iterable
from itertools import pairwise
from pathlib import Path

import pytest

from data_pipeline.preparation.finished_units import RECORDS
from data_pipeline.shards.push import push_dataset
from tests.data_pipeline.conftest import bucket, corpus, dataset, s3_server  # noqa: F401 - fixtures
from tests.data_pipeline.preparation.test_work_units import StopsAfter, prepare
from tests.support.commands import ENVIRONMENT
from txl_dist.cli import progress

MIB = 2**20

SHOW = """
from txl_dist.cli.progress import run_progress
with run_progress(200, quiet=False) as on_line:
    on_line("12:00:00 step 100 | loss 3.4123 | ppl 30.30 | tok/s 12,345 | eta 0:01:40 | bpb 2.030"
            " | lr 1.00e-03 | grad 0.500 | mfu 55% | mem valid 100% | data wait 0.0%")
"""


def test_80_columns_show_the_speed_and_the_time_left() -> None:
    ours, theirs = pty.openpty()
    environment = {**ENVIRONMENT, "COLUMNS": "80", "TERM": "xterm"}
    process = subprocess.Popen([sys.executable, "-c", SHOW], stdout=theirs, env=environment)
    os.close(theirs)
    shown = b""
    try:
        while block := os.read(ours, 4096):
            shown += block
    except OSError:
        assert shown  # Linux ends a terminal whose other side is closed with an error
    os.close(ours)
    assert process.wait(timeout=60) == 0
    plain = re.sub(rb"\x1b\[[0-9;?]*[a-zA-Z]", b"", shown).decode()
    assert "50% step 100 | loss 3.4123 | ppl 30.30 | tok/s 12,345 | eta 0:01:40" in plain


@pytest.fixture
def shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[[Iterable[tuple[float, str, int, int]]], list[str]]:
    """The lines printed for calls (seconds, phase, MiB done, MiB in total)."""

    def lines(calls: Iterable[tuple[float, str, int, int]]) -> list[str]:
        clock = 100.0
        monkeypatch.setattr(progress.time, "monotonic", lambda: clock)
        with progress.progress_in_bytes() as show:
            for seconds, phase, done, total in calls:
                clock = 100.0 + seconds
                show(phase, done * MIB, total * MIB)
        return capsys.readouterr().err.splitlines()

    return lines


def test_a_rate_is_of_the_phase_it_is_shown_in(shown: Callable[..., list[str]]) -> None:
    calls = [(0, "reading", 0, 90), (6, "reading", 60, 90), (9, "reading", 90, 90)]
    assert shown([*calls, (13, "writing", 0, 80), (19, "writing", 30, 80)]) == [
        "reading: 60.0 of 90.0 MiB (67%), 10.0 MiB/s, 3 s left",
        "writing: 0.0 of 80.0 MiB (0%)",
        "writing: 30.0 of 80.0 MiB (38%), 5.0 MiB/s, 10 s left",
    ]


def test_what_was_there_when_a_phase_began_is_in_no_rate(shown: Callable[..., list[str]]) -> None:
    calls = [(7, "sending", 10_000, 10_070), (13, "sending", 10_030, 10_070)]
    assert shown(calls) == [
        "sending: 10,000.0 of 10,070.0 MiB (99%)",
        "sending: 10,030.0 of 10,070.0 MiB (100%), 5.0 MiB/s, 8 s left",
    ]


def test_time_in_which_finished_work_was_found_is_in_no_rate(
    shown: Callable[..., list[str]],
) -> None:
    found = [(second, "writing", 0, 300 - 40 * second) for second in range(6)]
    assert shown([*found, (11, "writing", 60, 100)])[-1].endswith("10.0 MiB/s, 4 s left")


def test_units_found_finished_are_no_work_to_do(tmp_path: Path) -> None:
    source, out = tmp_path / "in", tmp_path / "out"
    source.mkdir()
    for number in range(9):
        (source / f"{number}.txt").write_text(f"{number} " * 400)
    with pytest.raises(KeyboardInterrupt):
        prepare(source, out, 2000, workers=StopsAfter(11))
    assert len(list(out.glob(f".staging.tmp/{RECORDS}/*.json"))) > 3
    calls: list[tuple[str, int, int]] = []
    done = prepare(source, out, 2000, progress=lambda *call: calls.append(call))
    assert 0 < done.reused_units < done.units
    for phase in ("reading", "writing"):
        of_phase = [(at, total) for what, at, total in calls if what == phase]
        start, whole = of_phase[0]
        assert start == 0
        at, left = of_phase[-1]
        assert at == left <= whole
        assert all(b[0] - a[0] + a[1] - b[1] > 0 for a, b in pairwise(of_phase))
    totals = {what: total for what, _, total in calls}
    assert totals["reading"] == 0, "all of it was found"


def test_files_that_are_at_the_url_are_not_sent_nor_counted(
    dataset: tuple[Path, object],  # noqa: F811
    bucket: object,  # noqa: F811
) -> None:
    directory, _ = dataset
    url = "s3://bucket/data"
    push_dataset(directory, url)
    bucket.rm("bucket/data/train-000001.tar.zst")  # type: ignore[attr-defined]
    calls: list[tuple[str, int, int]] = []
    push_dataset(directory, url, progress=lambda *call: calls.append(call))
    size = (directory / "train-000001.tar.zst").stat().st_size
    assert [(done, total) for _, done, total in calls] == [(0, size), (size, size)]
    assert {re.sub(r"\W.*", "", what) for what, _, _ in calls} == {"sending"}
