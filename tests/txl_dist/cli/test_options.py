"""Progress: a live display on a terminal, and rates of work done, not of work that was skipped.

Every argument and option for a local path refuses a URL, and creates no directory `s3:`.
"""

# ruff: noqa: F811 - a test names an imported fixture as its parameter

import os
import pty
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from data_pipeline.errors import ConfigError
from data_pipeline.preparation.documents import RECORDS
from data_pipeline.shards.data_commands import push_dataset
from data_pipeline.shards.shard_files import FrameCache
from data_pipeline.system.sources import count_bytes, counting_bytes
from data_pipeline.system.workers import InProcess
from tests.data_pipeline.conftest import bucket, corpus, dataset, s3_server, txl  # noqa: F401
from tests.data_pipeline.preparation.preparing import StopsAfter, prepare
from tests.support.commands import ENVIRONMENT, wait_until
from txl_dist.cli import options
from txl_dist.cli.options import MIB, TOKENS, WorkUnit, _Work

Lines = Callable[..., list[str]]


@pytest.fixture
def lines_at(monkeypatch: pytest.MonkeyPatch) -> Lines:
    """The lines for calls (seconds, label, done, total): what a display shows after each."""

    def lines(
        unit: WorkUnit, workers: InProcess | None, *calls: tuple[float, str, int, int]
    ) -> list[str]:
        clock = 100.0
        monkeypatch.setattr(options.time, "monotonic", lambda: clock)
        work, shown = _Work(unit, workers), []
        for seconds, label, done, total in calls:
            clock = 100.0 + seconds
            work.update(label, done * unit.size, total * unit.size)
            shown.append(work.line())
        return shown

    return lines


def test_a_rate_counts_its_own_label_only(lines_at: Lines) -> None:
    calls = [(0, "reading", 0, 90), (6, "reading", 60, 90), (9, "reading", 90, 90)]
    assert lines_at(MIB, None, *calls, (13, "writing", 0, 80), (19, "writing", 30, 80))[1:] == [
        "reading: 60.0 of 90.0 MiB (67%), 10.0 MiB/s, 3 s left",
        "reading: 90.0 of 90.0 MiB (100%), 10.0 MiB/s, 0 s left",
        "writing: 0.0 of 80.0 MiB (0%), 13 s",
        "writing: 30.0 of 80.0 MiB (38%), 5.0 MiB/s, 10 s left",
    ]


def test_bytes_that_were_done_before_a_label_are_not_in_its_rate(lines_at: Lines) -> None:
    calls = [(7, "sending", 10_000, 10_070), (13, "sending", 10_030, 10_070)]
    assert lines_at(MIB, None, *calls) == [
        "sending: 10,000.0 of 10,070.0 MiB (99%), 7 s",
        "sending: 10,030.0 of 10,070.0 MiB (100%), 5.0 MiB/s, 8 s left",
    ]


def test_time_spent_finding_finished_work_is_not_in_the_rate(lines_at: Lines) -> None:
    lookups = [(second, "writing", 0, 300 - 40 * second) for second in range(6)]
    lines = lines_at(MIB, None, *lookups, (11, "writing", 60, 100))
    assert lines[-1].endswith("10.0 MiB/s, 4 s left")


class BusyWorkers(InProcess):
    """Workers that are at units, and some that have not started."""

    num_workers = 20

    def __init__(self, num_busy: int) -> None:
        self.num_busy = num_busy

    def unfinished_bytes(self) -> int:
        return 3 * 2**20 * self.num_busy

    def missing(self) -> str:
        return "" if self.num_busy else "CPUs"


def test_work_that_waits_for_workers_says_so(lines_at: Lines) -> None:
    calls = [(0, "", 0, 0), (5, "scoring", 100, 400)]
    waiting = ["waiting 0 s for CPUs", "waiting 5 s for CPUs"]
    assert lines_at(TOKENS, BusyWorkers(0), *calls) == waiting
    assert lines_at(TOKENS, None, *calls)[0] == "starting, 0 s"


def test_the_bytes_of_units_that_are_not_finished_are_in_the_amount(lines_at: Lines) -> None:
    reading = (5.0, "reading", 10, 40)
    assert lines_at(MIB, BusyWorkers(4), reading) == ["reading: 22.0 of 40.0 MiB (55%), 5 s"]
    # A file may have grown.
    assert lines_at(MIB, BusyWorkers(11), reading) == ["reading: 40.0 of 40.0 MiB (100%), 5 s"]
    with counting_bytes():
        count_bytes(2 * 2**20)
        lines = lines_at(MIB, InProcess(), reading)
    assert lines == ["reading: 12.0 of 40.0 MiB (30%), 5 s"]


def test_lines_are_printed_elsewhere_than_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = ""

    def are_there(text: str) -> bool:
        nonlocal lines
        lines += capsys.readouterr().err
        return text in lines

    with options.running("short work"):
        pass
    monkeypatch.setattr(options, "SILENT_SECONDS", 0.01)
    with options.running("loading"):
        wait_until(lambda: are_there("loading: 0 s\nloading: 0 s\n"))
    with options.work_progress(TOKENS, BusyWorkers(2)) as show:
        show("scoring", 100, 400)
        wait_until(lambda: are_there("scoring: 100 of 400 tokens (25%)"))
    assert "work" not in lines


def test_a_terminal_shows_a_line_that_changes() -> None:
    program = """
import time
from txl_dist.cli import options
with options.work_progress(options.TOKENS) as show:
    for done in (0, 100, 300):
        show("[scoring]", done, 400)
        time.sleep(0.3)
"""
    reader, terminal = pty.openpty()
    environment = {**ENVIRONMENT, "COLUMNS": "80", "TERM": "xterm"}
    process = subprocess.Popen([sys.executable, "-c", program], stderr=terminal, env=environment)
    os.close(terminal)
    output = b""
    with suppress(OSError):  # Linux reports EIO when the other side of a terminal is closed.
        while block := os.read(reader, 4096):
            output += block
    os.close(reader)
    assert process.wait(timeout=60) == 0
    assert b"[scoring]: 100 of 400 tokens (25%)" in output
    assert b"[scoring]: 300 of 400 tokens (75%)" in output


def test_finished_units_do_not_count_as_work(tmp_path: Path) -> None:
    source, out = tmp_path / "in", tmp_path / "out"
    source.mkdir()
    for number in range(9):
        (source / f"{number}.txt").write_text(f"{number} " * 400)
    with pytest.raises(KeyboardInterrupt):
        prepare(source, out, 2000, workers=StopsAfter(11))
    assert len(list(out.glob(f".staging.tmp/{RECORDS}/*.json"))) > 3
    calls: list[tuple[str, int, int]] = []
    result = prepare(source, out, 2000, progress=lambda *call: calls.append(call))
    assert 0 < result.reused_units < result.units
    for label in ("reading", "writing"):
        of_label = [(done, total) for name, done, total in calls if name == label]
        first_done, first_total = of_label[0]
        assert first_done == 0
        last_done, last_total = of_label[-1]
        assert last_done == last_total <= first_total
        assert all(b[0] - a[0] + a[1] - b[1] > 0 for a, b in pairwise(of_label))
    totals = {label: total for label, _, total in calls}
    assert totals["reading"] == 0, "everything was finished"


def test_files_that_are_already_at_the_url_are_neither_sent_nor_counted(
    dataset: tuple[Path, object],
    bucket: object,
) -> None:
    directory, _ = dataset
    url = "s3://bucket/data"
    push_dataset(directory, url)
    bucket.rm("bucket/data/train-000001.tar.zst")  # type: ignore[attr-defined]
    calls: list[tuple[str, int, int]] = []
    push_dataset(directory, url, progress=lambda *call: calls.append(call))
    size = (directory / "train-000001.tar.zst").stat().st_size
    sent = [(done, total) for label, done, total in calls if label == "sending"]
    assert sent == [(0, size), (size, size)]


# --- paths ----------------------------------------------------------------------------------------

URL = "s3://bucket/x"
WORDS = {
    "prepare-out": ("prepare", "in.txt", "--out", URL),
    "prepare-tokenizer": ("prepare", "in.txt", "--out", "o", "--tokenizer", URL),
    "push": ("data", "push", URL, "s3://bucket/y"),
    "train": ("train", URL),
    "train-directory": ("train", "run.yaml", f"directory={URL}", "--dry-run"),
    "train-resume": ("train", "run.yaml", "--resume", URL),
    "validate": ("config", "validate", "run.yaml", f"directory={URL}"),
    "eval": ("eval", URL, "data"),
    "attention-out": ("attention", "run", "data", "--out", URL),
    "generate": ("generate", URL),
    "list": ("checkpoint", "list", URL),
    "import": ("import", URL, "--out", "o"),
    "import-out": ("import", "model", "--out", URL),
    "export": ("export", URL, "--out", "o"),
}


@pytest.mark.parametrize("words", WORDS.values(), ids=WORDS)
@pytest.mark.parametrize("scheme", ["s3", "hdfs", "file"])
def test_a_url_is_refused_where_a_local_path_is_expected(
    txl: Callable[..., Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    words: tuple[str, ...],
    scheme: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("in.txt").write_text("text")
    Path("run.yaml").write_text("directory: run\ndata: {path: data}\ntraining: {num_steps: 1}\n")
    before = sorted(tmp_path.rglob("*"))
    ended = txl(*(word.replace(URL, f"{scheme}://bucket/x") for word in words))
    assert ended.code == 2, ended.err
    assert f"{scheme}://bucket/x" in ended.err
    assert "not a URL" in ended.err.replace("\n", " ")
    assert sorted(tmp_path.rglob("*")) == before


def test_prepare_names_the_command_that_uploads_a_dataset(
    txl: Callable[..., Any],
    tmp_path: Path,
) -> None:
    ended = txl("prepare", tmp_path, "--out", "s3://me:secret@bucket/x")
    assert "txl data push DIR s3://bucket/x" in ended.err
    assert "secret" not in ended.err


def test_the_cache_directory_cannot_be_a_url(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TXL_CACHE_DIR", URL)
    with pytest.raises(ConfigError, match="TXL_CACHE_DIR=s3://bucket/x must be a local directory"):
        FrameCache.of_user()
