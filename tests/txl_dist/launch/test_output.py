"""A launch is never silent for long before its first step."""

from pathlib import Path

from tests.conftest import Clock
from txl_dist.launch.output import STATUS_SECONDS, LaunchOutput
from txl_dist.training.spec import RunDirectory


def test_a_status_is_due_after_a_silence_until_the_first_step_line(
    tmp_path: Path, clock: Clock
) -> None:
    lines: list[str] = []
    directory = RunDirectory(tmp_path)
    output = LaunchOutput(lines.append, directory)
    output.begin_ranks()
    for silence_seconds in (6, 6, 60, 25, STATUS_SECONDS + 1):
        output.print_wait("Ray")
        clock.now += silence_seconds
        output.print_wait("Ray")
    # The longer it takes, the rarer the lines.
    assert lines == [f"waiting {seconds} s for Ray" for seconds in (6, 12, 72, 97)]
    directory.event_log.write("first_line", "first step line", step=1)
    output.follow()
    clock.now += 1000
    output.print_wait("Ray")
    assert len(lines) == 4
