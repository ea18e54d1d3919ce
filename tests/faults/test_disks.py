"""Disks that fail or are slow while training reads its shards, are full, or cannot be written."""

import errno
import os
import re
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from data_pipeline.shards import shard_files
from data_pipeline.streams.segments import SegmentReader
from tests.support.commands import output_of, start_txl, txl, wait_until
from tests.support.training_runs import (
    NO_EVALUATION,
    TinyRuns,
    losses,
    metrics,
    refusal,
    train,
    train_words,
)
from txl_dist.checkpoint.directory import CheckpointDirectory
from txl_dist.checkpoint.tensors import verify_checkpoint
from txl_dist.runtime.world import World
from txl_dist.training import batches
from txl_dist.training.spec import TrainSpec

SHORT = (NO_EVALUATION, "training.num_steps=6")


@contextmanager
def before_reads(hook: Callable[[], object]) -> Iterator[None]:
    """Inside, `hook` is called before every read of a shard, not of other files of a dataset."""
    read = os.pread

    def pread(descriptor: int, size: int, offset: int) -> bytes:
        if Path(f"/proc/self/fd/{descriptor}").readlink().name.endswith(".tar.zst"):
            hook()
        return read(descriptor, size, offset)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "pread", pread)
        patch.setattr(shard_files, "_WAITS_SECONDS", (0.01, 0.01))
        yield


def train_on_a_failing_disk(world: World, spec: TrainSpec, num_failures: int) -> tuple[int, int]:
    """Reads of shards fail with EIO, `num_failures` times. Returns the exit code and that count."""
    failed = 0

    def fail() -> None:
        nonlocal failed
        if failed < num_failures:
            failed += 1
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    with before_reads(fail):
        return train(world, spec), failed


@pytest.mark.fault_row(50)
def test_a_read_that_fails_twice_is_repeated_and_changes_nothing(
    tiny: TinyRuns, straight: Callable[..., Path]
) -> None:
    spec = tiny.spec(tiny.path, *SHORT)
    assert tiny.ranks(1).run(train_on_a_failing_disk, spec, 2) == [(0, 2)]
    assert losses(tiny.path) == losses(straight(*SHORT, num_ranks=1))


@pytest.mark.fault_row(50)
def test_a_read_that_keeps_failing_ends_the_run_and_names_the_shard(tiny: TinyRuns) -> None:
    ended = tiny.ranks(1).run(train_on_a_failing_disk, tiny.spec(tiny.path, *SHORT), 99)
    assert ended == [(3, 3)]
    assert "train-000000.tar.zst" in refusal(tiny.path)
    assert "Input/output error" in refusal(tiny.path)


def train_on_a_slow_disk(world: World, spec: TrainSpec) -> int:
    read = SegmentReader.read

    def slow_read(*args: object) -> object:
        time.sleep(0.1)
        return read(*args)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SegmentReader, "read", slow_read)
        patch.setattr(batches, "PREFETCH_SEGMENTS", 1)  # else one read has all segments of the run
        return train(world, spec)


@pytest.mark.fault_row(18)
def test_a_slow_disk_shows_as_data_wait(tiny: TinyRuns) -> None:
    assert tiny.ranks(1).run(train_on_a_slow_disk, tiny.spec(tiny.path, *SHORT)) == [0]
    waits = sorted(line["data_wait"] for line in metrics(tiny.path))
    assert waits[3] > 0.3
    assert "| data wait " in (tiny.path / "logs" / "rank-0.log").read_text()


def train_on_a_disk_that_stops_responding(world: World, spec: TrainSpec) -> int:
    """On rank 1 no read returns."""
    released = threading.Event()
    with before_reads(released.wait if world.rank == 1 else lambda: None):
        try:
            return train(world, spec)
        finally:
            released.set()


@pytest.mark.fault
@pytest.mark.fault_row(18)
def test_a_read_that_never_returns_ends_the_run_and_names_the_shard(tiny: TinyRuns) -> None:
    spec = tiny.spec(tiny.path, *SHORT, "training.rank_timeout_seconds=5")
    group = tiny.ranks(2)
    assert 3 in group.run(train_on_a_disk_that_stops_responding, spec)
    group.is_broken = True  # a rank has left a collective
    log = (tiny.path / "logs" / "rank-1.log").read_text()
    assert "train-000000.tar.zst could not be read within 4.5 s (lane position 0)" in log


# --- disks that cannot be written -----------------------------------------------------------------


def fill(disk: Path) -> None:
    with (disk / "filler").open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, shutil.disk_usage(disk).free)


@pytest.mark.fault
@pytest.mark.fault_row(10)
def test_a_disk_that_fills_up_ends_the_run_with_4_and_keeps_what_was_saved(
    dataset: Path, small_disk: Path
) -> None:
    run = small_disk / "run"
    settings = ("training.num_steps=400", "training.checkpoint_interval_steps=100")
    process = start_txl(
        *train_words(dataset, run, NO_EVALUATION, "tracking.enabled=false", *settings)
    )
    wait_until((run / "LATEST").exists)
    fill(small_disk)
    assert shutil.disk_usage(small_disk).free == 0
    output = output_of(process, 4, timeout_seconds=120)
    assert "CheckpointError" in output
    assert re.search(r"rank \d: OSError: .*No space left on device", output)
    assert str(run / "checkpoints") in output
    assert "resumes from the newest checkpoint, that of step 100" in output
    verify_checkpoint(CheckpointDirectory(run).at(100))


@pytest.mark.fault
@pytest.mark.fault_row(12)
@pytest.mark.parametrize("reason", ["No space left on device", "Read-only file system"])
def test_a_disk_that_cannot_be_written_is_refused_before_the_first_step(
    dataset: Path, small_disk: Path, reason: str
) -> None:
    if reason == "No space left on device":
        fill(small_disk)
    else:
        subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    run = small_disk / "run"
    done = txl(*train_words(dataset, run))
    assert done.returncode == 2, done.stderr
    for part in (reason, str(run), "directory=PATH"):
        assert part in done.stderr
