"""Where a run resumes: the rows of the table in `txl_dist/training/resume.py`, and the reasons of
refusals. Rows about copies: test_remote_checkpoints.py, ../checkpoint/test_copies.py.
"""

import errno
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.diverging_runs import StopAfter, train_with
from tests.support.gloo_ranks import RankGroups
from tests.support.prepared import prepared
from tests.support.training_runs import (
    NO_EVALUATION,
    TinyRuns,
    losses,
    opened_trainer,
    refusal,
    tiny_spec,
    train,
)
from tests.txl_dist.checkpoint.saving import save
from txl_dist.checkpoint import directory as checkpoint_directory
from txl_dist.checkpoint.attempts import FOLDER, Attempt, AttemptRecord
from txl_dist.checkpoint.directory import CheckpointDirectory
from txl_dist.checkpoint.manifest import load_checkpoint_manifest
from txl_dist.errors import ConfigError, StoreError, TxlError
from txl_dist.runtime.world import World
from txl_dist.training import resume
from txl_dist.training.spec import TrainSpec
from txl_dist.training.state import DivergenceState

SETTINGS = (NO_EVALUATION, "training.checkpoint_interval_steps=5", "training.keep_checkpoints=9")


@pytest.fixture(scope="module")
def finished(straight: Callable[..., Path]) -> Path:
    """A run of 20 steps with checkpoints at 5, 10, 15 and 20, for copies only."""
    return straight(*SETTINGS, num_ranks=1)


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    """A copy of `finished` that a test may change."""
    shutil.copytree(finished, tmp_path / "run")
    return tmp_path / "run"


def log_of(run: Path) -> str:
    """What rank 0 has logged since it last came up."""
    return (run / "logs" / "rank-0.log").read_text().rpartition("rank 0 is up")[2]


def flip(run: Path, step: int, kind: str) -> None:
    (path,) = (run / "checkpoints" / f"step-{step:08d}").glob(f"{kind}*")
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


def command(tiny: TinyRuns, run: Path, resume: object = "auto", *overrides: str) -> TrainSpec:
    return tiny.spec(run, *SETTINGS, *overrides, resume=str(resume))


def build_and_end(world: World, spec: TrainSpec) -> int | str:
    try:
        with opened_trainer(world, spec) as trainer:
            return trainer.state.step
    except TxlError as error:
        return str(error)


def begins_at(tiny: TinyRuns, spec: TrainSpec) -> int | str:
    """The step where a command resumes (0: a new run), or why it is refused."""
    (end,) = tiny.ranks(1).run(build_and_end, spec)
    return end


@pytest.mark.parametrize(
    ("resume", "is_there", "result"),
    [
        ("never", None, 0),
        ("never", "checkpoints", "--resume never would overwrite it"),
        ("PATH", None, 10),
        ("PATH", "checkpoints", "begins another run. Give the fork a new directory"),
        ("auto", None, 0),
        ("auto", "only LATEST", "LATEST says that this run has checkpoints, but"),
        ("PATH", "only LATEST", "LATEST says that this run has checkpoints, but"),
        ("never", "only LATEST", 0),
        ("auto", "checkpoints", 15),
        ("auto", "the newest damaged", 10),
        ("auto", "all damaged", "are damaged: "),
        ("PATH", "all damaged", "are damaged: "),
    ],
)
def test_a_row_of_the_table(
    tiny: TinyRuns, finished: Path, resume: str, is_there: str | None, result: int | str
) -> None:
    run, given = tiny.path / "run", finished / "checkpoints" / "step-00000010"
    if is_there is not None:
        shutil.copytree(finished, run)
        shutil.rmtree(run / "checkpoints" / "step-00000020")
    if is_there == "only LATEST":
        shutil.rmtree(run / "checkpoints")
    for step in {"the newest damaged": (15,), "all damaged": (5, 10, 15)}.get(is_there or "", ()):
        flip(run, step, "manifest")
    before = metrics_of(run)
    spec = command(tiny, run, given if resume == "PATH" else resume)
    found = begins_at(tiny, spec)
    if isinstance(result, int):
        assert found == result
    else:
        assert result in str(found)
        assert metrics_of(run) == before, "a refusal changes nothing"


@pytest.mark.parametrize(
    ("resume", "own_step"),
    [("auto", None), ("auto", 10), ("auto", 20), ("never", None), ("PATH", None)],
)
def test_copies_from_a_url_are_refused_until_they_are_renamed(
    tiny: TinyRuns, run: Path, resume: str, own_step: int | None
) -> None:
    """RUN has its checkpoint of one step, or none and no LATEST, and a copy of step 15."""
    checkpoints = CheckpointDirectory(run)
    copy = checkpoints.at(15).rename(checkpoints.path / "step-00000015.0123456789abcdef")
    for step in set(checkpoints.steps()) - {own_step}:
        shutil.rmtree(checkpoints.at(step))
    (run / "LATEST").unlink()
    before = metrics_of(run)
    spec = command(tiny, run, copy if resume == "PATH" else resume)
    end = begins_at(tiny, spec)
    if own_step == 20:
        assert end == 20, "an older copy does not matter"
        return
    assert f"{copy} is a copy from a URL" in str(end)
    assert "(this one to step-00000015)" in str(end)
    assert metrics_of(run) == before, "a refusal changes nothing"
    copy.rename(checkpoints.at(15))
    if resume == "auto":
        assert begins_at(tiny, spec) == 15


def metrics_of(run: Path) -> bytes | None:
    path = run / "metrics.jsonl"
    return path.read_bytes() if path.exists() else None


def test_the_table_is_the_same_in_the_documentation() -> None:
    page = Path(__file__).parents[3] / "docs" / "how_to" / "train_for_weeks.md"
    section = page.read_text("utf-8").partition("## Where a run resumes")[2].partition("\n## ")[0]
    documented = [
        [cell.strip(" `") for cell in line.split("|")[1:3]]
        for line in section.splitlines()
        if line.startswith("| `")
    ][1:]
    in_code = [
        re.split(r" {2,}", line.strip())[:2]
        for line in (resume.__doc__ or "").splitlines()
        if line.startswith("    ") and line[4] != " "
    ][1:]
    assert [[cell.replace("`", "") for cell in row] for row in documented] == in_code


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_the_same_command_continues_its_fork(
    tiny: TinyRuns, finished: Path, num_ranks: int
) -> None:
    """As a scheduler repeats it, also after the other run has removed its checkpoint."""
    shutil.copytree(finished, tiny.path / "other")
    given, fork = tiny.path / "other" / "checkpoints" / "step-00000005", tiny.path / "fork"
    spec = command(tiny, fork, given)
    assert tiny.ranks(2).run(train_with, spec, StopAfter(12))[0][0] == 75
    began = losses(fork)
    assert list(began) == list(range(6, 13)), "the steps before belong to the other run"
    shutil.rmtree(given)
    assert tiny.ranks(num_ranks).run(train, spec) == [0] * num_ranks
    assert "resuming at step 12" in log_of(fork)
    assert began.items() <= losses(fork).items()
    expected = {step: loss for step, loss in losses(finished).items() if step > 5}
    assert losses(fork) == pytest.approx(expected, rel=2e-6)
    assert load_checkpoint_manifest(CheckpointDirectory(fork).at(20)).run_id != (
        load_checkpoint_manifest(CheckpointDirectory(finished).at(20)).run_id
    )


def test_the_events_of_the_other_run_do_not_count_in_a_fork(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it would stop after fewer events than `divergence.max_events`."""
    monkeypatch.setattr(resume, "require_compatible", lambda *_, **__: None)
    path = save(tmp_path / "other", step=3)
    divergence = DivergenceState(event_steps=(2, 3), skip_steps=(2,))
    CheckpointDirectory(tmp_path / "other").update_state(3, {"divergence": divergence.model_dump()})
    spec = tiny_spec(Path("no-data"), tmp_path / "fork", resume=str(path))
    directory = CheckpointDirectory(spec.run_path)
    search = resume.Resume(spec, None, World(0, 1), directory)  # type: ignore[arg-type]
    point = search.find(download=False)
    assert point is not None
    assert point.state.divergence == DivergenceState(skip_steps=(2,))
    assert point.state.forked_from == str(path)


def test_other_settings_of_a_fork_are_refused_or_allowed_like_those_of_any_run(
    tiny: TinyRuns, finished: Path
) -> None:
    given, fork = finished / "checkpoints" / "step-00000005", tiny.path / "fork"
    slower = "optimizer.lr=0.001"
    assert "--allow-change optimizer.lr" in str(begins_at(tiny, command(tiny, fork, given, slower)))
    allow = {"allow_change": ("optimizer.lr",)}
    allowed = command(tiny, fork, given, slower).model_copy(update=allow)
    assert tiny.ranks(1).run(train_with, allowed, StopAfter(7))[0][0] == 75
    assert "optimizer.lr: checkpoint 0.001, now 0.01" in str(
        begins_at(tiny, command(tiny, fork, given))
    )


def test_never_continues_what_an_earlier_attempt_of_its_launch_has_begun(tiny: TinyRuns) -> None:
    """A launcher restarts its ranks with the command as it was given."""
    spec = command(tiny, tiny.path, "never")
    assert tiny.ranks(1).run(train_with, spec, StopAfter(7))[0][0] == 75
    assert begins_at(tiny, spec) == 7
    again = spec.model_copy(update={"launch_id": "another"})
    assert "--resume never would overwrite it" in str(begins_at(tiny, again))


def test_a_start_is_no_restart_because_it_has_begun_its_attempt(tmp_path: Path) -> None:
    """Another run without the lock saves its first checkpoint while this one starts."""
    spec = tiny_spec(Path("no-data"), tmp_path, resume="never", launch_id="0123")
    directory = CheckpointDirectory(tmp_path)
    search = resume.Resume(spec, None, World(0, 1), directory)  # type: ignore[arg-type]
    assert search.find() is None
    record = AttemptRecord.of_this_process(number=1, launch_id="0123")
    Attempt(record, tmp_path / FOLDER).add()
    save(tmp_path, step=1)
    with pytest.raises(ConfigError, match="--resume never would overwrite it"):
        search.find(download=False)


@pytest.mark.fault_row(24)
def test_a_damaged_checkpoint_is_skipped_with_a_warning_that_counts_the_lost_steps(
    tiny: TinyRuns, run: Path
) -> None:
    expected = losses(run)
    flip(run, 20, "weights")
    flip(run, 15, "memory")
    tiny.trained(run, *SETTINGS)
    log = (run / "logs" / "rank-0.log").read_text()
    assert "step-00000020/weights-rank-00000.safetensors has sha256" in log
    assert "Resuming from step 10 instead; 10 steps are lost" in log
    assert losses(run) == pytest.approx(expected, rel=2e-6)
    superseded = (run / "logs" / "metrics-superseded.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in superseded] == list(range(11, 21))


def train_with_failing_disk(world: World, spec: TrainSpec, name: str) -> int:
    """Train while one rank's reads of a file of the newest checkpoint fail."""
    hashed = checkpoint_directory.sha256_file

    def failing(path: Path) -> str:
        if world.rank == 1 and path.parent.name == "step-00000020" and path.name == name:
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return hashed(path)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint_directory, "sha256_file", failing)
        return train(world, spec)


def test_a_checkpoint_that_cannot_be_read_now_is_not_given_up(tiny: TinyRuns, run: Path) -> None:
    """It may be intact: no rank goes back, and the next start has all steps."""
    before = sorted(CheckpointDirectory(run).path.iterdir())
    spec = tiny.spec(run, *SETTINGS)
    name = sorted(load_checkpoint_manifest(CheckpointDirectory(run).at(20)).files)[1]
    ends = tiny.ranks(2).run(train_with_failing_disk, spec, name)
    assert ends == [StoreError.exit_code] * 2
    assert "It may be intact" in refusal(run)
    assert sorted(CheckpointDirectory(run).path.iterdir()) == before
    assert tiny.ranks(2).run(train, spec) == [0, 0]


@pytest.mark.fault_row(24)
def test_strict_refuses_to_fall_back(tiny: TinyRuns, run: Path) -> None:
    flip(run, 20, "optimizer")
    assert tiny.ranks(2).run(train, tiny.spec(run, *SETTINGS, strict=True)) == [4, 4]
    assert "optimizer-rank-00000.safetensors" in refusal(run)


@pytest.mark.fault_row(8)
def test_a_half_written_checkpoint_is_never_chosen(tiny: TinyRuns, run: Path) -> None:
    staging = run / "checkpoints" / ".saving.tmp"
    (run / "checkpoints" / "step-00000020").rename(staging)
    tiny.trained(run, *SETTINGS, num_ranks=1)
    assert "resuming at step 15" in (run / "logs" / "rank-0.log").read_text()
    assert not staging.exists()


@pytest.mark.fault_row(26)
@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.d_model=18", "model.d_model: checkpoint 16, now 18 -> cannot change"),
        ("data.num_lanes=7", "data.num_lanes: checkpoint 5, now 7 -> --allow-change"),
        ("data.tgt_len=4", "data.tgt_len: checkpoint 3, now 4 -> --allow-change"),
        ("data.reset=stream", "data.reset: checkpoint 'document', now 'stream' -> cannot change"),
        ("data.shuffle=none", "data.shuffle: checkpoint 'blocks', now 'none' -> cannot change"),
        ("seed=4", "seed: checkpoint 3, now 4 -> cannot change"),
        ("optimizer.lr=0.1", "optimizer.lr: checkpoint 0.01, now 0.1 -> --allow-change"),
    ],
)
def test_another_models_or_runs_checkpoint_is_refused_with_what_differs(
    tiny: TinyRuns, run: Path, override: str, message: str
) -> None:
    assert tiny.ranks(2).run(train, tiny.spec(run, *SETTINGS, override)) == [4, 4]
    assert message in refusal(run)


@pytest.mark.fault_row(16)
def test_other_data_is_refused_unless_it_is_allowed(
    ranks: RankGroups, run: Path, tmp_path: Path
) -> None:
    text = "Another text, long enough for five lanes of a few tokens each. " * 20
    other = prepared(tmp_path / "other", text)
    longer = ("training.num_steps=21",)
    options = {"allow_change": ("training.num_steps",)}
    refused = tiny_spec(other, run, *SETTINGS, *longer, **options)
    assert ranks(1).run(train, refused) == [3]
    assert "--allow-data-change" in refusal(run)
    allowed = tiny_spec(other, run, *SETTINGS, *longer, allow_data_change=True, **options)
    assert ranks(1).run(train, allowed) == [0]


def test_a_finished_run_is_not_changed_and_logs_how_to_train_further(
    tiny: TinyRuns, run: Path
) -> None:
    before = (run / "metrics.jsonl").read_bytes()
    tiny.trained(run, *SETTINGS)
    assert (run / "metrics.jsonl").read_bytes() == before
    log = log_of(run)
    assert "this run is finished: 20 of training.num_steps=20 steps are done" in log
    assert "training.num_steps=MORE --allow-change training.num_steps" in log
    assert "steps 21 to 20" not in log


@pytest.mark.fault_row(34)
def test_the_newest_checkpoint_is_that_of_the_highest_step_not_of_the_latest_date(
    tiny: TinyRuns,
) -> None:
    constant = (NO_EVALUATION, "optimizer.schedule=constant")
    tiny.trained(tiny.path, *constant, num_ranks=1)
    checkpoints = sorted((tiny.path / "checkpoints").iterdir())
    for age, path in enumerate(checkpoints):
        for file in (path, *path.iterdir()):
            os.utime(file, (10**9 - age * 10**6,) * 2)
    allow = {"allow_change": ("training.num_steps",)}
    tiny.trained(tiny.path, *constant, "training.num_steps=21", **allow, num_ranks=1)
    assert "resuming at step 20" in (tiny.path / "logs" / "rank-0.log").read_text()
