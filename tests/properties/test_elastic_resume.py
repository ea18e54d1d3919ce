"""Promise 4: a checkpoint resumes on any number of ranks, any ZeRO stage and micro-batch size."""

from pathlib import Path

import pytest
import torch
from torch.testing import assert_close

from tests.support.gloo_ranks import RankGroups
from tests.support.running_mean import OTHER_KINDS, overrides_of
from tests.support.training_runs import (
    DROPOUT,
    NO_EVALUATION,
    TURNS,
    ZERO,
    losses,
    refusal,
    tiny_spec,
    train,
)
from txl_dist.checkpoint.directory import resolve_checkpoint
from txl_dist.checkpoint.manifest import load_checkpoint_manifest
from txl_dist.checkpoint.reader import load_memory, load_model
from txl_dist.errors import ConfigError

# As in test_one_trajectory.py: another number of ranks sums floats in another order.
TOLERANCE = 2e-6
SETTINGS = (
    NO_EVALUATION,
    *DROPOUT,
    "training.checkpoint_interval_steps=4",
    "optimizer.weight_decay=0.1",  # two groups of parameters
    "optimizer.averaging=asgd",  # one more state of every parameter
)
MUON = ("optimizer.name=muon", "optimizer.lr=0.02", "optimizer.averaging=asgd")
# Newton-Schulz iterations enlarge differences of small singular values up to 500 times.
MUON_TOLERANCE = 2e-5
LEGS = {
    # (ranks, last step, overrides) of each start of the run
    "adamw": [
        (2, 4, ZERO["3-all-spread"]),
        (1, 8, (*ZERO["1"], "training.micro_batch_lanes=2")),
        (2, 12, ZERO["3"]),
        (1, 15, (*ZERO["3-all-spread"], "training.micro_batch_lanes=2")),
        (2, 17, ZERO["2"]),
        (1, 20, (*ZERO["0"], "training.micro_batch_lanes=1")),
    ],
    "muon": [(1, 6, ZERO["0"]), (2, 13, ZERO["2"]), (1, 20, ZERO["1"])],
}


@pytest.mark.fault_row(27)
@pytest.mark.parametrize(
    ("optimizer", "kind"),
    [("adamw", "recurrent"), pytest.param("muon", "recurrent", marks=pytest.mark.slow)],
)
def test_a_run_moved_between_ranks_and_stages_keeps_its_losses(
    ranks: RankGroups, dataset: Path, tmp_path: Path, optimizer: str, kind: str
) -> None:
    moved_run_keeps_its_losses(ranks, dataset, tmp_path, optimizer, kind)


@pytest.mark.parametrize("kind", OTHER_KINDS)
def test_so_does_one_with_any_other_memory(
    ranks: RankGroups, dataset: Path, tmp_path: Path, kind: str
) -> None:
    moved_run_keeps_its_losses(ranks, dataset, tmp_path, "adamw", kind)


def moved_run_keeps_its_losses(
    ranks: RankGroups, dataset: Path, tmp_path: Path, optimizer: str, kind: str
) -> None:
    # Each leg is stopped by num_steps; the schedule must not notice, so it is constant here.
    rule = MUON if optimizer == "muon" else ()
    constant = (*SETTINGS, *rule, "optimizer.schedule=constant", *overrides_of(kind))
    reference = tmp_path / "reference"
    assert ranks(2).run(train, tiny_spec(dataset, reference, *constant)) == [0, 0]

    moved = tmp_path / "moved"
    for num_ranks, num_steps, overrides in LEGS[optimizer]:
        spec = tiny_spec(
            dataset,
            moved,
            *constant,
            f"training.num_steps={num_steps}",
            *overrides,
            allow_change=("training.num_steps",),
        )
        assert ranks(num_ranks).run(train, spec) == [0] * num_ranks

    tolerance = MUON_TOLERANCE if optimizer == "muon" else TOLERANCE
    assert losses(moved) == pytest.approx(losses(reference), rel=tolerance)
    assert len(losses(moved)) == 20
    for weights in ("last", "averaged"):
        models = [load_model(run_end(run), weights=weights)[0] for run in (reference, moved)]
        for first, second in zip(*(model.parameters() for model in models), strict=True):
            torch.testing.assert_close(first, second, rtol=tolerance, atol=50 * tolerance)


def run_end(run: Path) -> Path:
    return run / "checkpoints" / "step-00000020"


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["0", "1", "2"])
def test_a_resume_with_muon_is_bit_for_bit(
    ranks: RankGroups, dataset: Path, tmp_path: Path, stage: str
) -> None:
    resumed_equals_straight(ranks, dataset, tmp_path, (*SETTINGS, *MUON, *ZERO[stage]))


@pytest.mark.slow
@pytest.mark.parametrize(
    "memory",
    [
        ("model.memory=recurrent",),
        ("training.backprop_segments=3",),
        ("model.memory=compressive", "model.compression_rate=3"),
        ("data.piece_len=37",),
    ],
    ids=str,
)
def test_ranks_and_lanes_change_in_one_run(
    ranks: RankGroups, dataset: Path, tmp_path: Path, memory: tuple[str, ...]
) -> None:
    """Ranks 1 -> 2 -> 3 -> 1 and lanes 6 -> 12 in one run; the reference has one rank."""
    settings = (*SETTINGS, "optimizer.schedule=constant", *memory)
    legs = {
        "moved": [
            (1, 6, 4, ZERO["1"]), (2, 6, 6, ZERO["2"]), (2, 12, 8, ZERO["2"]),
            (3, 12, 12, ZERO["3-all-spread"]), (1, 12, 15, ZERO["1"]),
        ],
        "reference": [(1, 6, 6, ZERO["1"]), (1, 12, 15, ZERO["1"])],
    }  # fmt: skip
    for name, moves in legs.items():
        for num_ranks, num_lanes, num_steps, stage in moves:
            steps = f"training.num_steps={num_steps}"
            overrides = (*settings, *stage, f"data.num_lanes={num_lanes}", steps)
            allowed = ("training.num_steps", "data.num_lanes")
            spec = tiny_spec(dataset, tmp_path / name, *overrides, allow_change=allowed)
            assert ranks(num_ranks).run(train, spec) == [0] * num_ranks
    reference, moved = losses(tmp_path / "reference"), losses(tmp_path / "moved")
    largest = max(abs(moved[step] / loss - 1) for step, loss in reference.items())
    print(f"largest relative difference of {len(moved)} losses: {largest:.1e}")
    assert len(moved) == 15
    assert largest < 1e-6
    memories = []
    for name in ("reference", "moved"):
        checkpoint = resolve_checkpoint(tmp_path / name)
        manifest = load_checkpoint_manifest(checkpoint)
        memories.append(load_memory(checkpoint, manifest, range(12)))
    for lane in range(12):
        assert_close(memories[1][lane], memories[0][lane], rtol=0, atol=1e-5)  # by name


@pytest.mark.parametrize(
    "stage",
    [pytest.param(s, marks=[] if s in ("1", "3-all-spread") else pytest.mark.slow) for s in ZERO],
)
def test_a_resume_at_the_same_world_size_is_bit_for_bit(
    ranks: RankGroups, dataset: Path, tmp_path: Path, stage: str
) -> None:
    resumed_equals_straight(ranks, dataset, tmp_path, (*SETTINGS, *ZERO[stage]))


@pytest.mark.parametrize("kind", OTHER_KINDS)
def test_so_it_is_with_any_other_memory(
    ranks: RankGroups, dataset: Path, tmp_path: Path, kind: str
) -> None:
    settings = (*SETTINGS, *ZERO["1"], *overrides_of(kind))
    resumed_equals_straight(ranks, dataset, tmp_path, settings)


def test_so_it_is_with_gradients_through_the_memory(
    ranks: RankGroups, dataset: Path, tmp_path: Path
) -> None:
    settings = (*SETTINGS, *ZERO["1"], "training.backprop_segments=3")
    resumed_equals_straight(ranks, dataset, tmp_path, settings)


def test_so_it_is_in_the_middle_of_turns_and_pieces(
    ranks: RankGroups, dataset: Path, tmp_path: Path
) -> None:
    """After step 8, lanes of two turns of three are a segment ahead of the others."""
    settings = (*SETTINGS, *ZERO["1"], *TURNS, "data.piece_len=37")
    resumed_equals_straight(ranks, dataset, tmp_path, settings)


def test_lanes_with_a_memory_without_limit_cannot_be_given_to_other_lanes(
    ranks: RankGroups, dataset: Path, tmp_path: Path
) -> None:
    """No number of segments would replay it."""
    settings = (*SETTINGS, "model.memory=running_mean", "training.num_steps=4")
    assert ranks(1).run(train, tiny_spec(dataset, tmp_path, *settings)) == [0]
    changed = (*SETTINGS, "model.memory=running_mean", "data.num_lanes=6")
    allowed = ("data.num_lanes", "training.num_steps")
    spec = tiny_spec(dataset, tmp_path, *changed, allow_change=allowed)
    assert ranks(1).run(train, spec) == [ConfigError.exit_code]
    assert "model.memory=running_mean may depend on any earlier token" in refusal(tmp_path)


def resumed_equals_straight(
    ranks: RankGroups, dataset: Path, tmp_path: Path, settings: tuple[str, ...]
) -> None:
    settings = (*settings, "training.keep_checkpoints=9")
    straight, resumed = tmp_path / "straight", tmp_path / "resumed"
    assert ranks(2).run(train, tiny_spec(dataset, straight, *settings)) == [0, 0]

    checkpoint = straight / "checkpoints" / "step-00000008"
    spec = tiny_spec(dataset, resumed, *settings, resume=str(checkpoint))
    assert ranks(2).run(train, spec) == [0, 0]

    expected = {step: loss for step, loss in losses(straight).items() if step > 8}
    assert losses(resumed) == expected
    for weights in ("last", "averaged"):
        models = [load_model(run_end(run), weights=weights)[0] for run in (straight, resumed)]
        for first, second in zip(*(model.parameters() for model in models), strict=True):
            assert torch.equal(first, second)


def test_the_interval_of_step_lines_survives_a_resume(
    ranks: RankGroups, dataset: Path, tmp_path: Path
) -> None:
    """A line over steps 6 to 10 is the same if the run was resumed after step 8."""
    settings = (*SETTINGS, "training.log_interval_steps=5", "training.keep_checkpoints=9")
    straight, resumed = tmp_path / "straight", tmp_path / "resumed"
    assert ranks(1).run(train, tiny_spec(dataset, straight, *settings)) == [0]
    checkpoint = straight / "checkpoints" / "step-00000008"
    spec = tiny_spec(dataset, resumed, *settings, resume=str(checkpoint))
    assert ranks(1).run(train, spec) == [0]

    assert losses(resumed) == {step: losses(straight)[step] for step in (10, 15, 20)}
