"""The lock of a run directory, whose holder may be lost with its host."""

import logging
import os
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.commands import wait_until
from tests.support.training_runs import tiny_spec
from txl_dist.errors import ConfigError
from txl_dist.runtime.waiting import Heartbeat, write_heartbeat
from txl_dist.training import spec as module
from txl_dist.training.spec import RunDirectory, TrainSpec

SHORT_SECONDS = 0.2
LEASE_SECONDS = 20.0


@pytest.fixture
def spec(dataset: Path, tmp_path: Path) -> TrainSpec:
    return tiny_spec(dataset, tmp_path)


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    directory = RunDirectory(tmp_path)
    directory.create()
    return directory


def owner_of(directory: RunDirectory) -> str:
    return (directory.path / "lock").read_text()


@contextmanager
def held_elsewhere(directory: RunDirectory) -> Iterator[threading.Event]:
    """A lock of another host, until the event is set or the context ends."""
    held, release = threading.Event(), threading.Event()

    def hold() -> None:
        with directory.locked():
            (directory.path / "lock").write_text("host elsewhere, pid 7, boot 0, launch a\n")
            held.set()
            release.wait()

    holder = threading.Thread(target=hold)
    holder.start()
    held.wait()
    try:
        yield release
    finally:
        release.set()
        holder.join()


def test_a_path_that_ranks_cannot_be_told_is_refused_at_once(
    spec: TrainSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff"))
    here.mkdir()
    monkeypatch.chdir(here)
    relative = spec.config.model_copy(update={"directory": "run"})
    shown = rf"{tmp_path}/\udcff"
    for config, resume, message in (
        (relative, "auto", f"directory={shown}/run: this path is not UTF-8"),
        (spec.config, here, f"--resume {shown}: this path is not UTF-8"),
    ):
        with pytest.raises(ConfigError, match=re.escape(message)):
            TrainSpec(config=config, resume=str(resume))
    assert TrainSpec(config=spec.config).to_json(), "the advice works: an absolute path"


def test_a_restart_goes_on_without_a_lock_that_a_lost_host_keeps_until_it_is_free(
    spec: TrainSpec, directory: RunDirectory, caplog: pytest.LogCaptureFixture
) -> None:
    lost = directory.locked(launch_id=spec.launch_id)
    lost.__enter__()
    with (
        caplog.at_level(logging.WARNING),
        spec.lock_of(directory, timeout_seconds=SHORT_SECONDS),
    ):
        assert "continued because the same command has started that process" in caplog.text
        before = owner_of(directory)
        lost.__exit__(None, None, None)
        (directory.path / "lock").write_text("")
        wait_until(lambda: spec.launch_id in owner_of(directory))
        with pytest.raises(ConfigError), directory.locked():
            raise AssertionError("the restarted run holds no lock")
    assert spec.launch_id in before
    with directory.locked():
        pass


@pytest.mark.parametrize("launch_id", ["", "another"])
def test_another_launch_is_refused(
    spec: TrainSpec, directory: RunDirectory, launch_id: str
) -> None:
    with (
        directory.locked(launch_id=launch_id),
        pytest.raises(ConfigError, match=r"in use by another run \(host .*--force-unlock"),
        spec.lock_of(directory, timeout_seconds=SHORT_SECONDS),
    ):
        raise AssertionError("the lock was taken twice")


def test_the_lock_of_another_host_is_waited_for_as_long_as_a_file_server_keeps_it(
    spec: TrainSpec, directory: RunDirectory, caplog: pytest.LogCaptureFixture
) -> None:
    def release_when_waiting() -> None:
        wait_until(lambda: "is in use (host elsewhere, pid 7" in caplog.text)
        release.set()

    with held_elsewhere(directory) as release:
        threading.Thread(target=release_when_waiting).start()
        lock = spec.lock_of(directory, timeout_seconds=SHORT_SECONDS, lease_seconds=LEASE_SECONDS)
        with lock:
            assert release.is_set()


def test_the_lock_of_another_host_that_lives_is_refused_soon(
    spec: TrainSpec, directory: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "BEAT_SECONDS", SHORT_SECONDS)
    beat = Heartbeat(
        rank=0, host="elsewhere", pid=7, number=1, time=0.0, activity="step 2", span="start-up",
        collective=None, seconds=0.0, stack=(),
    )  # fmt: skip
    write_heartbeat(directory.path, beat)
    began = time.monotonic()
    with held_elsewhere(directory):
        timer = threading.Timer(
            2 * SHORT_SECONDS,
            lambda: write_heartbeat(directory.path, beat.model_copy(update={"number": 2})),
        )
        timer.start()
        lock = spec.lock_of(directory, timeout_seconds=SHORT_SECONDS, lease_seconds=LEASE_SECONDS)
        with pytest.raises(ConfigError, match="in use by another run"), lock:
            raise AssertionError("the lock was taken twice")
    assert time.monotonic() - began < LEASE_SECONDS
