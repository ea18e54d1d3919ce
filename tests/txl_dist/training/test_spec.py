"""The lock of a run directory, whose holder may be lost with its host."""

import logging
import threading
import time
from pathlib import Path

import pytest

from tests.support.training_runs import tiny_spec
from txl_dist.checkpoint.attempts import FOLDER, Attempt, AttemptRecord
from txl_dist.errors import ConfigError
from txl_dist.training.spec import RunDirectory, TrainSpec

SHORT_SECONDS = 0.2
LEASE_SECONDS = 20.0


@pytest.fixture
def spec(dataset: Path, tmp_path: Path) -> TrainSpec:
    seconds = f"training.rank_timeout_seconds={2 * LEASE_SECONDS}"
    return tiny_spec(dataset, tmp_path, seconds)


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    directory = RunDirectory(tmp_path)
    directory.create()
    return directory


def begin_attempt_of(launch_id: str, directory: RunDirectory) -> None:
    record = AttemptRecord.of_this_process(number=1, launch_id=launch_id)
    Attempt(record, directory.path / FOLDER).add()


def test_a_restart_goes_on_without_a_lock_that_a_lost_host_keeps(
    spec: TrainSpec, directory: RunDirectory, caplog: pytest.LogCaptureFixture
) -> None:
    begin_attempt_of(spec.launch_id, directory)
    with (
        directory.locked(),  # another descriptor, as of another host
        caplog.at_level(logging.WARNING),
        spec.lock_of(directory, timeout_seconds=SHORT_SECONDS),
    ):
        assert "continued: the same command has started the ranks before" in caplog.text


@pytest.mark.parametrize("attempts", [(), ("another",)])
def test_another_launch_is_refused(
    spec: TrainSpec, directory: RunDirectory, attempts: tuple[str, ...]
) -> None:
    for launch_id in attempts:
        begin_attempt_of(launch_id, directory)
    with (
        directory.locked(),
        pytest.raises(ConfigError, match=r"in use by another run \(host .*--force-unlock"),
        spec.lock_of(directory, timeout_seconds=SHORT_SECONDS),
    ):
        raise AssertionError("the lock was taken twice")


def test_the_lock_of_another_host_is_waited_for_as_long_as_a_file_server_keeps_it(
    spec: TrainSpec, directory: RunDirectory, caplog: pytest.LogCaptureFixture
) -> None:
    release = threading.Event()

    def hold() -> None:
        with directory.locked():
            (directory.path / "lock").write_text("host elsewhere, pid 7, since yesterday\n")
            held.set()
            release.wait(LEASE_SECONDS)

    held = threading.Event()
    holder = threading.Thread(target=hold)
    holder.start()
    held.wait()
    threading.Timer(3 * SHORT_SECONDS, release.set).start()
    began = time.monotonic()
    with spec.lock_of(directory, timeout_seconds=SHORT_SECONDS):
        assert "is in use (host elsewhere, pid 7, since yesterday); waiting for" in caplog.text
    holder.join()
    assert SHORT_SECONDS < time.monotonic() - began < LEASE_SECONDS
