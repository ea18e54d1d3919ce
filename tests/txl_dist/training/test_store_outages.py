"""A store of checkpoints that is away: training goes on, and everything is copied later."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from data_pipeline.system.remote_path import RemotePath
from tests.data_pipeline.conftest import bucket, s3_server  # noqa: F401 - fixtures
from tests.support.cloud_runs import SETTINGS, URL, aws, die_after, in_cloud, remote_steps  # noqa: F401
from tests.support.gloo_ranks import RankGroups
from tests.support.training_runs import NO_EVALUATION, losses, tiny_job, train
from tests.txl_dist.training.test_saving import train_changed
from txl_dist.checkpoint.attempts import AttemptRecord
from txl_dist.checkpoint.directory import CheckpointDirectory
from txl_dist.runtime.world import World
from txl_dist.training.job import TrainJob
from txl_dist.training.loop import Trainer
from txl_dist.training.setup import build_trainer


def train_with_refused_uploads(
    world: World, job: TrainJob, until_step: int | None
) -> tuple[int, str, bool]:
    """Answer all uploads with an error, until a step if one is given; whether that happened."""
    upload, refused = RemotePath.write_from, []

    def refuse_uploads(trainer: Trainer) -> None:
        def refuse(target: RemotePath, source: Path) -> None:
            if until_step is None or trainer.state.step < until_step:
                refused.append(target)
                raise ConnectionError("503 Slow Down")
            upload(target, source)

        RemotePath.write_from = refuse  # type: ignore[method-assign]

    try:
        return *train_changed(world, job, refuse_uploads), bool(refused)
    finally:
        RemotePath.write_from = upload  # type: ignore[method-assign]


@pytest.mark.slow
def test_a_store_that_is_away_for_a_while_stops_nothing_and_gets_everything_later(
    ranks: RankGroups,
    dataset: Path,
    tmp_path: Path,
    aws: dict[str, str],  # noqa: F811
    bucket: Any,  # noqa: F811
) -> None:
    job = tiny_job(dataset, tmp_path, *SETTINGS)
    ends = ranks(1).run(in_cloud, aws, train_with_refused_uploads, job, 20)
    assert ends == [(0, "", True)]
    assert remote_steps(bucket) == [15, 20]


def train_with_store_away(
    world: World, job: TrainJob, first_step: int, last_step: int
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
        patch.setattr("txl_dist.training.rank.build_trainer", build)
        return train(world, job), len(failed)


def test_a_restart_by_its_launch_needs_no_store(
    ranks: RankGroups,
    dataset: Path,
    tmp_path: Path,
    aws: dict[str, str],  # noqa: F811
    bucket: Any,  # noqa: F811
) -> None:
    """Another launch may lack newer checkpoints, so it does."""
    straight = tiny_job(dataset, tmp_path / "straight", NO_EVALUATION)
    assert ranks(1).run(train, straight) == [0]
    job = tiny_job(dataset, tmp_path / "run", *SETTINGS)
    ends = ranks(1).run(in_cloud, aws, train_changed, job, die_after, 13)
    assert [code for code, _ in ends] == [3]
    other = job.model_copy(update={"launch_id": "another"})
    ((code, _),) = ranks(1).run(in_cloud, aws, train_with_store_away, other, 0, 17)
    assert code == 4
    ((code, num_failed),) = ranks(1).run(in_cloud, aws, train_with_store_away, job, 0, 17)
    assert (code, num_failed > 0) == (0, True)
    assert losses(job.run_path) == losses(straight.run_path)
    assert remote_steps(bucket) == [15, 20]
    assert len(bucket.ls("bucket/runs/one/attempts")) == 2, "recorded later"


@pytest.mark.slow
def test_a_restart_without_the_store_stops_if_the_run_has_gone_on_elsewhere(
    ranks: RankGroups,
    dataset: Path,
    tmp_path: Path,
    aws: dict[str, str],  # noqa: F811
    bucket: Any,  # noqa: F811
) -> None:
    job = tiny_job(dataset, tmp_path, *SETTINGS)
    ends = ranks(1).run(in_cloud, aws, train_changed, job, die_after, 13)
    assert [code for code, _ in ends] == [3]
    other = AttemptRecord.of_this_process(number=2, launch_id="other")
    bucket.pipe(f"bucket/runs/one/attempts/{other.file_name}", other.model_dump_json().encode())
    copies = bucket.find("bucket/runs/one/checkpoints")
    ((code, num_failed),) = ranks(1).run(in_cloud, aws, train_with_store_away, job, 0, 14)
    assert (code, num_failed > 0) == (4, True)
    assert "attempt 2 (host" in (tmp_path / "logs/rank-0.log").read_text()
    bucket.invalidate_cache()
    assert bucket.find("bucket/runs/one/checkpoints") == copies


@pytest.mark.slow
def test_a_store_that_never_comes_back_is_an_error_at_the_end_of_the_run(
    ranks: RankGroups,
    dataset: Path,
    tmp_path: Path,
    aws: dict[str, str],  # noqa: F811
) -> None:
    hasty = (*SETTINGS, "training.checkpoint_upload_timeout_seconds=3")
    ends = ranks(2).run(
        in_cloud, aws, train_with_refused_uploads, tiny_job(dataset, tmp_path, *hasty), None
    )
    for code, message, _ in ends:
        assert code == 4
        assert f"could not be copied to {URL}: ConnectionError: 503" in message
        assert "The same command repeats the upload" in message
    assert CheckpointDirectory(tmp_path).steps() == [15, 20]
    job = tiny_job(dataset, tmp_path, *SETTINGS)
    assert ranks(2).run(in_cloud, aws, train, job) == [0, 0], "the same command uploads"
