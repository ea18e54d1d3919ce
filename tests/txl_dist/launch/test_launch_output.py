"""LaunchOutput: every stage until the first step is a line, and no launch is silent for long."""

from pathlib import Path

import pytest

from tests.support.training_runs import NO_EVALUATION, tiny_job
from txl_dist.launch import launch_output
from txl_dist.launch.launch_files import STATUS_SECONDS, TRAINING_SECONDS, LaunchOutput
from txl_dist.launch.processes import ProcessLauncher

STAGES = ["2 ranks start", "rank 0 is up", "2 of 2 ranks are up", "the model is built",
          "first batch", "step 20 | loss"]  # fmt: skip


@pytest.mark.slow
def test_a_launch_names_its_stages_in_order(dataset: Path, tmp_path: Path) -> None:
    lines: list[str] = []
    job = tiny_job(dataset, tmp_path, NO_EVALUATION)
    ProcessLauncher().train(job, num_ranks=2, on_line=lines.append)
    places = [next(n for n, line in enumerate(lines) if stage in line) for stage in STAGES]
    assert places == sorted(places), lines
    assert [sum(stage in line for line in lines) for stage in STAGES] == [1] * len(STAGES)


def test_a_status_is_due_after_a_silence_until_the_first_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, lines = 100.0, []
    monkeypatch.setattr(launch_output.time, "monotonic", lambda: clock)
    output = LaunchOutput(lines.append)
    output.begin_ranks()
    clock += STATUS_SECONDS + 1
    assert output.status_is_due
    output.print_wait()
    assert not output.status_is_due, "the line ends the silence"
    output.print_log_line("12:00:00 rank 0 is up")
    clock += STATUS_SECONDS + 1
    output.print_wait()
    output.print_log_line("12:00:01 first batch")  # a step is slow, or has no line
    clock += STATUS_SECONDS + 1
    assert not output.status_is_due
    clock += TRAINING_SECONDS
    assert output.status_is_due
    output.print_wait()
    assert [line for line in lines if line.startswith("waiting")] == [
        "waiting 5 s for the ranks, which import their libraries",
        "waiting 10 s for the ranks, which load data and model",
        "waiting 45 s for the first step line; the ranks train",
    ]
    output.print_log_line("12:00:00 step 1 | loss 3.4")
    clock += STATUS_SECONDS + 1
    assert not output.status_is_due
