"""On GPUs: one trajectory over ZeRO stages, kills, exact evaluation, and repeated weights."""

import hashlib
import json
import shutil
from pathlib import Path

import pytest

from tests.faults.test_kill_and_resume import SETTINGS, kill_and_resume
from tests.gpu import num_devices
from tests.support.commands import txl
from tests.support.gloo_ranks import RankGroups
from tests.support.training_runs import (
    DROPOUT,
    NO_EVALUATION,
    ZERO,
    TinyRuns,
    losses,
    tiny_spec,
    train_words,
    trained,
)
from txl_dist.checkpoint.directory import CheckpointDirectory
from txl_dist.checkpoint.tensors import load_model
from txl_dist.model.transformer_xl import TransformerXL

pytestmark = pytest.mark.gpu

SHARDED = "deepspeed.extra={zero_optimization: {reduce_bucket_size: 25000000}}"
"""Without an option of their own, one GPU computes stages 1 and 2 as stage 0."""
TOLERANCE = 1e-4
"""Of losses over 20 steps in fp32: products on a GPU are summed in another order than on a CPU."""
MOST_DIFFERENCE = 0.05
"""Of the weights after 20 steps, relative to their change: AdamW gives small gradients, of which
the rounding is a large part, steps as large as to others. Of frozen weights it would be 1."""


@pytest.fixture(scope="module")
def straight(ranks: RankGroups, dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One GPU, stage 0, one micro-batch."""
    run = tmp_path_factory.mktemp("straight")
    return trained(ranks, dataset, run, NO_EVALUATION, *DROPOUT, *ZERO["0"], num_ranks=1)


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("stage", ZERO)
def test_losses_do_not_depend_on_ranks_stage_or_micro_batch(
    tiny: TinyRuns, straight: Path, num_ranks: int, stage: str
) -> None:
    if num_ranks > num_devices():
        pytest.skip(f"{num_ranks} ranks need one GPU each; torch finds {num_devices()}")
    settings = (NO_EVALUATION, *DROPOUT, *ZERO[stage], "training.micro_batch_lanes=2")
    settings += (SHARDED,) if stage in ("1", "2") else ()
    tiny.trained(tiny.path, *settings, num_ranks=num_ranks)
    assert losses(tiny.path) == pytest.approx(losses(straight), rel=TOLERANCE)


@pytest.mark.parametrize("offload", ["optimizer", "parameters"])
def test_offload_has_the_same_losses(tiny: TinyRuns, straight: Path, offload: str) -> None:
    stage = 3 if offload == "parameters" else 2
    settings = (*DROPOUT, f"deepspeed.zero_stage={stage}", f"deepspeed.offload={offload}")
    tiny.trained(tiny.path, NO_EVALUATION, *settings, num_ranks=1)
    assert losses(tiny.path) == pytest.approx(losses(straight), rel=TOLERANCE)


@pytest.mark.parametrize("how", ["without_graphs", "true"])
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_compiled_layers_have_the_same_losses(
    dataset: Path, tmp_path: Path, stage: int, how: str
) -> None:
    """With parameters of odd sizes, which DeepSpeed does not keep at aligned addresses.

    Three micro-batches: each has a memory, and adds to the gradients of the others.
    """
    settings = (
        NO_EVALUATION, *DROPOUT, f"deepspeed.zero_stage={stage}", "training.micro_batch_lanes=2",
        "model.d_model=18", "model.d_inner=30", *((SHARDED,) if stage else ()),
    )  # fmt: skip
    train_command(dataset, tmp_path / "eager", *settings)
    train_command(dataset, tmp_path / "compiled", *settings, f"training.compile={how}")
    expected = pytest.approx(losses(tmp_path / "eager"), rel=TOLERANCE)
    assert losses(tmp_path / "compiled") == expected
    eager, compiled = (weights_at(tmp_path / name, 20) for name in ("eager", "compiled"))
    first = TransformerXL(eager.config, seed=tiny_spec(dataset, tmp_path).config.seed).state_dict()
    for name, weight in eager.state_dict().items():
        change, difference = weight - first[name], compiled.state_dict()[name] - weight
        assert difference.norm() <= MOST_DIFFERENCE * change.norm(), name


def weights_at(run: Path, step: int) -> TransformerXL:
    return load_model(CheckpointDirectory(run).at(step), weights="last")[0]


@pytest.mark.parametrize("order", [((), (SHARDED,)), ((SHARDED,), ())], ids=str)
def test_a_checkpoint_of_stage_1_opens_whether_one_gpu_computes_it_as_stage_0_or_not(
    dataset: Path, tmp_path: Path, order: tuple[tuple[str, ...], tuple[str, ...]]
) -> None:
    settings = (
        NO_EVALUATION, *DROPOUT, "deepspeed.zero_stage=1", "training.checkpoint_interval_steps=10",
    )  # fmt: skip
    train_command(dataset, tmp_path, *settings, *order[0])
    expected = losses(tmp_path)
    shutil.rmtree(tmp_path / "checkpoints" / "step-00000020")
    train_command(dataset, tmp_path, *settings, *order[1])
    assert losses(tmp_path) == pytest.approx(expected, rel=TOLERANCE)


def output_of(*words: object, **environment: str) -> str:
    """The output of a command that must succeed."""
    result = txl(*words, timeout_seconds=300, environment=environment)
    assert result.returncode == 0, result.stderr + result.stdout
    return result.stdout


def train_command(dataset: Path, run: Path, *settings: str, **environment: str) -> None:
    output_of(*train_words(dataset, run, *settings, num_ranks=1), **environment)


def test_losses_are_those_of_a_cpu(dataset: Path, straight: Path, tmp_path: Path) -> None:
    """The same masks on both devices: with others, losses differ in the second digit."""
    settings = (NO_EVALUATION, "deepspeed.zero_stage=0", *DROPOUT)
    train_command(dataset, tmp_path, *settings, CUDA_VISIBLE_DEVICES="")
    assert losses(straight) == pytest.approx(losses(tmp_path), rel=TOLERANCE)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_two_deterministic_runs_have_equal_weights(
    dataset: Path, tmp_path: Path, precision: str
) -> None:
    settings = (
        NO_EVALUATION, "training.deterministic=true", f"precision={precision}",
        "deepspeed.zero_stage=1", *DROPOUT,
    )  # fmt: skip
    hashes = []
    for name in ("first", "second"):
        train_command(dataset, tmp_path / name, *settings)
        files = sorted((tmp_path / name / "checkpoints").glob("step-*/*.safetensors"))
        assert files
        hashes.append([hashlib.sha256(path.read_bytes()).hexdigest() for path in files])
    assert hashes[0] == hashes[1]


def test_losses_after_a_kill_are_those_of_a_run_without(
    dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if num_devices() < 2:
        pytest.skip("the case has two ranks, which need one GPU each")
    train_command(dataset, tmp_path / "straight", *SETTINGS, "training.deterministic=true")
    kill_and_resume(dataset, tmp_path / "killed", victim="rank")
    actual, expected = losses(tmp_path / "killed"), losses(tmp_path / "straight")
    assert actual == pytest.approx(expected, rel=TOLERANCE)


def test_a_resumed_run_continues_bit_for_bit(dataset: Path, tmp_path: Path) -> None:
    """One GPU: the run loses its last checkpoint and continues from the one before.

    In processes of their own: torch reads CUBLAS_WORKSPACE_CONFIG once, at the first product.
    """
    settings = (
        NO_EVALUATION, "training.deterministic=true", "deepspeed.zero_stage=1",
        "training.checkpoint_interval_steps=10", *DROPOUT,
    )  # fmt: skip
    train_command(dataset, tmp_path, *settings)
    expected = losses(tmp_path)
    shutil.rmtree(tmp_path / "checkpoints" / "step-00000020")
    train_command(dataset, tmp_path, *settings)
    assert losses(tmp_path) == expected


def test_an_evaluation_is_the_same_for_any_batch_and_near_that_of_a_cpu(
    straight: Path, dataset: Path
) -> None:
    def nats(*options: object, **environment: str) -> float:
        words = ("eval", straight, dataset, *options, "--json")
        return json.loads(output_of(*words, **environment))["nats"]

    expected = nats("--split", "valid")
    assert nats("--split", "valid", "--batch", 3) == pytest.approx(expected, rel=1e-6)
    assert nats("--split", "valid", CUDA_VISIBLE_DEVICES="") == pytest.approx(expected, rel=1e-5)
