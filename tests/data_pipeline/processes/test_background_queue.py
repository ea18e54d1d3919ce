"""Jobs run in order in a thread, until the first one fails."""

import threading

from data_pipeline.processes.background_queue import BackgroundQueue


def test_jobs_run_in_order_and_submit_does_not_wait() -> None:
    queue, gate, done = BackgroundQueue("test"), threading.Event(), []
    queue.submit(gate.wait)
    for number in range(5):
        queue.submit(lambda number=number: done.append(number))
    assert not queue.wait(0.01)
    assert done == []
    gate.set()
    assert queue.wait(30)
    assert done == [0, 1, 2, 3, 4]
    assert queue.close(30)


def test_the_first_error_is_kept_and_drops_later_jobs() -> None:
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


def test_closing_runs_the_remaining_jobs() -> None:
    queue, done = BackgroundQueue("test"), []
    for number in range(3):
        queue.submit(lambda number=number: done.append(number))
    assert queue.close(30)
    assert done == [0, 1, 2]
