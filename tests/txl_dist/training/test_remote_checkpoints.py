"""Checkpoints are copied to an object store in the background, and a run resumes from the copies.

A store that is away stops nothing, and gets everything later. The store is moto's S3 on 127.0.0.1.
"""

# ruff: noqa: F811 - fixtures are imported, and arguments of tests

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from data_pipeline.system.remote_path import RemotePath
from tests.data_pipeline.conftest import bucket, s3_server  # noqa: F401 - fixtures
from tests.support.cloud_runs import SETTINGS, URL, aws, die_after, in_cloud, remote_steps  # noqa: F401
from tests.support.training_runs import NO_EVALUATION, TINY, TinyRuns, losses, refusal, train
from tests.txl_dist.training.test_resume import flip
from tests.txl_dist.training.test_saving import train_changed
from txl_dist.checkpoint.attempts import AttemptRecord
from txl_dist.checkpoint.copies import copy_name
from txl_dist.checkpoint.directory import CheckpointDirectory
from txl_dist.checkpoint.manifest import load_checkpoint_manifest
from txl_dist.events import EVENTS, EventLog, WallTime, read_events
from txl_dist.runtime.world import World
from txl_dist.training import saving
from txl_dist.training.loop import Trainer
from txl_dist.training.rank import build_trainer
from txl_dist.training.spec import TrainSpec


@pytest.mark.fault_row(24)
@pytest.mark.parametrize(
    ("num_ranks", "spoil"),
    [
        (1, shutil.rmtree),
        pytest.param(2, shutil.rmtree, marks=pytest.mark.slow),
        (1, partial(flip, step=10, kind="weights")),
    ],
    ids=["empty disk", "empty disk, 2 ranks", "damaged checkpoint"],
)
def test_a_run_continues_from_its_copies_with_the_losses_of_an_undisturbed_one(
    tiny: TinyRuns,
    aws: dict[str, str],
    bucket: Any,
    num_ranks: int,
    spoil: Callable[[Path], object],
) -> None:
    straight = tiny.trained("straight", NO_EVALUATION, num_ranks=num_ranks)
    spec = tiny.spec("run", *SETTINGS)
    ends = tiny.ranks(num_ranks).run(in_cloud, aws, train_changed, spec, die_after, 13)
    assert [code for code, _ in ends] == [3] * num_ranks
    assert remote_steps(bucket) == [5, 10]
    EventLog(tiny.path / "run" / EVENTS, lambda: 1).write("restart", "after the last upload")
    spoil(tiny.path / "run")
    is_damaged = (tiny.path / "run").exists()

    assert tiny.ranks(num_ranks).run(in_cloud, aws, train, spec) == [0] * num_ranks
    assert "resuming at step 10" in (tiny.path / "run/logs/rank-0.log").read_text()
    assert losses(tiny.path / "run") == losses(straight)
    time = WallTime.of(read_events(tiny.path / "run"))
    assert (time.restarts, time.seconds["down"] > 0) == (1, True)
    local = CheckpointDirectory(tiny.path / "run")
    assert remote_steps(bucket) == local.steps(), "the same retention"
    # The upload may have read an older one at the last removal; a later run removes it.
    assert local.steps()[-2:] == [15, 20]
    latest = bucket.cat("bucket/runs/one/LATEST").decode()
    assert latest.startswith("checkpoints/step-00000020.")
    copied = bucket.cat("bucket/runs/one/metrics.jsonl").decode().splitlines()
    assert [json.loads(line)["step"] for line in copied] == list(range(1, 21))
    events = (tiny.path / "run" / EVENTS).read_text()
    assert ("after the last upload" in events) == is_damaged, "files that are newer here stay"


def continue_elsewhere(trainer: Trainer, step: int, command: list[str]) -> None:
    """Before a step, another process continues the run to its end from the copies."""
    read = trainer.batches.read

    def interrupted() -> Any:
        if trainer.state.step == step:
            trainer.saver.finish(require_copies=True)
            subprocess.run(command, check=True, capture_output=True, timeout=100)
        return read()

    trainer.batches.read = interrupted  # type: ignore[method-assign]


@pytest.mark.slow
@pytest.mark.fault_row(36)
def test_a_run_that_was_continued_elsewhere_stops_and_changes_no_copy(
    tiny: TinyRuns, aws: dict[str, str], bucket: Any
) -> None:
    """Two hosts with a disk each: no lock and no directory is common to the two attempts."""
    straight, older, newer = (tiny.path / name for name in ("straight", "older", "newer"))
    tiny.trained(straight, NO_EVALUATION, num_ranks=1)
    overrides = [f"data.path={tiny.dataset}", f"directory={newer}", *SETTINGS]
    command = [sys.executable, "-m", "txl_dist", "train", str(TINY), *overrides]
    command += ["--on", "processes"]
    spec = tiny.spec(older, *SETTINGS)
    [(code, message)] = tiny.ranks(1).run(
        in_cloud, aws, train_changed, spec, continue_elsewhere, 7, command
    )
    assert code == 4, message
    assert "attempt 2 (host " in message
    assert "this process, attempt 1 (host " in message
    assert losses(newer) == losses(straight)
    assert remote_steps(bucket) == CheckpointDirectory(newer).steps()
    assert remote_steps(bucket)[-2:] == [15, 20]
    copied = bucket.cat("bucket/runs/one/metrics.jsonl")
    assert copied == (newer / "metrics.jsonl").read_bytes()
    latest = bucket.cat("bucket/runs/one/LATEST").decode()
    manifest = load_checkpoint_manifest(CheckpointDirectory(newer).at(20))
    assert latest == f"checkpoints/{copy_name(manifest)}\n"
    assert manifest.attempt == 2


@pytest.mark.slow
def test_a_run_that_begins_at_a_checkpoint_of_another_run_has_a_url_of_its_own(
    tiny: TinyRuns, aws: dict[str, str], bucket: Any
) -> None:
    """Its command can be repeated, also on an empty disk."""

    def start(spec: TrainSpec, *changes: Any) -> Any:
        function = train_changed if changes else train
        (end,) = tiny.ranks(1).run(in_cloud, aws, function, spec, *changes)
        return end

    source = tiny.spec("source", NO_EVALUATION, *SETTINGS[2:])
    assert start(source) == 0
    given = str(CheckpointDirectory(source.run_path).at(15))
    spec = tiny.spec("run", *SETTINGS, resume=given)
    assert start(spec, die_after, 18)[0] == 3
    assert start(spec, die_after, 18)[0] == 3, "before it has saved a checkpoint"
    assert start(spec) == 0
    assert remote_steps(bucket) == [20]
    shutil.rmtree(tiny.path / "run")
    longer = (*SETTINGS, "training.num_steps=22")
    allow = {"resume": given, "allow_change": ("training.num_steps", "optimizer.lr")}
    assert start(tiny.spec("run", *longer, **allow)) == 0
    assert "resuming at step 20" in (tiny.path / "run/logs/rank-0.log").read_text()
    assert remote_steps(bucket) == [20, 22]

    # A fork that begins elsewhere would replace these copies.
    copies, other = bucket.find("bucket/runs/one/checkpoints"), tiny.path / "other"
    allow["resume"] = str(CheckpointDirectory(source.run_path).at(20))
    for _ in range(2):
        assert start(tiny.spec(other, *longer, **allow)) == 2
        assert "has checkpoints of another run" in refusal(other)
    assert CheckpointDirectory(other).newest_step() is None
    assert bucket.find("bucket/runs/one/checkpoints") == copies


def test_a_spec_that_does_not_fit_the_copies_gets_none_of_their_files(
    tiny: TinyRuns, aws: dict[str, str], bucket: Any
) -> None:
    """A mistyped URL is that of another run: the directory must stay usable with the right one."""
    spec = tiny.spec("first", *SETTINGS)
    assert tiny.ranks(1).run(in_cloud, aws, train_changed, spec, die_after, 8)[0][0] == 3
    other = tiny.spec("second", *SETTINGS, "seed=7")
    assert tiny.ranks(1).run(in_cloud, aws, train, other) == [4]
    assert "seed: checkpoint 3, now 7" in refusal(other.run_path)
    assert not (other.run_path / "metrics.jsonl").exists()
    assert CheckpointDirectory(other.run_path).steps() == []
    assert not (other.run_path / "LATEST").exists()
    assert remote_steps(bucket) == [5]


# --- a store that is away ------------------------------------------------------------------------


def train_with_store_away(
    world: World, spec: TrainSpec, first_step: int, last_step: int
) -> tuple[int, int]:
    """Fail every request between two steps; 0 is the start. How the run ends, how many failed."""
    request, failed, trainers = RemotePath._request, [], []

    def request_or_fail(path: RemotePath, function: Callable[[Any], Any]) -> Any:
        step = trainers[-1].state.step if trainers else 0
        if first_step <= step < last_step:
            failed.append(path)
            raise ConnectionError("503 Slow Down")
        return request(path, function)

    def build(*args: Any, **options: Any) -> Trainer:
        trainers.append(build_trainer(*args, **options))
        return trainers[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RemotePath, "_request", request_or_fail)
        if last_step > spec.config.training.num_steps:  # the end of the run waits for the store
            patch.setattr(saving, "UPLOAD_SECONDS", 3.0)
        patch.setattr("txl_dist.training.rank.build_trainer", build)
        return train(world, spec), len(failed)


@pytest.mark.slow
def test_a_store_that_is_away_for_a_while_stops_nothing_and_gets_everything_later(
    tiny: TinyRuns, aws: dict[str, str], bucket: Any
) -> None:
    spec = tiny.spec(tiny.path, *SETTINGS)
    ((code, num_failed),) = tiny.ranks(1).run(in_cloud, aws, train_with_store_away, spec, 1, 20)
    assert (code, num_failed > 0) == (0, True)
    assert remote_steps(bucket) == [15, 20]


def test_a_restart_by_its_launch_needs_no_store(
    tiny: TinyRuns, aws: dict[str, str], bucket: Any
) -> None:
    """Another launch may lack newer checkpoints, so it does."""
    straight = tiny.trained("straight", NO_EVALUATION, num_ranks=1)
    spec = tiny.spec("run", *SETTINGS)
    ends = tiny.ranks(1).run(in_cloud, aws, train_changed, spec, die_after, 13)
    assert [code for code, _ in ends] == [3]
    other = spec.model_copy(update={"launch_id": "another"})
    ((code, _),) = tiny.ranks(1).run(in_cloud, aws, train_with_store_away, other, 0, 17)
    assert code == 4
    ((code, num_failed),) = tiny.ranks(1).run(in_cloud, aws, train_with_store_away, spec, 0, 17)
    assert (code, num_failed > 0) == (0, True)
    assert losses(spec.run_path) == losses(straight)
    assert remote_steps(bucket) == [15, 20]
    assert len(bucket.ls("bucket/runs/one/attempts")) == 2, "recorded later"


@pytest.mark.slow
def test_a_restart_without_the_store_stops_if_the_run_has_gone_on_elsewhere(
    tiny: TinyRuns, aws: dict[str, str], bucket: Any
) -> None:
    spec = tiny.spec(tiny.path, *SETTINGS)
    ends = tiny.ranks(1).run(in_cloud, aws, train_changed, spec, die_after, 13)
    assert [code for code, _ in ends] == [3]
    other = AttemptRecord.of_this_process(number=2, launch_id="other")
    bucket.pipe(f"bucket/runs/one/attempts/{other.file_name}", other.model_dump_json().encode())
    copies = bucket.find("bucket/runs/one/checkpoints")
    ((code, num_failed),) = tiny.ranks(1).run(in_cloud, aws, train_with_store_away, spec, 0, 14)
    assert (code, num_failed > 0) == (4, True)
    assert "attempt 2 (host" in (tiny.path / "logs/rank-0.log").read_text()
    bucket.invalidate_cache()
    assert bucket.find("bucket/runs/one/checkpoints") == copies


@pytest.mark.slow
def test_a_store_that_never_comes_back_is_an_error_at_the_end_of_the_run(
    tiny: TinyRuns, aws: dict[str, str]
) -> None:
    spec = tiny.spec(tiny.path, *SETTINGS)
    ends = tiny.ranks(2).run(in_cloud, aws, train_with_store_away, spec, 1, 99)
    assert [code for code, _ in ends] == [4, 4]
    for rank in range(2):
        log = (tiny.path / "logs" / f"rank-{rank}.log").read_text()
        assert f"could not be copied to {URL}: ConnectionError: 503" in log
        assert "The same command repeats the upload" in log
    assert CheckpointDirectory(tiny.path).steps() == [15, 20]
    assert tiny.ranks(2).run(in_cloud, aws, train, spec) == [0, 0], "the same command uploads"
