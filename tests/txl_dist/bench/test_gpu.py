"""`txl bench gpu` at a small size on the CPU: its figures belong together. Speed is not checked."""

import json
import subprocess
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.support.commands import run_txl
from tests.support.gloo_ranks import RankGroups
from tests.support.training_runs import TINY
from txl_dist.bench import gpu
from txl_dist.bench.gpu import (
    BenchModel,
    GpuRow,
    Settings,
    TrainingStep,
    bench_gpu,
    data_sheet_flops,
    implementations_for,
    load_model,
)
from txl_dist.cli import bench as command
from txl_dist.config.config_file import load_run_config
from txl_dist.model.choices import ATTENTION_IMPLEMENTATIONS
from txl_dist.model.config import ModelConfig
from txl_dist.model.flops import training_flops
from txl_dist.runtime.world import World

SMALL = BenchModel(
    config=ModelConfig(
        vocab_size=40, cutoffs=(10,), n_layer=1, d_model=8, n_head=2, d_head=4, d_inner=16,
        mem_len=5, dropout=0.1,
    ),
    tgt_len=3,
    num_lanes=2,
    mfu_goal=0.25,
)  # fmt: skip
SETTINGS = Settings(device=torch.device("cpu"), precision="fp32", rounds=2, data_sheet_flops=2e12)


@pytest.fixture(autouse=True)
def few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("STEPS_PER_ROUND", "WARM_UP_STEPS"):
        monkeypatch.setattr(gpu, name, 1)
    monkeypatch.setattr(gpu, "SIZES", {"cpu": (16,)})
    monkeypatch.setattr(gpu, "SECONDS_PER_SIZE", 0.0)


@pytest.mark.parametrize(
    ("name", "megaflops"),
    [
        ("nvidia-base", 504), ("wt103-large", 1918),
        ("enwik8-base", 367), ("enwik8-large", 2405), ("modern-125m", 918), ("modern-350m", 2610),
    ],
)  # fmt: skip
def test_operations_per_token(name: str, megaflops: float) -> None:
    """Without tails, which depend on the text."""
    model = load_model(name)
    flops = training_flops(model.config, num_lanes=model.num_lanes, tgt_len=model.tgt_len)
    per_token = flops / model.num_lanes / model.tgt_len / 1e6
    assert per_token == pytest.approx(megaflops, rel=0.1)


def test_a_row_follows_from_the_time_of_a_step() -> None:
    (row,) = bench_gpu({"small": SMALL}, ["cpu"], SETTINGS, peak_flops=1e12)
    assert (row.model, row.attention, row.kernel) == ("small", "cpu", "cpu")
    assert row.step_ms is not None
    assert row.tokens_per_second == pytest.approx(6 / (row.step_ms / 1e3))
    assert row.mfu_measured == pytest.approx(2 * row.mfu_data_sheet)
    step = gpu.TrainingStep(SMALL.config, num_lanes=2, tgt_len=3)
    assert row.mfu_measured == pytest.approx(step.flops / (row.step_ms / 1e3) / 1e12)


def row_with_training(world: World) -> GpuRow:
    model = replace(SMALL, run=load_run_config(TINY, ["data.path=none", "directory=none"]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpu, "STEPS_PER_ROUND", 1)
        (row,) = bench_gpu({"small": model}, ["cpu"], SETTINGS, peak_flops=1e12)
    return row


def test_a_step_of_training_is_measured_too(ranks: RankGroups) -> None:
    """With the engine and the optimizer of the config, in a process that has ranks."""
    (row,) = ranks(1).run(row_with_training)
    assert not row.note
    assert row.training_step_ms > 0
    assert gpu.table_row(row).count("|") == gpu.HEADER.splitlines()[0].count("|")


def test_implementations_that_would_be_replaced_are_left_out() -> None:
    with_dropatt = replace(SMALL, config=replace(SMALL.config, dropatt=0.1))
    everywhere = {
        name for name, attention in ATTENTION_IMPLEMENTATIONS.items() if attention.supports_dropout
    }
    assert set(implementations_for(with_dropatt, [])) == everywhere - {"reference"}
    assert set(implementations_for(SMALL, [])) == {*ATTENTION_IMPLEMENTATIONS} - {"reference"}
    assert implementations_for(SMALL, ["auto"]) == ["auto"]


class Failing:
    """In place of the step: memory for one lane only, or an implementation that cannot run."""

    def __init__(self, error: Exception, *, from_lanes: int) -> None:
        self.error, self.from_lanes = error, from_lanes
        self.original = gpu.TrainingStep

    def __call__(self, config: ModelConfig, *, num_lanes: int, **options: Any) -> TrainingStep:
        if num_lanes >= self.from_lanes:
            raise self.error
        return self.original(config, num_lanes=num_lanes, **options)


def only_row(monkeypatch: pytest.MonkeyPatch, failing: Failing) -> GpuRow:
    monkeypatch.setattr(gpu, "TrainingStep", failing)
    (row,) = bench_gpu({"small": SMALL}, ["cpu"], SETTINGS, peak_flops=1e12)
    return row


def test_too_little_memory_halves_the_lanes(monkeypatch: pytest.MonkeyPatch) -> None:
    row = only_row(monkeypatch, Failing(torch.OutOfMemoryError(), from_lanes=2))
    assert (row.num_lanes, row.note) == (1, "fewer lanes: out of memory")
    assert row.tokens_per_second is not None


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError(),
        NotImplementedError("no kernel"),
        subprocess.CalledProcessError(1, "gcc, no kernel"),
    ],
)
def test_a_form_that_cannot_run_is_a_note(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    row = only_row(monkeypatch, Failing(error, from_lanes=1))
    assert row.step_ms is None
    assert "out of memory" in row.note or "no kernel" in row.note


@pytest.mark.parametrize("as_json", [True, False])
def test_the_table_and_the_json_have_the_figures_of_a_row(
    as_json: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    command.run_gpu({"small": SMALL}, ["cpu"], SETTINGS, as_json=as_json)
    output = capsys.readouterr().out
    if as_json:
        (row,) = json.loads(output)["rows"]
        assert row["model"] == "small"
        assert row["tokens_per_second"] == pytest.approx(6e3 / row["step_ms"])
    else:
        header, _, row = output.splitlines()[-3:]
        assert "tokens/s" in header
        assert row.startswith("| small | cpu")
        assert row.count("|") == header.count("|")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so() -> None:
    exit_code, output = run_txl("bench", "gpu", "--json")
    assert exit_code == 0
    assert "no GPU" in json.loads(output)["skipped"]


def test_an_unknown_model_is_refused_by_name() -> None:
    exit_code, message = run_txl("bench", "gpu", "--models", "wt104")
    assert exit_code == 2
    assert "wt104" in message


def test_the_data_sheet_is_found_by_the_name_of_the_device() -> None:
    assert data_sheet_flops("NVIDIA H100 PCIe") == 756e12
    assert data_sheet_flops("NVIDIA H100 80GB HBM3") == 989e12
    assert data_sheet_flops("NVIDIA A100-SXM4-80GB") == 312e12
    assert data_sheet_flops("NVIDIA L40") == 181e12
    assert data_sheet_flops("NVIDIA L40S") == 362e12
    assert data_sheet_flops("NVIDIA H100 80GB HBM3 MIG 1g.10gb") is None
    assert data_sheet_flops("unknown") is None
    assert all(value > 0 for value in gpu.DATA_SHEET_TFLOPS.values())
