"""bf16 in matrix products only, and `training.deterministic`."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from tests.support.gloo_ranks import RankGroups
from tests.support.small_models import MODERN, VOCAB_SIZE, random_text, small_model
from tests.support.training_runs import (
    DROPOUT,
    NO_EVALUATION,
    ZERO,
    TinyRuns,
    losses,
    opened_trainer,
    tiny_spec,
    trained,
)
from txl_dist.cli.app import app
from txl_dist.config.config_file import default_settings
from txl_dist.config.run_config import Precision
from txl_dist.errors import CheckpointError, ConfigError
from txl_dist.generation.generate import generate_tokens
from txl_dist.generation.text import Sampling
from txl_dist.model.memory.recurrent import RecurrentMemory
from txl_dist.model.transformer_xl import TransformerXL
from txl_dist.runtime import device
from txl_dist.runtime.device import ENVIRONMENT, autocast, deterministic
from txl_dist.runtime.world import World
from txl_dist.training.compatibility import check_config
from txl_dist.training.spec import TrainSpec

CPU = torch.device("cpu")
BF16 = "precision=bf16"
MODELS: dict[str, dict[str, Any]] = {
    "plain": {},
    "pre-norm": {"pre_lnorm": True},
    "projected": {"d_embed": 4},
    "clusters": {"cutoffs": (4, 8), "div_val": 2},
    **MODERN,
    "untied clusters": {"cutoffs": (4, 8), "tie_weight": False, "untie_r": True},
}
# bf16 has 8 significant bits, so its rounding error is at most 2**-9 = 0.2 %. These models have
# large weights, and several errors add up in the loss of one token: 3.5 % at most, with clusters.
NATS_TOLERANCE = 0.05
# The mean over a step is closer. Measured over twenty steps: 3.2e-4 between bf16 and fp32,
# and 3.7e-4 between one rank and two in bf16: each rank's gradient of a weight is rounded to bf16.
LOSS_TOLERANCE = 2e-3


def score(model: TransformerXL, precision: Precision) -> tuple[Tensor, RecurrentMemory]:
    text_BN = random_text(2, 7, seed=1)
    age_BT = torch.arange(6).expand(2, 6)
    with autocast(precision, CPU):
        return model(text_BN[:, :-1], text_BN[:, 1:], age_BT, model.empty_memory(2))


@pytest.mark.parametrize("options", MODELS.values(), ids=MODELS)
def test_only_matrix_products_are_bf16_and_nats_are_close_to_those_of_fp32(
    options: dict[str, Any],
) -> None:
    model = small_model(**options).float()
    exact_BT, _ = score(model, "fp32")
    nats_BT, memory = score(model, "bf16")
    torch.testing.assert_close(nats_BT, exact_BT, rtol=NATS_TOLERANCE, atol=0)
    assert not torch.equal(nats_BT, exact_BT)
    assert nats_BT.dtype == torch.float32
    assert {layer.dtype for layer in memory.layers} == {torch.float32}
    nats_BT.sum().backward()
    assert {p.grad.dtype for p in model.parameters() if p.grad is not None} == {torch.float32}
    assert {p.dtype for p in model.parameters()} == {torch.float32}


@pytest.mark.parametrize("options", MODELS.values(), ids=MODELS)
def test_sums_over_the_vocabulary_are_fp32(options: dict[str, Any]) -> None:
    """bf16 rounds a logarithm of 7 by up to 0.016."""
    model = small_model(**options, vocab_size=700).float()
    hidden_BTD, target_BT = 3 * torch.randn(2, 50, 6), torch.randint(700, (2, 50))
    with autocast("bf16", CPU):
        nats_BT = model.softmax(hidden_BTD, target_BT, model.table)
        logits_BTV = model.logits(hidden_BTD).double()
    log_probability_BTV = logits_BTV.log_softmax(dim=-1)
    if model.config.cutoffs:  # then these are log-probabilities already
        torch.testing.assert_close(log_probability_BTV, logits_BTV, rtol=0, atol=1e-5)
    expected_BT = -log_probability_BTV.gather(-1, target_BT[..., None]).squeeze(-1)
    torch.testing.assert_close(nats_BT.double(), expected_BT, rtol=1e-5, atol=1e-5)


@pytest.fixture(scope="module")
def run(ranks: RankGroups, dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twenty steps in bf16 on one rank."""
    run = tmp_path_factory.mktemp("bf16")
    settings = (BF16, NO_EVALUATION, *DROPOUT, "training.keep_checkpoints=9")
    trained(ranks, dataset, run, *settings, *ZERO["0"], num_ranks=1)
    return run


def test_losses_in_bf16_are_close_to_those_in_fp32(tiny: TinyRuns, run: Path) -> None:
    settings = (NO_EVALUATION, *DROPOUT, *ZERO["0"])
    tiny.trained(tiny.path, *settings, num_ranks=1)
    assert losses(run) == pytest.approx(losses(tiny.path), rel=LOSS_TOLERANCE)
    assert losses(run) != pytest.approx(losses(tiny.path), rel=1e-6), "nothing was bf16"


@pytest.mark.parametrize(
    "stage",
    [
        pytest.param(stage, marks=[] if stage == "3-all-spread" else pytest.mark.slow)
        for stage in ZERO
    ],
)
def test_two_ranks_at_any_stage_have_close_losses_and_resume_bit_for_bit(
    tiny: TinyRuns, run: Path, stage: str
) -> None:
    settings = (BF16, NO_EVALUATION, *DROPOUT, *ZERO[stage], "training.micro_batch_lanes=2")
    tiny.trained("whole", *settings, "training.keep_checkpoints=9")
    assert losses(tiny.path / "whole") == pytest.approx(losses(run), rel=LOSS_TOLERANCE)
    checkpoint = str(tiny.path / "whole" / "checkpoints" / "step-00000006")
    tiny.trained("resumed", *settings, resume=checkpoint)
    expected = {step: loss for step, loss in losses(tiny.path / "whole").items() if step > 6}
    assert losses(tiny.path / "resumed") == expected


def forward_both_ways(world: World, spec: TrainSpec) -> tuple[Tensor, Tensor, Tensor]:
    """Nats of the first batch: from the engine, under `runtime.device.autocast`, in fp32."""
    with opened_trainer(world, spec) as trainer:
        engine, batch = trainer.step.engine, trainer.batches.read()
        columns = (batch.input, batch.target, batch.age)
        inputs = [torch.from_numpy(column) for column in columns]
        memory = engine.model.empty_memory(len(batch.input))
        from_engine_BT, _ = engine.forward(*inputs, memory, None)
        with autocast("bf16", world.device):
            autocast_BT, _ = engine.model(*inputs, memory, None)
        exact_BT, _ = engine.model(*inputs, memory, None)
    return from_engine_BT.detach(), autocast_BT.detach(), exact_BT.detach()


def test_training_and_evaluation_have_the_same_autocast(tiny: TinyRuns) -> None:
    """DeepSpeed applies its own autocast, and disables one around its engine."""
    spec = tiny.spec(tiny.path, NO_EVALUATION, BF16)
    [(from_engine_BT, autocast_BT, exact_BT)] = tiny.ranks(1).run(forward_both_ways, spec)
    assert torch.equal(from_engine_BT, autocast_BT)
    assert not torch.equal(from_engine_BT, exact_BT)


def test_a_score_is_fp32_by_default_and_records_its_precision(dataset: Path, run: Path) -> None:
    scored = []
    for options in ((), ("--precision", "fp32"), ("--precision", "bf16")):
        command = ["eval", str(run), str(dataset), "--tgt-len", "64", "--json", *options]
        scored.append(json.loads(CliRunner().invoke(app, command).stdout))
    plain, fp32, bf16 = scored
    assert plain == fp32
    assert (fp32["precision"], bf16["precision"]) == ("fp32", "bf16")
    assert bf16["nats"] == pytest.approx(fp32["nats"], rel=LOSS_TOLERANCE)
    assert bf16["nats"] != fp32["nats"]


def test_generation_runs_in_bf16_too() -> None:
    model = small_model().float()
    sampling = Sampling(temperature=0)
    tokens = generate_tokens(model, [1, 2], tgt_len=3, sampling=sampling, seed=0, precision="bf16")
    assert all(0 <= next(tokens) < VOCAB_SIZE for _ in range(5))


@pytest.mark.fault_row(30)
def test_fp16_is_refused_with_what_to_write_instead(dataset: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"precision: 'fp16' is not supported.* bf16.* or fp32"):
        tiny_spec(dataset, tmp_path, "precision=fp16")
    with pytest.raises(ConfigError, match=r"precision is \"int8\".*'fp32' or 'bf16'"):
        tiny_spec(dataset, tmp_path, "precision=int8")


def test_another_precision_on_resume_must_be_allowed() -> None:
    """It changes the trajectory, but the checkpoint stays valid."""
    old, new = default_settings(), default_settings() | {"precision": "bf16"}
    with pytest.raises(CheckpointError, match="--allow-change precision"):
        check_config(old, new, allowed=(), checkpoint="here")
    check_config(old, new, allowed=("precision",), checkpoint="here")


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ENVIRONMENT:
        monkeypatch.setenv(name, "")  # registered, so that it is restored
        monkeypatch.delenv(name)


def test_only_reproducible_operations_are_allowed_inside() -> None:
    with deterministic(enabled=True):
        assert torch.are_deterministic_algorithms_enabled()
        assert not torch.is_deterministic_algorithms_warn_only_enabled()
        assert {name: os.environ.get(name) for name in ENVIRONMENT} == ENVIRONMENT
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.utils.deterministic.fill_uninitialized_memory  # torch's default


def test_disabled_it_changes_nothing_and_a_value_of_the_environment_stays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("NCCL_ALGO", "Tree")
    with deterministic(enabled=True):
        assert os.environ["NCCL_ALGO"] == "Tree"
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    with deterministic(enabled=False):
        assert not torch.are_deterministic_algorithms_enabled()
        assert "CUBLAS_WORKSPACE_CONFIG" not in os.environ


# --- the measured speed ---------------------------------------------------------------------------


def test_a_measurement_takes_no_random_number_of_the_run() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    assert device.product_flops(64, torch.float32, torch.device("cpu"), seconds=0.01) > 1e6
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize(
    ("flops", "sizes"), [(1e6, [256]), (3e9, [256, 1024]), (1e12, [256, 1024, 2048])]
)
def test_a_product_that_would_take_more_than_a_second_is_not_computed(
    monkeypatch: pytest.MonkeyPatch, flops: float, sizes: list[int]
) -> None:
    computed = []

    def product(size: int, *_: object, seconds: float) -> float:
        computed.append(size)
        return flops

    monkeypatch.setattr(device, "product_flops", product)
    assert device.device_peak_flops(torch.device("cpu"), torch.bfloat16) == flops
    assert computed == sizes
