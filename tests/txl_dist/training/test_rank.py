"""A rank with a jumping clock or a full log trains; one with other data or code is refused.

A run directory contains no secrets.
"""

import logging
import time
from collections.abc import Callable
from contextlib import chdir
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.gloo_ranks import RankGroups
from tests.support.prepared import prepared
from tests.support.training_runs import (
    NO_EVALUATION,
    TinyRuns,
    losses,
    metrics,
    refusal,
    tiny_spec,
    train,
)
from txl_dist.checkpoint.manifest import load_checkpoint_manifest
from txl_dist.errors import ConfigError
from txl_dist.runtime.world import World
from txl_dist.training import resume, start
from txl_dist.training.rank import _logging_to, _require_attention
from txl_dist.training.spec import TrainSpec
from txl_dist.training.step import TrainStep


def train_while_the_clock_runs_backwards(world: World, spec: TrainSpec) -> int:
    with pytest.MonkeyPatch.context() as patch:
        clock = iter(range(2_000_000_000, 0, -3600))
        patch.setattr(time, "time", lambda: float(next(clock)))
        return train(world, spec)


@pytest.mark.fault_row(34)
def test_a_clock_that_jumps_back_changes_no_duration_and_no_order(
    tiny: TinyRuns, straight: Callable[..., Path]
) -> None:
    spec = tiny.spec(tiny.path, NO_EVALUATION)
    assert tiny.ranks(1).run(train_while_the_clock_runs_backwards, spec) == [0]
    assert losses(tiny.path) == losses(straight(NO_EVALUATION, num_ranks=1))
    lines = metrics(tiny.path)
    assert [line["step"] for line in lines] == list(range(1, 21))
    assert all(line["time"] > later["time"] for line, later in pairwise(lines))
    assert all(line["tokens_per_second"] > 0 and 0 <= line["data_wait"] <= 1 for line in lines)


def train_without_memory(world: World, spec: TrainSpec) -> int:
    def compute(*_: Any, **__: Any) -> None:
        torch.empty(2**60)  # raises the error of the allocator

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TrainStep, "compute", compute)
        return train(world, spec)


def test_too_little_memory_for_a_step_names_the_setting(tiny: TinyRuns) -> None:
    spec = tiny.spec(tiny.path, NO_EVALUATION)
    assert tiny.ranks(1).run(train_without_memory, spec) == [1]
    message = refusal(tiny.path)
    for text in ("Lower training.micro_batch_lanes", "txl estimate", "DefaultCPUAllocator"):
        assert text in message
    assert "Traceback" not in message


@pytest.mark.fault_row(42)
def test_a_log_on_a_full_disk_does_not_stop_training(
    tiny: TinyRuns, straight: Callable[..., Path]
) -> None:
    (tiny.path / "logs").mkdir()
    (tiny.path / "logs" / "rank-0.log").symlink_to("/dev/full")
    tiny.trained(tiny.path, NO_EVALUATION, num_ranks=1)
    assert losses(tiny.path) == losses(straight(NO_EVALUATION, num_ranks=1))


def test_a_log_has_names_that_are_not_utf8(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, log = tmp_path / "rank-0.log", logging.getLogger("txl_dist")
    # Workers of xdist cannot send a captured log with such a name.
    monkeypatch.setattr(log, "propagate", False)
    with _logging_to(path):
        log.info("checkpoint of runs/b\udcfccher → %s", "日本")
    assert path.read_text("utf-8").endswith(" checkpoint of runs/b\\udcfccher → 日本\n")


@pytest.mark.fault_row(44)
def test_no_secret_of_a_config_is_written_to_the_run_directory(tiny: TinyRuns) -> None:
    """The resolved config, the manifests of checkpoints and the logs do not contain it."""
    secrets = ("tracking.uri=http://me:CANARY@127.0.0.1:1?token=CANARY", "training.num_steps=6")
    tiny.trained(tiny.path, NO_EVALUATION, *secrets, num_ranks=1)
    files = [path for path in tiny.path.rglob("*") if path.is_file()]
    assert {"config.yaml", "manifest.json", "rank-0.log"} <= {path.name for path in files}
    assert [path for path in files if b"CANARY" in path.read_bytes()] == []


def test_attention_that_cannot_run_is_refused_with_what_to_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cpu = torch.device("cpu")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    _require_attention("triton", cpu)
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    for name in ("auto", "sdpa"):
        _require_attention(name, cpu)
    with pytest.raises(ConfigError, match=r"attention=triton .* no GPU\. Set model.attention=auto"):
        _require_attention("triton", cpu)
    monkeypatch.setattr("txl_dist.model.devices.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="package triton is not installed"):
        _require_attention("triton", cpu)
    with pytest.raises(ConfigError, match=r"GPUs need triton, and .* CUDA_VISIBLE_DEVICES="):
        _require_attention("auto", torch.device("cuda"))


@pytest.mark.parametrize("name", ["sdpa", "cpu"])
def test_attention_for_cpus_is_refused_on_gpus(name: str) -> None:
    with pytest.raises(ConfigError, match=f"attention={name} runs on CPUs only"):
        _require_attention(name, torch.device("cuda"))


# --- ranks that differ ----------------------------------------------------------------------------


SHORT = (NO_EVALUATION, "training.num_steps=5", "optimizer.warmup_steps=2")


@pytest.fixture(scope="module")
def two_hosts(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two folders, each with a dataset `data` of the same size, settings and name."""
    folders = [tmp_path_factory.mktemp("host") for _ in range(2)]
    for letter, folder in zip("ab", folders, strict=True):
        prepared(folder / "data", letter * 4000)
    return folders


def train_in(world: World, folders: list[Path], spec: TrainSpec) -> int:
    """Train in this rank's own folder."""
    with chdir(folders[world.rank]):
        return train(world, spec)


def train_on_other_sources(world: World, spec: TrainSpec) -> int:
    """Train with another digest of the sources on the last rank, and another description."""
    with pytest.MonkeyPatch.context() as patch:
        if world.rank == 1:
            patch.setattr(start, "source_digest", lambda: "edited")
        patch.setattr(resume, "code_description", lambda: "txl-dist 9 (sources edited)")
        return train(world, spec)


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
def test_another_config_on_one_rank_is_refused(tiny: TinyRuns) -> None:
    spec = tiny.spec(tiny.path, *SHORT)
    assert tiny.ranks(2).run(train_with_own_seed, spec, tiny.path) == [2, 2]
    message = refusal(tiny.path)
    assert "  config: rank 0 " in message
    assert "sources" not in message
    assert "same command" in message


@pytest.mark.fault_row(38)
def test_other_sources_on_one_rank_are_refused(tiny: TinyRuns) -> None:
    spec = tiny.spec(tiny.path, *SHORT)
    assert tiny.ranks(2).run(train_on_other_sources, spec) == [2, 2]
    assert "sources: rank 0 " in refusal(tiny.path)
    assert "rank 1 edited" in refusal(tiny.path)


def test_a_resume_on_other_sources_is_logged(tiny: TinyRuns) -> None:
    tiny.trained(tiny.path, *SHORT, num_ranks=1)
    manifest = load_checkpoint_manifest(tiny.path / "checkpoints" / "step-00000005")
    assert "(sources " in manifest.written_by

    spec = tiny.spec(
        tiny.path, *SHORT, "training.num_steps=6", allow_change=("training.num_steps",)
    )
    assert tiny.ranks(1).run(train_on_other_sources, spec) == [0]
    log = (tiny.path / "logs" / "rank-0.log").read_text()
    assert f"was written by {manifest.written_by}, this is txl-dist 9 (sources edited)" in log
