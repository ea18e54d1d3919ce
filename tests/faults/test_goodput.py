"""The goodput of a run survives a SIGKILL: every second, restart and lost step is counted."""

import re
import signal
import time
from pathlib import Path

import pytest

from tests.support.commands import children_of, is_alive, num_lines, start_txl, txl, wait_until
from tests.support.training_runs import NO_EVALUATION, TINY, metrics
from txl_dist.events import of_kind, read_events
from txl_dist.training.goodput import WallTime

pytestmark = pytest.mark.fault


def test_a_killed_and_resumed_run_counts_all_of_its_time(dataset: Path, tmp_path: Path) -> None:
    words = (
        "train", TINY, f"data.path={dataset}", f"directory={tmp_path}", NO_EVALUATION,
        "tracking.enabled=false", "training.num_steps=300",
        "training.checkpoint_interval_steps=50", "training.log_interval_steps=20",
        "--on", "processes", "--ranks", 2,
    )  # fmt: skip
    process = start_txl(*words)
    wait_until(lambda: num_lines(tmp_path / "metrics.jsonl") > 0, timeout_seconds=180)
    began = time.monotonic()
    wait_until(lambda: num_lines(tmp_path / "metrics.jsonl") > 7)
    ranks = children_of(process.pid)
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=60)
    wait_until(lambda: not any(is_alive(rank) for rank in ranks), timeout_seconds=30)
    last = metrics(tmp_path)[-1]["step"]
    time.sleep(2)

    finished = txl(*words)
    seconds_at_least = time.monotonic() - began
    assert finished.returncode == 0, finished.stderr + finished.stdout
    resumed_at = int(re.findall(r"resuming at step (\d+)", finished.stdout)[0])
    lost = last - resumed_at
    assert f"summary | 1 restart, {lost} steps lost | goodput " in finished.stdout
    assert {line["restarts"] for line in metrics(tmp_path)} == {0, 1}
    assert metrics(tmp_path)[-1]["lost_steps"] == lost
    events = read_events(tmp_path)
    assert [event.step for event in of_kind(events, "finished")] == [300]
    seconds = WallTime.of(events).seconds
    assert seconds["down"] > 2
    assert seconds["steps"] > 0
    # Only the start of the command itself, before the first rank, is not counted.
    total_seconds = sum(seconds.values())
    assert seconds_at_least - 15 < total_seconds < seconds_at_least + 60
