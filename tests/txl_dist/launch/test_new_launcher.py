"""A launcher of another package: everything that it needs is in this file.

`--on shell:FOLDER` stands for a batch system. A rank is a shell script that `sh` runs, as a node of
a batch system would; its exit code is in a file. The launcher knows no pipes and no signals: stop
requests reach the ranks by the stop file.
"""

import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from tests.support.commands import run_txl
from tests.support.training_runs import NO_EVALUATION, TINY, losses, tiny_spec
from txl_dist.errors import PreemptedError
from txl_dist.launch import launcher as module
from txl_dist.launch.launcher import Launcher, find_launcher
from txl_dist.launch.rank_group import Event, RankEnded, RankRange, RanksUp
from txl_dist.training.spec import RunDirectory, TrainSpec

RANK = """
import sys
from pathlib import Path
from txl_dist.runtime.world import World
from txl_dist.training.spec import TrainSpec
from txl_dist.training.rank import train_rank
from txl_dist.errors import TxlError
world = World.from_environment()
try:
    train_rank(TrainSpec.from_json(Path(sys.argv[1]).read_text()), world)
    world.leave()
except TxlError as error:
    sys.exit(error.exit_code)
"""


class ShellLauncher(Launcher):
    """`argument` is a folder for the scripts."""

    def __init__(self, argument: str = "") -> None:
        self.folder = Path(argument)

    @contextmanager
    def rank_group(self, spec: TrainSpec, ranks: RankRange) -> Iterator["ShellGroup"]:
        group = ShellGroup(self.folder)
        try:
            yield group
        finally:
            group.kill(group.shells)


class ShellGroup:
    """The scripts of the ranks."""

    max_restarts, growth_interval_seconds, waits_for = 1, 0.0, "the scripts"

    def __init__(self, folder: Path) -> None:
        self.folder, self.shells = folder, dict[int, "subprocess.Popen[bytes]"]()
        self.events: list[Event] = []
        self.num_starts = 0

    def start(self, spec: TrainSpec, num_ranks: int) -> None:
        self.num_starts += 1
        self.folder.mkdir(exist_ok=True)
        (self.folder / "spec.json").write_text(spec.to_json())
        (self.folder / "rank.py").write_text(RANK)
        for rank in range(num_ranks):
            variables = {
                "RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": num_ranks, "OMP_NUM_THREADS": 1,
                "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 29000 + os.getpid() % 1000,
            }  # fmt: skip
            words = [sys.executable, self.folder / "rank.py", self.folder / "spec.json"]
            log, code = RunDirectory(spec.run_path).log(rank), self.code_of(rank)
            script = " ".join(f"{name}={value}" for name, value in variables.items())
            script += f" {shlex.join(map(str, words))} 2>> {log}; echo $? > {code}.new; "
            script += f"mv {code}.new {code}"
            self.shells[rank] = subprocess.Popen(["sh", "-c", script], start_new_session=True)
        self.events = [RanksUp(dict.fromkeys(range(num_ranks), " (shell)"))]

    def code_of(self, rank: int) -> Path:
        return self.folder / f"start-{self.num_starts}-rank-{rank}"

    def poll(self) -> list[Event]:
        for rank in list(self.shells):
            if self.code_of(rank).exists():
                code = int(self.code_of(rank).read_text())
                self.shells.pop(rank).wait()
                self.events.append(RankEnded(rank, None if code > 128 else code))
        events, self.events = self.events, []
        return events

    def request_stop(self) -> None:
        """The ranks see the stop file."""

    def kill(self, ranks: Collection[int]) -> None:
        for rank in list(ranks):
            with suppress(KeyError, ProcessLookupError):
                os.killpg(self.shells[rank].pid, signal.SIGKILL)
                self.code_of(rank).write_text("137")


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if a package with this launcher were installed."""
    entry = EntryPoint("shell", f"{__name__}:ShellLauncher", module.GROUP)
    monkeypatch.setattr(module, "entry_points", lambda group: [entry])


def test_it_is_found_by_name_also_with_an_argument(tmp_path: Path) -> None:
    assert isinstance(find_launcher("shell"), ShellLauncher)
    launcher = find_launcher("shell:/a:b")
    assert isinstance(launcher, ShellLauncher)
    assert launcher.folder == Path("/a:b")


@pytest.mark.slow
def test_it_trains_as_processes_do(dataset: Path, tmp_path: Path) -> None:
    options = [f"data.path={dataset}", NO_EVALUATION, "--ranks", 2, "--quiet"]
    for on in (f"shell:{tmp_path / 'scripts'}", "processes"):
        run = tmp_path / on.partition(":")[0]
        code, output = run_txl("train", TINY, f"directory={run}", *options, "--on", on)
        assert code == 0, output
    assert losses(tmp_path / "shell") == losses(tmp_path / "processes")


@pytest.mark.slow
def test_a_killed_rank_is_restarted_from_the_newest_checkpoint(
    dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TXL_FAULT", "step:kill:15:1")  # of the first start: it resumes at step 12
    lines: list[str] = []
    spec = tiny_spec(dataset, tmp_path / "run", NO_EVALUATION)
    ShellLauncher(str(tmp_path / "scripts")).train(spec, num_ranks=2, on_line=lines.append)
    assert any("rank 1 (shell) died; restart 1 of at most 1" in line for line in lines), lines
    assert sorted(losses(tmp_path / "run")) == list(range(1, 21))


@pytest.mark.slow
def test_a_stop_request_saves(
    dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TXL_FAULT", "step:terminate:5:0")
    spec = tiny_spec(dataset, tmp_path / "run", NO_EVALUATION)
    with pytest.raises(PreemptedError, match="that of step"):
        ShellLauncher(str(tmp_path / "scripts")).train(spec, num_ranks=2, on_line=lambda line: None)
