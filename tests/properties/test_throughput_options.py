"""Promise 3 for the options that change speed or memory: the same trajectory with and without."""

from pathlib import Path

import pytest

from tests.support.gloo_ranks import RankGroups
from tests.support.training_runs import (
    DROPOUT,
    NO_EVALUATION,
    ZERO,
    losses,
    norms,
    tiny_spec,
    train,
)

# As in test_one_trajectory.py, which has the measured differences.
TOLERANCE = 2e-6
NORM_TOLERANCE = 1e-5
# bf16 rounds a hidden state by up to 0.2 %. Measured over these seven steps, in which the weights
# are still small: 3.8e-7; 4.4e-8 after the first step that has a memory.
ROUNDING_TOLERANCE = 1e-5
SHORT = (NO_EVALUATION, *DROPOUT, "training.num_steps=7", "optimizer.warmup_steps=2")
RECOMPUTE = "training.activation_checkpointing=true"
BF16_MEMORY = "training.memory_dtype=bf16"


def trained(
    ranks: RankGroups, dataset: Path, run: Path, *overrides: str, num_ranks: int = 1
) -> Path:
    spec = tiny_spec(dataset, run, *SHORT, *overrides)
    assert ranks(num_ranks).run(train, spec) == [0] * num_ranks
    return run


@pytest.fixture(scope="module")
def straight(ranks: RankGroups, dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One rank, stage 0, one micro-batch, no options."""
    return trained(ranks, dataset, tmp_path_factory.mktemp("straight"), *ZERO["0"])


@pytest.mark.parametrize(
    ("num_ranks", "stage"),
    [
        pytest.param(num_ranks, stage, marks=[] if stage == quick else pytest.mark.slow)
        for num_ranks, quick in ((1, "0"), (2, "3-all-spread"))
        for stage in ZERO
    ],
)
def test_activation_checkpointing_changes_no_bit(
    ranks: RankGroups, dataset: Path, straight: Path, tmp_path: Path, num_ranks: int, stage: str
) -> None:
    """Also at stage 3, where the recomputation gathers the weights again."""
    run = trained(ranks, dataset, tmp_path / "run", RECOMPUTE, *ZERO[stage], num_ranks=num_ranks)
    plain = straight
    if (num_ranks, stage) != (1, "0"):
        plain = trained(ranks, dataset, tmp_path / "plain", *ZERO[stage], num_ranks=num_ranks)
    assert losses(run) == losses(plain)
    assert norms(run) == norms(plain)


@pytest.fixture(scope="module")
def rounded(ranks: RankGroups, dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As `straight`, with the memory in bf16."""
    run = tmp_path_factory.mktemp("rounded")
    settings = (BF16_MEMORY, *ZERO["0"], "training.checkpoint_interval_steps=3")
    return trained(ranks, dataset, run, *settings, "training.keep_checkpoints=9")


def test_a_memory_in_bf16_changes_losses_by_its_rounding(straight: Path, rounded: Path) -> None:
    assert losses(rounded)[1] == losses(straight)[1], "the first segment has no memory"
    assert losses(rounded) == pytest.approx(losses(straight), rel=ROUNDING_TOLERANCE)
    assert losses(rounded)[7] != pytest.approx(losses(straight)[7], rel=1e-8), "it is not bf16"


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["0", "1", "3-all-spread"])
def test_a_memory_in_bf16_has_one_trajectory(
    ranks: RankGroups, dataset: Path, rounded: Path, tmp_path: Path, stage: str
) -> None:
    settings = (BF16_MEMORY, *ZERO[stage], "training.micro_batch_lanes=2")
    run = trained(ranks, dataset, tmp_path, *settings, num_ranks=2)
    assert losses(run) == pytest.approx(losses(rounded), rel=TOLERANCE)
    assert norms(run) == pytest.approx(norms(rounded), rel=NORM_TOLERANCE)


def test_a_resume_restores_a_memory_in_bf16_bit_for_bit(
    ranks: RankGroups, dataset: Path, rounded: Path, tmp_path: Path
) -> None:
    spec = tiny_spec(
        dataset, tmp_path, *SHORT, BF16_MEMORY, *ZERO["0"],
        resume=str(rounded / "checkpoints" / "step-00000003"),
    )  # fmt: skip
    assert ranks(1).run(train, spec) == [0]
    assert losses(tmp_path) == {step: loss for step, loss in losses(rounded).items() if step > 3}


@pytest.mark.parametrize(
    ("num_ranks", "stage", "offload"),
    [
        pytest.param(
            *case, marks=[] if case == (1, "3-all-spread", "parameters") else pytest.mark.slow
        )
        for case in (
            *((n, stage, "optimizer") for n in (1, 2) for stage in ZERO if stage != "0"),
            *((n, stage, "parameters") for n in (1, 2) for stage in ("3", "3-all-spread")),
        )
    ],
)
def test_offload_changes_only_where_tensors_are(
    ranks: RankGroups, dataset: Path, straight: Path, tmp_path: Path,
    num_ranks: int, stage: str, offload: str,
) -> None:  # fmt: skip
    """And a resume is bit for bit: the checkpoint is loaded into the tensors that are used."""
    settings = (*ZERO[stage], f"deepspeed.offload={offload}", "training.micro_batch_lanes=2")
    often = ("training.checkpoint_interval_steps=3", "training.keep_checkpoints=9")
    run = trained(ranks, dataset, tmp_path / "run", *settings, *often, num_ranks=num_ranks)
    assert losses(run) == pytest.approx(losses(straight), rel=TOLERANCE)
    assert norms(run) == pytest.approx(norms(straight), rel=NORM_TOLERANCE)

    checkpoint = str(run / "checkpoints" / "step-00000003")
    spec = tiny_spec(dataset, tmp_path / "resumed", *SHORT, *settings, resume=checkpoint)
    assert ranks(num_ranks).run(train, spec) == [0] * num_ranks
    expected = {step: loss for step, loss in losses(run).items() if step > 3}
    assert losses(tmp_path / "resumed") == expected
