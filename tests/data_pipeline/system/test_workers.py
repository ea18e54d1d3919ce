"""Worker processes that map units of work, and the thread that runs tasks."""

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from data_pipeline.system.sources import count_bytes, counted_bytes
from data_pipeline.system.workers import (
    BackgroundQueue,
    InProcess,
    ProcessWorkers,
    WorkerDiedError,
    peak_memory_bytes,
)
from tests.support.commands import is_alive, wait_until


def square(number: int) -> int:
    return number * number


def pid_after(seconds: float) -> int:
    time.sleep(seconds)
    return os.getpid()


def test_results_carry_the_numbers_of_their_units() -> None:
    expected = [(number, (number + 3) ** 2) for number in range(20)]
    assert list(InProcess().map(square, range(3, 23))) == expected
    with ProcessWorkers(2) as workers:
        assert sorted(workers.map(square, range(3, 23))) == expected
        assert list(workers.map(square, [])) == []
        assert 2**20 < workers.peak_memory_bytes < 8 * peak_memory_bytes()


def test_a_worker_that_is_still_importing_ignores_ctrl_c(capfd: pytest.CaptureFixture[str]) -> None:
    """Ctrl-C reaches the whole process group: the parent decides what happens to its workers."""
    num_sent = []
    others = {*multiprocessing.active_children()}  # of fixtures
    with ProcessWorkers(1) as workers:
        results = workers.map(square, [3, 4])

        def interrupt() -> None:
            wait_until(lambda: bool({*multiprocessing.active_children()} - others))
            (process,) = {*multiprocessing.active_children()} - others
            for _ in range(20):
                os.kill(process.pid or 0, signal.SIGINT)
                num_sent.append(1)
                time.sleep(0.01)

        thread = threading.Thread(target=interrupt)
        thread.start()
        assert [result for _, result in results] == [9, 16]
        thread.join()
    assert sum(num_sent) == 20
    assert "KeyboardInterrupt" not in capfd.readouterr().err


def count_and_wait(path: str) -> int:
    for _ in range(3):
        count_bytes(7)
    wait_until(Path(path).exists)
    return 0


def test_the_bytes_of_a_unit_are_seen_before_it_is_finished(tmp_path: Path) -> None:
    count_bytes(9)  # outside a unit: not counted
    assert counted_bytes() == 0
    paths = [str(tmp_path / name) for name in ("a", "b", "c")]
    with ProcessWorkers(2) as workers:
        results = workers.map(count_and_wait, paths)
        thread = threading.Thread(target=lambda: list(results))
        thread.start()
        wait_until(lambda: workers.unfinished_bytes() == 2 * 21)
        Path(paths[0]).touch()
        Path(paths[1]).touch()
        wait_until(lambda: workers.unfinished_bytes() == 21)
        Path(paths[2]).touch()
        thread.join()
        assert workers.unfinished_bytes() == 0


def test_units_are_read_only_a_little_before_they_are_needed() -> None:
    read = 0

    def units() -> Iterator[int]:
        nonlocal read
        for number in range(100):
            read += 1
            yield number

    with ProcessWorkers(2) as workers:
        for done, _ in enumerate(workers.map(square, units()), start=1):
            assert read <= done + 2 * workers.num_workers


def test_an_abandoned_map_ends_its_workers_and_the_rest_end_with_the_context() -> None:
    with ProcessWorkers(2) as workers:
        results = workers.map(pid_after, [0.0, 600.0, 600.0])
        _, first = next(results)  # that worker has the third unit by now
        assert is_alive(first)
        results.close()  # type: ignore[attr-defined]
        wait_until(lambda: not is_alive(first), timeout_seconds=10)
        pids = {pid for _, pid in workers.map(pid_after, [0.1] * 4)}
        assert all(map(is_alive, pids))
    wait_until(lambda: not any(map(is_alive, pids)), timeout_seconds=10)


@pytest.mark.parametrize(
    ("exit_code", "words"),
    [(-9, "died by SIGKILL,"), (3, "died with exit code 3,"), (None, "died, and")],
)
def test_a_death_is_described_by_its_signal_or_exit_code(exit_code: int | None, words: str) -> None:
    assert f"the worker for in.txt {words}" in str(WorkerDiedError("in.txt", exit_code))


def test_tasks_run_in_order_and_submit_does_not_wait() -> None:
    queue, gate, done = BackgroundQueue("test"), threading.Event(), []
    queue.submit(gate.wait)
    for number in range(5):
        queue.submit(lambda number=number: done.append(number))
    assert not queue.wait(0.01)
    assert done == []
    gate.set()
    assert queue.wait(30)
    assert done == [0, 1, 2, 3, 4]
    gate.clear()
    queue.submit(gate.wait)
    queue.submit(lambda: done.append(5))
    threading.Timer(0.01, gate.set).start()
    assert queue.close(30), "closing runs the remaining tasks"
    assert done == [0, 1, 2, 3, 4, 5]


def test_the_first_error_is_kept_and_drops_later_tasks() -> None:
    queue, gate, done = BackgroundQueue("test"), threading.Event(), []

    def fail() -> None:
        gate.wait()
        raise OSError("first")

    queue.submit(fail)
    queue.submit(lambda: done.append("queued"))
    gate.set()
    assert queue.wait(30)
    queue.submit(lambda: done.append("submitted"))
    assert queue.wait(30)
    assert str(queue.error) == "first"
    assert done == []
    assert queue.close(30)
