"""A clock that jumps and a full log do not change a run; a run directory contains no secrets.

And attention that cannot run is refused before the model is built.
"""

import logging
import time
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from tests.support.gloo_ranks import RankGroups
from tests.support.training_runs import NO_EVALUATION, losses, metrics, tiny_spec, train
from txl_dist.errors import ConfigError
from txl_dist.runtime.world import World
from txl_dist.training.rank import _logging_to, _require_attention
from txl_dist.training.spec import TrainSpec


@pytest.fixture(scope="module")
def undisturbed(ranks: RankGroups, dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("undisturbed")
    assert ranks(1).run(train, tiny_spec(dataset, run, NO_EVALUATION)) == [0]
    return run


def train_while_the_clock_runs_backwards(world: World, spec: TrainSpec) -> int:
    with pytest.MonkeyPatch.context() as patch:
        clock = iter(range(2_000_000_000, 0, -3600))
        patch.setattr(time, "time", lambda: float(next(clock)))
        return train(world, spec)


@pytest.mark.fault_row(34)
def test_a_clock_that_jumps_back_changes_no_duration_and_no_order(
    ranks: RankGroups, dataset: Path, undisturbed: Path, tmp_path: Path
) -> None:
    spec = tiny_spec(dataset, tmp_path, NO_EVALUATION)
    assert ranks(1).run(train_while_the_clock_runs_backwards, spec) == [0]
    assert losses(tmp_path) == losses(undisturbed)
    lines = metrics(tmp_path)
    assert [line["step"] for line in lines] == list(range(1, 21))
    assert all(line["time"] > later["time"] for line, later in pairwise(lines))
    assert all(line["tokens_per_second"] > 0 and 0 <= line["data_wait"] <= 1 for line in lines)


@pytest.mark.fault_row(42)
def test_a_log_on_a_full_disk_does_not_stop_training(
    ranks: RankGroups, dataset: Path, undisturbed: Path, tmp_path: Path
) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "rank-0.log").symlink_to("/dev/full")
    assert ranks(1).run(train, tiny_spec(dataset, tmp_path, NO_EVALUATION)) == [0]
    assert losses(tmp_path) == losses(undisturbed)


def test_a_log_has_names_that_are_not_utf8(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, log = tmp_path / "rank-0.log", logging.getLogger("txl_dist")
    # Workers of xdist cannot send a captured log with such a name.
    monkeypatch.setattr(log, "propagate", False)
    with _logging_to(path):
        log.info("checkpoint of runs/b\udcfccher → %s", "日本")
    assert path.read_text("utf-8").endswith(" checkpoint of runs/b\\udcfccher → 日本\n")


@pytest.mark.fault_row(44)
def test_no_secret_of_a_config_is_written_to_the_run_directory(
    ranks: RankGroups, dataset: Path, tmp_path: Path
) -> None:
    """The resolved config, the manifests of checkpoints and the logs do not contain it."""
    secrets = ("tracking.uri=http://me:CANARY@127.0.0.1:1?token=CANARY", "training.num_steps=6")
    spec = tiny_spec(dataset, tmp_path, NO_EVALUATION, *secrets)
    assert ranks(1).run(train, spec) == [0]
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
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
