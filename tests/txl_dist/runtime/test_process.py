"""Ranks of torchrun are recognised, freed host memory is used again, threads spin briefly, and the
spans of a rank add up to its time.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from tests.conftest import Clock
from tests.support.training_runs import TINY
from txl_dist.cli.app import app
from txl_dist.errors import ConfigError
from txl_dist.runtime.process import (
    SPIN_COUNT,
    STEP_SPANS,
    TORCHRUN_VARIABLES,
    Activity,
    Span,
    is_torchrun,
    without_torchrun,
)

ADDRESS = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
LEFTOVER = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", **ADDRESS}
COMPLETE = {**LEFTOVER, "LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "some-run"}


@pytest.mark.parametrize("missing", TORCHRUN_VARIABLES)
def test_an_incomplete_set_does_not_make_a_rank(missing: str) -> None:
    part = {name: value for name, value in COMPLETE.items() if name != missing}
    assert not is_torchrun(part)
    assert is_torchrun(COMPLETE)


def test_launched_ranks_do_not_inherit_torchruns_variables() -> None:
    other = {"PATH": "/bin", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    assert without_torchrun({**COMPLETE, **other}) == {"PATH": "/bin"}


def test_variables_left_in_the_shell_are_ignored(
    dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in LEFTOVER.items():
        monkeypatch.setenv(name, value)
    words = ["train", str(TINY), f"data.path={dataset}", f"directory={tmp_path}", "--dry-run"]
    done = CliRunner().invoke(app, [*words, "--ranks", "2"])
    assert done.exit_code == 0, done.output
    assert "ready" in done.stdout
    assert "--ranks 2" in done.stdout
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--dry-run"], "--dry-run"),
        (["--ranks", "3"], "--ranks 3"),
        (["--on", "processes", "--ranks", "2"], "--on processes"),
    ],
)
def test_options_that_contradict_torchrun_are_rejected(
    dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: list[str], named: str
) -> None:
    for name, value in COMPLETE.items():
        monkeypatch.setenv(name, value)
    words = ["train", str(TINY), f"data.path={dataset}", f"directory={tmp_path}", *options]
    done = CliRunner().invoke(app, words)
    assert isinstance(done.exception, ConfigError)
    assert f"rank 1 of 2, which contradicts {named}." in str(done.exception)
    assert list(tmp_path.iterdir()) == []


SCRIPT = """
import resource
import sys

import torch

from txl_dist.runtime.process import keep_freed_memory

if sys.argv[1] == "kept":
    assert keep_freed_memory()


def faults_of_a_step() -> int:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    blocks = [torch.ones(int(mib * 2**18)) for mib in (0.5, 3, 50, 70)]
    del blocks
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


for _ in range(20):  # the heap grows until its free blocks have the right sizes: up to 10 steps
    faults_of_a_step()
print(faults_of_a_step())
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the allocator of glibc")
def test_a_warm_step_has_no_page_faults_for_blocks_of_any_size() -> None:
    def faults(mode: str) -> int:
        command = [sys.executable, "-c", SCRIPT, mode]
        return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)

    assert faults("kept") < 100
    assert faults("returned") > 100, "the test would not notice memory that is returned"


LOAD_OPENMP = """
import ctypes, importlib.util, pathlib, txl_dist
(folder,) = importlib.util.find_spec("torch").submodule_search_locations
for path in pathlib.Path(folder, "lib").glob("libgomp*"):
    ctypes.CDLL(str(path))
"""


@pytest.mark.parametrize(
    ("variables", "spin_count"),
    [({}, SPIN_COUNT), ({"GOMP_SPINCOUNT": "70"}, "70"), ({"OMP_WAIT_POLICY": "PASSIVE"}, "0")],
    ids=str,
)
def test_threads_spin_for_a_short_time_unless_the_user_says_otherwise(
    variables: dict[str, str], spin_count: str
) -> None:
    """In the words of libgomp, as the torch of this machine brings it."""
    if not list(Path(torch.__file__).parent.glob("lib/libgomp*")):
        pytest.skip("this torch has another OpenMP")
    inherited = {k: v for k, v in os.environ.items() if k not in ("GOMP_SPINCOUNT", *variables)}
    environment = {**inherited, "OMP_DISPLAY_ENV": "VERBOSE", **variables}
    command = [sys.executable, "-c", LOAD_OPENMP]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert f"GOMP_SPINCOUNT = '{spin_count}'" in done.stderr


# --- activity -------------------------------------------------------------------------------------


def do(activity: Activity, clock: Clock, *spans: tuple[Span, float]) -> None:
    for span, seconds in spans:
        activity.enter(span)
        clock.now += seconds


def test_nested_spans_are_counted_once(clock: Clock) -> None:
    activity = Activity()
    activity.reset()
    do(activity, clock, (Span.EVALUATION, 5))
    outer = activity.enter(Span.SAVE_WAIT)
    clock.now += 3
    activity.enter(outer)
    clock.now += 2
    seconds = activity.seconds()
    assert (seconds[Span.EVALUATION], seconds[Span.SAVE_WAIT]) == (7, 3)
    assert sum(seconds.values()) == 10


def test_only_the_first_step_is_a_part_of_the_start_up(clock: Clock) -> None:
    activity, start = Activity(), clock.now
    activity.reset()
    clock.now += 4
    for number, forward_seconds in ((1, 50), (2, 3), (3, 3)):
        do(activity, clock, (Span.DATA_WAIT, 1), (Span.FORWARD, forward_seconds), (Span.REDUCE, 2))
        activity.end_step()
        assert activity.num_steps == number
    seconds = activity.seconds()
    assert seconds[Span.START_UP] == 4 + 50 + 2
    assert sum(seconds[span] for span in STEP_SPANS) == 2 * (3 + 2)
    assert seconds[Span.DATA_WAIT] == 3
    assert sum(seconds.values()) == clock.now - start

    activity.reset()
    assert (activity.num_steps, sum(activity.seconds().values())) == (0, 0)
