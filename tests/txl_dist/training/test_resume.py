"""A run resumes from the newest intact checkpoint, or is refused with the reason."""

import json
import os
import shutil
from pathlib import Path

import pytest

from tests.support.diverging_runs import StopAfter, train_with
from tests.support.gloo_ranks import RankGroups
from tests.support.training_runs import NO_EVALUATION, losses, refusal, tiny_job, train
from txl_dist.checkpoint.directory import CheckpointDirectory
from txl_dist.errors import CheckpointError
from txl_dist.training.job import TrainJob

SETTINGS = (NO_EVALUATION, "training.checkpoint_interval_steps=5", "training.keep_checkpoints=9")


@pytest.fixture(scope="module")
def finished(ranks: RankGroups, dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 20 steps with checkpoints at 5, 10, 15 and 20, for copies only."""
    run = tmp_path_factory.mktemp("finished") / "run"
    assert ranks(1).run(train, tiny_job(dataset, run, *SETTINGS)) == [0]
    return run


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


@pytest.mark.fault_row(24)
def test_a_damaged_checkpoint_is_skipped_with_a_warning_that_counts_the_lost_steps(
    ranks: RankGroups, dataset: Path, run: Path
) -> None:
    expected = losses(run)
    flip(run, 20, "weights")
    flip(run, 15, "memory")
    assert ranks(2).run(train, tiny_job(dataset, run, *SETTINGS)) == [0, 0]
    log = (run / "logs" / "rank-0.log").read_text()
    assert "step-00000020/weights-rank-00000.safetensors has sha256" in log
    assert "Resuming from step 10 instead; 10 steps are lost" in log
    assert losses(run) == pytest.approx(expected, rel=2e-6)


@pytest.mark.fault_row(24)
def test_strict_refuses_to_fall_back(ranks: RankGroups, dataset: Path, run: Path) -> None:
    flip(run, 20, "optimizer")
    assert ranks(2).run(train, tiny_job(dataset, run, *SETTINGS, strict=True)) == [4, 4]
    assert "optimizer-rank-00000.safetensors" in refusal(run)


@pytest.mark.fault_row(8)
def test_a_half_written_checkpoint_is_never_chosen(
    ranks: RankGroups, dataset: Path, run: Path
) -> None:
    staging = run / "checkpoints" / ".saving.tmp"
    (run / "checkpoints" / "step-00000020").rename(staging)
    assert ranks(1).run(train, tiny_job(dataset, run, *SETTINGS)) == [0]
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
    ranks: RankGroups, dataset: Path, run: Path, override: str, message: str
) -> None:
    assert ranks(2).run(train, tiny_job(dataset, run, *SETTINGS, override)) == [4, 4]
    assert message in refusal(run)


def test_an_allowed_change_takes_effect(ranks: RankGroups, dataset: Path, run: Path) -> None:
    more = ("training.num_steps=23", "optimizer.schedule=constant")
    allowed = ("training.num_steps", "optimizer.schedule")
    job = tiny_job(dataset, run, *SETTINGS, *more, allow_change=allowed)
    assert ranks(1).run(train, job) == [0]
    assert max(losses(run)) == 23


@pytest.mark.fault_row(16)
def test_other_data_is_refused_unless_it_is_allowed(
    ranks: RankGroups, run: Path, tmp_path: Path
) -> None:
    other = prepare_other_data(tmp_path)
    longer = ("training.num_steps=21",)
    options = {"allow_change": ("training.num_steps",)}
    refused = tiny_job(other, run, *SETTINGS, *longer, **options)
    assert ranks(1).run(train, refused) == [3]
    assert "--allow-data-change" in refusal(run)
    allowed = tiny_job(other, run, *SETTINGS, *longer, allow_data_change=True, **options)
    assert ranks(1).run(train, allowed) == [0]


def prepare_other_data(tmp_path: Path) -> Path:
    from data_pipeline.preparation.prepare import prepare_dataset
    from data_pipeline.shards.prepare_settings import PrepareSettings

    text = tmp_path / "other.txt"
    text.write_text("Another text, long enough for five lanes of a few tokens each. " * 20)
    prepare_dataset([text], tmp_path / "other", PrepareSettings())
    return tmp_path / "other"


def test_never_resuming_does_not_touch_a_directory_with_a_run(
    ranks: RankGroups, dataset: Path, run: Path
) -> None:
    before = (run / "metrics.jsonl").read_bytes()
    assert ranks(1).run(train, tiny_job(dataset, run, *SETTINGS, resume="never")) == [2]
    assert "--resume auto" in refusal(run)
    assert (run / "metrics.jsonl").read_bytes() == before


def test_a_finished_run_is_not_changed(ranks: RankGroups, dataset: Path, run: Path) -> None:
    before = (run / "metrics.jsonl").read_bytes()
    assert ranks(2).run(train, tiny_job(dataset, run, *SETTINGS)) == [0, 0]
    assert (run / "metrics.jsonl").read_bytes() == before


def test_lines_of_steps_trained_again_are_moved_to_another_file(
    ranks: RankGroups, dataset: Path, run: Path
) -> None:
    flip(run, 20, "weights")
    assert ranks(1).run(train, tiny_job(dataset, run, *SETTINGS)) == [0]
    superseded = (run / "logs" / "metrics-superseded.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in superseded] == [16, 17, 18, 19, 20]


@pytest.mark.parametrize("keep", [1, 2])
def test_resuming_from_an_older_checkpoint_supersedes_the_later_ones(
    ranks: RankGroups, dataset: Path, run: Path, keep: int
) -> None:
    settings = (*SETTINGS, "optimizer.schedule=constant", f"training.keep_checkpoints={keep}")
    older = run / "checkpoints" / "step-00000005"
    job = tiny_job(
        dataset,
        run,
        *settings,
        "training.num_steps=12",
        resume=str(older),
        allow_change=("training.num_steps", "optimizer.schedule"),
    )
    assert ranks(1).run(train, job) == [0]
    directory = CheckpointDirectory(run)
    assert directory.steps() == [10, 12][-keep:]
    assert (run / "LATEST").read_text() == "checkpoints/step-00000012\n"
    superseded = sorted(path.name for path in directory.path.glob("superseded-*"))
    assert superseded == [f"superseded-step-{step:08d}" for step in (10, 15, 20)]


@pytest.mark.parametrize("keep", [1, 9])
@pytest.mark.parametrize("is_own", [True, False])
def test_the_same_command_continues_what_it_began_at_a_given_checkpoint(
    ranks: RankGroups, dataset: Path, run: Path, tmp_path: Path, keep: int, is_own: bool
) -> None:
    """As a scheduler repeats it, also after the run has removed that checkpoint."""
    source = run / "checkpoints" / "step-00000005"
    target = run if is_own else tmp_path / "other"
    settings = (*SETTINGS[:2], f"training.keep_checkpoints={keep}", "optimizer.schedule=constant")

    allowed = ["optimizer.schedule"]

    def job(*overrides: str) -> TrainJob:
        allow = {"resume": str(source), "allow_change": tuple(allowed)}
        return tiny_job(dataset, target, *settings, *overrides, **allow)

    assert ranks(2).run(train_with, job(), StopAfter(12))[0][0] == 75
    began = losses(target)
    assert list(began) == list(range(1 if is_own else 6, 13))
    assert ranks(1).run(train, job()) == [0]
    assert f"this run has resumed from {source} before: it continues from step 12" in log_of(target)
    assert began.items() <= losses(target).items()
    assert CheckpointDirectory(target).newest_step() == 20
    assert not (target / "checkpoints" / "superseded-step-00000012").exists()
    # What changes no number is the same command; a longer run continues if it is allowed to.
    longer = ("training.num_steps=23", "training.log_interval_steps=2")
    assert ranks(1).run(train, job(*longer)) == [4]
    assert "--allow-change training.num_steps" in refusal(target)
    allowed.append("training.num_steps")
    assert ranks(1).run(train, job(*longer)) == [0]
    assert began.items() <= losses(target).items()
    assert max(losses(target)) == 23


@pytest.mark.slow
def test_a_command_with_other_settings_goes_back_even_if_the_run_has_them_now(
    ranks: RankGroups, dataset: Path, run: Path
) -> None:
    allow = {"allow_change": ("optimizer.lr", "optimizer.schedule")}
    settings = (*SETTINGS, "optimizer.schedule=constant")
    given = {**allow, "resume": str(run / "checkpoints" / "step-00000005")}
    first = tiny_job(dataset, run, *settings, **given)
    assert ranks(1).run(train_with, first, StopAfter(12))[0][0] == 75
    other = (*settings, "optimizer.lr=0.001")
    assert ranks(1).run(train_with, tiny_job(dataset, run, *other, **allow), StopAfter(14))[0][0]
    assert ranks(1).run(train, tiny_job(dataset, run, *other, **given)) == [0]
    assert "with another optimizer.lr: it goes back there" in log_of(run)
    assert "resuming at step 5 from" in log_of(run)
    assert (run / "checkpoints" / "superseded-step-00000014").exists()


@pytest.mark.parametrize("damaged", [(12,), (10, 12)])
def test_a_repeated_command_goes_back_only_if_no_checkpoint_since_is_intact(
    ranks: RankGroups, dataset: Path, run: Path, damaged: tuple[int, ...]
) -> None:
    given = {"resume": str(run / "checkpoints" / "step-00000005")}
    job = tiny_job(dataset, run, *SETTINGS, **given)
    assert ranks(1).run(train_with, job, StopAfter(12))[0][0] == 75
    for step in damaged:
        flip(run, step, "weights")
    assert ranks(1).run(train, tiny_job(dataset, run, *SETTINGS, strict=True, **given)) == [4]
    start = 10 if len(damaged) == 1 else 5
    assert ranks(1).run(train_with, job, StopAfter(13))[0][0] == 75
    assert (run / "checkpoints" / "superseded-step-00000010").exists() == (start == 5)
    assert ranks(1).run(train, job) == [0]
    assert "it continues from step 13" in log_of(run)
    assert list(losses(run)) == list(range(1, 21))


@pytest.mark.parametrize("strict", [True, False])
def test_damaged_manifests_do_not_hide_that_the_run_has_been_at_a_given_checkpoint(
    ranks: RankGroups, dataset: Path, run: Path, strict: bool
) -> None:
    given = {"resume": str(run / "checkpoints" / "step-00000005")}
    job = tiny_job(dataset, run, *SETTINGS, **given, strict=strict)
    assert ranks(1).run(train_with, job, StopAfter(12))[0][0] == 75
    for step in (10, 12):
        (run / "checkpoints" / f"step-{step:08d}" / "manifest.json").write_text("{")
    assert ranks(1).run(train, job) == [4 if strict else 0]
    assert "step-00000012/manifest.json" in (refusal(run) if strict else log_of(run))
    assert (run / "checkpoints" / "superseded-step-00000012").exists() != strict


@pytest.mark.parametrize("form", ["link", "copy"])
def test_a_given_checkpoint_is_the_runs_own_by_any_path(
    ranks: RankGroups, dataset: Path, run: Path, tmp_path: Path, form: str
) -> None:
    """And a link may point to another place at the next start."""
    path = "checkpoints/step-00000010"
    if form == "copy":
        shutil.copytree(run / path, tmp_path / "link" / path)
    else:
        (tmp_path / "link").symlink_to(run)
    given = {"resume": str(tmp_path / "link" / path)}
    job = tiny_job(dataset, run, *SETTINGS, **given)
    assert ranks(1).run(train_with, job, StopAfter(12))[0][0] == 75
    assert CheckpointDirectory(run).steps() == [5, 10, 12]
    assert list(losses(run)) == list(range(1, 13))
    if form == "link":
        (tmp_path / "link").unlink()
        (tmp_path / "link").symlink_to(tmp_path)
    assert ranks(1).run(train, job) == [0]
    assert "it continues from step 12" in log_of(run)


def test_going_to_a_superseded_checkpoint_leaves_what_both_trajectories_share(
    ranks: RankGroups, dataset: Path, run: Path
) -> None:
    allow = {"allow_change": ("optimizer.lr",)}
    settings = (*SETTINGS, "optimizer.lr=0.001")
    given = {**allow, "resume": str(run / "checkpoints" / "step-00000005")}
    assert ranks(1).run(train, tiny_job(dataset, run, *settings, **given)) == [0]
    old = run / "checkpoints" / "superseded-step-00000015"
    job = tiny_job(dataset, run, *SETTINGS, resume=str(old))
    assert ranks(1).run(train_with, job, StopAfter(17))[0][0] == 75
    assert CheckpointDirectory(run).steps() == [5, 17]
    names = {path.name for path in CheckpointDirectory(run).superseded()}
    assert names == {f"superseded-step-000000{end}" for end in ("10", "15", "15-2", "20")}
    assert list(losses(run)) == [1, 2, 3, 4, 5, 16, 17]
    assert ranks(1).run(train, job) == [0]
    assert "it continues from step 17" in log_of(run)


def test_a_start_that_was_killed_while_it_went_back_is_completed(
    ranks: RankGroups, dataset: Path, finished: Path, run: Path
) -> None:
    """To another run: all of its own are superseded, and LATEST was not updated yet."""
    for step in (5, 10, 15, 20):
        path = run / "checkpoints" / f"step-{step:08d}"
        path.rename(path.with_name(f"superseded-{path.name}"))
    assert ranks(1).run(train, tiny_job(dataset, run, *SETTINGS)) == [4]
    assert "has only superseded-* checkpoints" in refusal(run)
    given = {"resume": str(finished / "checkpoints" / "step-00000005")}
    assert ranks(1).run(train, tiny_job(dataset, run, *SETTINGS, **given)) == [0]
    assert list(losses(run)) == list(range(6, 21)), "those before belong to the other run"
    superseded = {path.name for path in CheckpointDirectory(run).superseded()}
    assert "superseded-step-00000005" in superseded
    assert CheckpointDirectory(run).steps() == [10, 15, 20]


def test_a_run_whose_checkpoints_are_gone_does_not_begin_again(
    ranks: RankGroups, dataset: Path, finished: Path, run: Path
) -> None:
    (run / "checkpoints").rename(run / "elsewhere")
    given = {"resume": str(finished / "checkpoints" / "step-00000005")}
    assert ranks(2).run(train, tiny_job(dataset, run, *SETTINGS, **given)) == [4, 4]
    assert ranks(2).run(train, tiny_job(dataset, run, *SETTINGS)) == [4, 4]
    assert "LATEST says that this run has checkpoints, but" in refusal(run)
    assert len(losses(run)) == 20
    (run / "checkpoints").symlink_to("nowhere")  # a volume that is not mounted
    assert ranks(1).run(train, tiny_job(dataset, run, *SETTINGS)) == [4]
    (run / "checkpoints").unlink()
    assert ranks(1).run(train, tiny_job(dataset, run, *SETTINGS, resume="never")) == [0]


def test_a_setting_that_came_after_the_checkpoint_counts_as_its_default(
    ranks: RankGroups, dataset: Path, run: Path
) -> None:
    from txl_dist.checkpoint.manifest import load_checkpoint_manifest
    from txl_dist.config.config_file import flatten_config
    from txl_dist.training.compatibility import check_config

    old = load_checkpoint_manifest(run / "checkpoints" / "step-00000020").run
    older = {key: value for key, value in old.items() if key != "model.pre_lnorm"}
    new = flatten_config(tiny_job(dataset, run, *SETTINGS).config)
    check_config(older, new, allowed=(), checkpoint="here")
    with pytest.raises(CheckpointError, match="pre_lnorm: checkpoint False, now True"):
        check_config(older, {**new, "model.pre_lnorm": True}, allowed=(), checkpoint="here")


@pytest.mark.fault_row(34)
def test_the_newest_checkpoint_is_that_of_the_highest_step_not_of_the_latest_date(
    ranks: RankGroups, dataset: Path, tmp_path: Path
) -> None:
    constant = (NO_EVALUATION, "optimizer.schedule=constant")
    assert ranks(1).run(train, tiny_job(dataset, tmp_path, *constant)) == [0]
    checkpoints = sorted((tmp_path / "checkpoints").iterdir())
    for age, path in enumerate(checkpoints):
        for file in (path, *path.iterdir()):
            os.utime(file, (10**9 - age * 10**6,) * 2)
    job = tiny_job(
        dataset,
        tmp_path,
        *constant,
        "training.num_steps=21",
        allow_change=("training.num_steps",),
    )
    assert ranks(1).run(train, job) == [0]
    assert "resuming at step 20" in (tmp_path / "logs" / "rank-0.log").read_text()
