"""Ranks that read other data or run other code are refused before they train."""

import os
from pathlib import Path

import pytest

from data_pipeline.preparation.prepare import prepare_dataset
from data_pipeline.shards.manifest import PrepareSettings
from tests.support.gloo_ranks import RankGroups
from tests.support.training_runs import NO_EVALUATION, refusal, tiny_spec, train
from txl_dist.checkpoint.manifest import load_checkpoint_manifest
from txl_dist.runtime.world import World
from txl_dist.training import resume
from txl_dist.training import spec as train_spec
from txl_dist.training.spec import TrainSpec

SHORT = (NO_EVALUATION, "training.num_steps=5", "optimizer.warmup_steps=2")


@pytest.fixture(scope="module")
def two_hosts(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two folders, each with a dataset `data` of the same size, settings and name."""
    folders = []
    for letter in ("a", "b"):
        folder = tmp_path_factory.mktemp(f"host-{letter}")
        (folder / "text.txt").write_text(letter * 4000)
        prepare_dataset([folder / "text.txt"], folder / "data", PrepareSettings())
        folders.append(folder)
    return folders


def train_in(world: World, folders: list[Path], spec: TrainSpec) -> int:
    """Train in this rank's own folder."""
    before = Path.cwd()
    os.chdir(folders[world.rank])
    try:
        return train(world, spec)
    finally:
        os.chdir(before)


def train_on_other_sources(world: World, spec: TrainSpec) -> int:
    """Train with the digest of edited sources on rank 1."""
    original = train_spec.source_digest
    if world.rank == 1:
        train_spec.source_digest = lambda: "edited" + original()  # type: ignore[assignment]
    try:
        return train(world, spec)
    finally:
        train_spec.source_digest = original


def resume_on_other_sources(world: World, spec: TrainSpec) -> int:
    """Train with a code description that differs from that of the checkpoint."""
    original = resume.code_description
    resume.code_description = lambda: "txl-dist 9 (sources edited)"  # type: ignore[assignment]
    try:
        return train(world, spec)
    finally:
        resume.code_description = original


@pytest.mark.fault_row(38)
def test_other_data_under_the_same_path_is_refused_by_rank(
    ranks: RankGroups, two_hosts: list[Path], tmp_path: Path
) -> None:
    spec = tiny_spec(Path("data"), tmp_path, *SHORT)
    assert ranks(2).run(train_in, two_hosts, spec) == [2, 2]
    message = refusal(tmp_path)
    assert "data data: rank 0 " in message
    assert ", rank 1 " in message
    assert "sources" not in message  # names what differs, and nothing else
    assert not (tmp_path / "metrics.jsonl").exists()

    same = [two_hosts[0], two_hosts[0]]
    assert ranks(2).run(train_in, same, tiny_spec(Path("data"), tmp_path, *SHORT)) == [0, 0]


def train_with_own_seed(world: World, spec: TrainSpec, directory: Path) -> int:
    """Train with another seed on each rank."""
    seed = f"seed={world.rank}"
    return train(world, tiny_spec(Path(spec.config.data.path), directory, *SHORT, seed))


@pytest.mark.fault_row(38)
def test_another_config_on_one_rank_is_refused(
    ranks: RankGroups, dataset: Path, tmp_path: Path
) -> None:
    spec = tiny_spec(dataset, tmp_path, *SHORT)
    assert ranks(2).run(train_with_own_seed, spec, tmp_path) == [2, 2]
    message = refusal(tmp_path)
    assert "  config: rank 0 " in message
    assert "sources" not in message
    assert "same command" in message


@pytest.mark.fault_row(38)
def test_other_sources_on_one_rank_are_refused(
    ranks: RankGroups, dataset: Path, tmp_path: Path
) -> None:
    spec = tiny_spec(dataset, tmp_path, *SHORT)
    assert ranks(2).run(train_on_other_sources, spec) == [2, 2]
    assert "sources: rank 0 " in refusal(tmp_path)
    assert "rank 1 edited" in refusal(tmp_path)


def test_a_resume_on_other_sources_is_logged(
    ranks: RankGroups, dataset: Path, tmp_path: Path
) -> None:
    assert ranks(1).run(train, tiny_spec(dataset, tmp_path, *SHORT)) == [0]
    manifest = load_checkpoint_manifest(tmp_path / "checkpoints" / "step-00000005")
    assert "(sources " in manifest.written_by

    spec = tiny_spec(
        dataset, tmp_path, *SHORT, "training.num_steps=6", allow_change=("training.num_steps",)
    )
    assert ranks(1).run(resume_on_other_sources, spec) == [0]
    log = (tmp_path / "logs" / "rank-0.log").read_text()
    assert f"was written by {manifest.written_by}, this is txl-dist 9 (sources edited)" in log
