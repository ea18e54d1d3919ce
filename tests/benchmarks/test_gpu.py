"""benchmarks/gpu.py at a small size on the CPU: its figures agree. Speed is not checked."""

import subprocess
import sys
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch

from tests.support.gloo_ranks import RankGroups
from tests.support.training_runs import TINY
from txl_dist.config.config_file import load_run_config
from txl_dist.model.config import ModelConfig
from txl_dist.runtime.world import World

FOLDER = str(TINY.parents[1] / "benchmarks")


def gpu_module(patch: pytest.MonkeyPatch) -> ModuleType:
    """The script, with few steps."""
    patch.syspath_prepend(FOLDER)
    import gpu

    for name in ("STEPS_PER_ROUND", "WARM_UP_STEPS"):
        patch.setattr(gpu, name, 1)
    patch.setattr(gpu, "SIZES", {"cpu": (16,)})
    patch.setattr(gpu, "SECONDS_PER_SIZE", 0.0)
    return gpu


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return gpu_module(monkeypatch)


def small(gpu: ModuleType) -> tuple[Any, Any]:
    """A model, and settings for this CPU."""
    config = ModelConfig(
        vocab_size=40, cutoffs=(10,), n_layer=1, d_model=8, n_head=2, d_head=4, d_inner=16,
        mem_len=5, dropout=0.1,
    )  # fmt: skip
    cpu = torch.device("cpu")
    return (
        gpu.BenchModel(config=config, tgt_len=3, num_lanes=2, mfu_goal=0.25),
        gpu.Settings(device=cpu, precision="fp32", rounds=2, data_sheet_flops=2e12),
    )


def test_every_published_model_is_loaded(gpu: ModuleType) -> None:
    for name, published in gpu.MODELS.items():
        model = gpu.load_model(name)
        assert (model.num_lanes, *published[3:]) == (
            published.num_lanes, model.mfu_goal, model.last_mfu,
        )  # fmt: skip
        assert name.removesuffix(f"-{published.num_lanes}") in gpu.MODELS
        assert model.config.vocab_size == published.vocab_size
        assert model.tgt_len == model.run.data.tgt_len


def row_of_both_steps(world: World) -> tuple[Any, int, str]:
    with pytest.MonkeyPatch.context() as patch:
        gpu = gpu_module(patch)
        model, settings = small(gpu)
        model = replace(model, run=load_run_config(TINY, ["data.path=none", "directory=none"]))
        row = gpu.measured_row("small", model, "cpu", settings, 1e12)
        flops = gpu.TrainingStep(model.config, num_lanes=2, tgt_len=3).flops
        return {name: getattr(row, name) for name in row.__slots__}, flops, gpu.table_row(row)


def test_a_row_follows_from_the_time_of_a_step(ranks: RankGroups, gpu: ModuleType) -> None:
    """Also that of a step of training, with the engine and the optimizer of the config."""
    ((row, flops, line),) = ranks(1).run(row_of_both_steps)
    assert (row["model"], row["attention"], row["kernel"], row["note"]) == (
        "small",
        "cpu",
        "cpu",
        "",
    )
    assert row["tokens_per_second"] == pytest.approx(6 / (row["step_ms"] / 1e3))
    assert row["mfu_measured"] == pytest.approx(2 * row["mfu_data_sheet"])
    assert row["mfu_measured"] == pytest.approx(flops / (row["step_ms"] / 1e3) / 1e12)
    assert row["training_step_ms"] > 0
    assert line.count("|") == gpu.HEADER.splitlines()[0].count("|")


@pytest.mark.parametrize(
    ("error", "from_lanes", "num_lanes", "note"),
    [
        (torch.OutOfMemoryError(), 2, 1, "fewer lanes: out of memory"),
        (torch.OutOfMemoryError(), 1, 1, "out of memory"),
        (NotImplementedError("no kernel"), 1, 2, "no kernel"),
        (subprocess.CalledProcessError(1, "gcc, no kernel"), 1, 2, "no kernel"),
    ],
)
def test_a_model_that_cannot_run_is_a_note_of_its_row(
    gpu: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    error: Exception, from_lanes: int, num_lanes: int, note: str,
) -> None:  # fmt: skip
    """The other rows follow. Too little memory halves the lanes."""
    step_of = gpu.TrainingStep

    def failing(config: ModelConfig, *, num_lanes: int, **options: Any) -> Any:
        if num_lanes >= from_lanes:
            raise error
        return step_of(config, num_lanes=num_lanes, **options)

    monkeypatch.setattr(gpu, "TrainingStep", failing)
    model, settings = small(gpu)
    gpu.print_rows({"small": model, "other": model}, ["cpu"], settings)
    printed = capsys.readouterr()
    *_, row, other = printed.out.splitlines()
    assert row.startswith(f"| small | cpu | {num_lanes} x 3 |")
    assert other.startswith("| other")
    assert printed.err.startswith("small, cpu: ")
    assert note in printed.err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_and_what_was_measured_last(gpu: ModuleType) -> None:
    command = [sys.executable, f"{FOLDER}/gpu.py"]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "no GPU" in result.stdout
    for name in gpu.MODELS:
        (row,) = (line for line in result.stdout.splitlines() if line.startswith(f"| {name} |"))
        assert "| not measured " in row


def test_no_row_begins_after_the_time_limit(
    gpu: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    model, settings = small(gpu)
    gpu.print_rows({"small": model}, ["cpu"], settings, seconds=-1)
    printed = capsys.readouterr()
    assert printed.out.endswith(f"{gpu.HEADER}\n")
    assert printed.err.startswith("small, cpu: not begun")


def test_the_data_sheet_is_found_by_the_name_of_the_device(gpu: ModuleType) -> None:
    assert gpu.data_sheet_flops("NVIDIA H100 PCIe") == 756e12
    assert gpu.data_sheet_flops("NVIDIA H100 80GB HBM3") == 989e12
    assert gpu.data_sheet_flops("NVIDIA A100-SXM4-80GB") == 312e12
    assert gpu.data_sheet_flops("NVIDIA L40") == 181e12
    assert gpu.data_sheet_flops("NVIDIA L40S") == 362e12
    assert gpu.data_sheet_flops("NVIDIA H100 80GB HBM3 MIG 1g.10gb") is None
    assert gpu.data_sheet_flops("unknown") is None
