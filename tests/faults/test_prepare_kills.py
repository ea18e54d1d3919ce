"""Killed workers, killed runs, full disks: finished work is kept, the bytes are the same."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from pathlib import Path
from typing import Any

import pytest

from data_pipeline.errors import DataError, UnfinishedError
from data_pipeline.shards.manifest import MANIFEST_NAME
from data_pipeline.system.workers import ProcessWorkers
from tests.data_pipeline.preparation.preparing import files_of
from tests.support.commands import children_of, is_alive, output_of, start_txl, txl, wait_until
from tests.support.failing_units import die, die_at_first, refuse

OPTIONS = ("--shuffle", 1, "--split", "valid=0.1", "--shard-size", 1, "--workers", 2, "--json")


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """12 MB of JSON lines that compress badly."""
    path = tmp_path_factory.mktemp("lines") / "in.jsonl"
    random_ = random.Random(3)
    with path.open("w") as file:
        for _ in range(12_000):
            file.write(json.dumps({"text": random_.randbytes(500).hex()}) + "\n")
    return path


@pytest.fixture(scope="module")
def whole(lines: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The files of an undisturbed run with one worker."""
    out = tmp_path_factory.mktemp("whole") / "out"
    assert txl("prepare", lines, "--out", out, *OPTIONS, "--workers", 1).returncode == 0
    return files_of(out)


def finished_units(out: Path) -> int:
    return len(list(out.glob(".staging.tmp/units/*.json")))


def all_children(pid: int) -> list[int]:
    children = children_of(pid)
    return children + [below for child in children for below in all_children(child)]


def kill_when(
    lines: Path, out: Path, units: int, seconds: float, *, options: tuple[object, ...] = OPTIONS
) -> int:
    """Start, SIGKILL the program when `units` are finished and `seconds` have passed.

    Returns how many were finished at the end; -1 if it was published in the moment of the kill.
    Its workers must end by themselves.
    """
    process = start_txl("prepare", lines, "--out", out, *options)
    while process.poll() is None and finished_units(out) < units + 1:  # and the fingerprint
        time.sleep(0.002)
    time.sleep(seconds)
    children = all_children(process.pid)
    process.kill()
    process.wait()
    assert process.stdout is not None
    process.stdout.close()
    wait_until(lambda: not any(map(is_alive, children)), timeout_seconds=10)
    # After the publication it removes the units, one by one.
    return -1 if (out / MANIFEST_NAME).exists() else finished_units(out) - 1


def rerun(lines: Path, out: Path, *, options: tuple[object, ...] = OPTIONS) -> dict[str, Any]:
    ended = txl("prepare", lines, "--out", out, *options)
    assert ended.returncode == 0, ended.stderr
    result: dict[str, Any] = json.loads(ended.stdout)
    return result


@pytest.mark.fault_row(48)
@pytest.mark.fault
def test_killed_at_any_moment_a_rerun_gives_the_same_bytes(
    lines: Path, whole: dict[str, bytes], tmp_path: Path
) -> None:
    """And no run leaves a process."""
    random_ = random.Random(5)
    reused = []
    for number in range(24):
        out = tmp_path / f"{number}"
        for _ in range(random_.choice([1, 1, 2])):
            finished = kill_when(lines, out, random_.randrange(-1, 13), random_.random() * 0.2)
        reused.append(rerun(lines, out).get("reused_units", 0))
        assert reused[-1] >= finished
        assert files_of(out) == whole
        shutil.rmtree(out)
    assert sum(map(bool, reused)) > 12


@pytest.mark.fault
def test_a_trained_bpe_has_the_same_bytes_after_kills_with_any_workers(
    tmp_path: Path,
) -> None:
    sources = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:150]
    texts = [path.read_text("utf-8", errors="ignore") for path in sources]
    lines = tmp_path / "in.jsonl"
    lines.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    options = (*OPTIONS, "--tokenizer", "bpe", "--vocab-size", 2000)
    whole = tmp_path / "whole"
    rerun(lines, whole, options=(*options, "--workers", 1))
    random_, reused = random.Random(7), 0
    for workers in (1, 2, 3):
        for number in range(3):
            out = tmp_path / f"{workers}-{number}"
            with_workers = (*options, "--workers", workers)
            kill_when(lines, out, random_.randrange(9), random_.random() / 2, options=with_workers)
            reused += bool(rerun(lines, out, options=with_workers).get("reused_units"))
            assert files_of(out) == files_of(whole)
    assert reused > 4


@pytest.mark.fault
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_the_group_ends_with_75_and_keeps_finished_units(
    lines: Path, whole: dict[str, bytes], tmp_path: Path, number: signal.Signals
) -> None:
    out = tmp_path / "out"
    process = start_txl("prepare", lines, "--out", out, *OPTIONS, own_group=True)
    wait_until(lambda: finished_units(out) > 3)
    children = all_children(process.pid)
    os.killpg(process.pid, number)
    output = output_of(process, 75, timeout_seconds=20)
    assert "run the same command to continue" in output
    assert "Traceback" not in output
    wait_until(lambda: not any(map(is_alive, children)), timeout_seconds=10)
    assert rerun(lines, out)["reused_units"] >= 3
    assert files_of(out) == whole


def fail(path: Path) -> float:
    return 1 / len(path.name.removeprefix("a"))


@pytest.mark.fault_row(40)
def test_a_unit_whose_worker_dies_is_tried_once_more_and_errors_come_as_they_are(
    tmp_path: Path,
) -> None:
    units = [tmp_path / name for name in "abcde"]
    with ProcessWorkers(2) as workers:
        assert sorted(workers.map(die_at_first, units)) == list(enumerate("abcde"))
        with pytest.raises(UnfinishedError, match=r"the worker for .*/b died with exit code 9"):
            list(workers.map(die, units))
        with pytest.raises(DataError, match=r"^[a-e] is bad$"):
            list(workers.map(refuse, units))
        with pytest.raises(RuntimeError, match=r"(?s)/a:.*ZeroDivisionError"):
            list(workers.map(fail, units))
        assert len(list(workers.map(str, units))) == 5


@pytest.mark.fault_row(11)
def test_a_full_disk_names_the_shard_and_a_rerun_with_space_goes_on(
    lines: Path, whole: dict[str, bytes], small_disk: Path
) -> None:
    out = small_disk / "out"
    # Room for the texts, which are 12 MB, and some shards.
    subprocess.run(["mount", "-o", "remount,size=15m", str(small_disk)], check=True)
    ended = txl("prepare", lines, "--out", out, *OPTIONS)
    assert ended.returncode == 3
    assert "writing train-0" in ended.stderr
    subprocess.run(["mount", "-o", "remount,size=50m", str(small_disk)], check=True)
    assert rerun(lines, out)["reused_units"] > 2
    assert files_of(out) == whole


@pytest.mark.slow
def test_memory_does_not_grow_with_a_documents_size(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    for name, mib in (("small", 2), ("giant", 200)):
        source = tmp_path / f"{name}.txt"
        line = "Gathering, the grey sea; 潮は満ちる.\n" * 1000
        source.write_text(line * (mib * 2**20 // len(line.encode())))
        ended = txl("prepare", source, "--out", tmp_path / name, "--json")
        result = json.loads(ended.stdout)
        assert result["splits"]["train"]["tokens"] == source.stat().st_size + 1
        assert result["peak_memory_bytes"] < 120 * 2**20
        program = f"""
from pathlib import Path
from data_pipeline.streams.segments import read_range
from data_pipeline.shards.shard_reader import open_split
from data_pipeline.shards.data_commands import verify_dataset
from data_pipeline.system.workers import peak_memory_bytes
out = Path({str(tmp_path / name)!r})
source = open_split(out, "train")
for first in range(0, source.num_tokens, 2**18):
    read_range(source, first, min(first + 2**18, source.num_tokens))
assert not verify_dataset(out).problems
print(peak_memory_bytes())
"""
        done = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, check=True, text=True
        )
        assert int(done.stdout) < 160 * 2**20
