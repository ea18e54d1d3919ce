"""Promise 4: a checkpoint resumes on any number of ranks, any ZeRO stage and micro-batch size."""

from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from tests.support.running_mean import OTHER_MEMORIES
from tests.support.training_runs import (
    DROPOUT,
    NO_EVALUATION,
    TURNS,
    ZERO,
    TinyRuns,
    lane_memories,
    losses,
    refusal,
    train,
)
from txl_dist.checkpoint.tensors import load_model
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
    "settings", [(), pytest.param(MUON, id="muon", marks=pytest.mark.slow), *OTHER_MEMORIES[:-1]]
)
def test_a_run_moved_between_ranks_and_stages_keeps_its_losses(
    tiny: TinyRuns, settings: tuple[str, ...]
) -> None:
    # Each leg is stopped by num_steps; the schedule must not notice, so it is constant here.
    optimizer = "muon" if settings == MUON else "adamw"
    constant = (*SETTINGS, "optimizer.schedule=constant", *settings)
    reference, moved = (
        tiny.trained("reference", *constant),
        tiny.path / "moved",
    )
    for num_ranks, num_steps, overrides in LEGS[optimizer]:
        tiny.trained(
            moved, *constant, f"training.num_steps={num_steps}", *overrides,
            num_ranks=num_ranks, allow_change=("training.num_steps",),
        )  # fmt: skip

    tolerance = MUON_TOLERANCE if optimizer == "muon" else TOLERANCE
    assert losses(moved) == pytest.approx(losses(reference), rel=tolerance)
    assert len(losses(moved)) == 20
    assert_close(*map(parameters, (reference, moved)), rtol=tolerance, atol=50 * tolerance)


def parameters(run: Path) -> list[Tensor]:
    """All parameters at the run's end: the last ones, and their averages."""
    path = run / "checkpoints" / "step-00000020"
    models = [load_model(path, weights=weights)[0] for weights in ("last", "averaged")]
    return [parameter for model in models for parameter in model.parameters()]


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
def test_ranks_and_lanes_change_in_one_run(tiny: TinyRuns, memory: tuple[str, ...]) -> None:
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
            tiny.trained(
                tiny.path / name, *overrides,
                num_ranks=num_ranks, allow_change=allowed,
            )  # fmt: skip
    reference, moved = losses(tiny.path / "reference"), losses(tiny.path / "moved")
    largest = max(abs(moved[step] / loss - 1) for step, loss in reference.items())
    print(f"largest relative difference of {len(moved)} losses: {largest:.1e}")
    assert len(moved) == 15
    assert largest < 1e-6
    assert_close(*(lane_memories(tiny.path / name, 12) for name in legs), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "settings",
    [
        *(
            pytest.param(
                ZERO[s], id=s, marks=() if s in ("1", "3-all-spread") else pytest.mark.slow
            )
            for s in ZERO
        ),
        *(
            pytest.param((*MUON, *ZERO[s]), id=f"muon {s}", marks=pytest.mark.slow)
            for s in ("0", "1", "2")
        ),
        *OTHER_MEMORIES,
        # After step 8, lanes of two turns of three are a segment ahead of the others.
        pytest.param((*TURNS, "data.piece_len=37"), id="turns and pieces"),
    ],
)
def test_a_resume_at_the_same_world_size_is_bit_for_bit(
    tiny: TinyRuns, settings: tuple[str, ...]
) -> None:
    settings = (*SETTINGS, *settings, "training.keep_checkpoints=9")
    straight = tiny.trained("straight", *settings)
    checkpoint = str(straight / "checkpoints" / "step-00000008")
    resumed = tiny.trained("resumed", *settings, resume=checkpoint)

    assert losses(resumed) == {step: x for step, x in losses(straight).items() if step > 8}
    assert all(map(torch.equal, parameters(straight), parameters(resumed)))


def test_lanes_with_a_memory_without_limit_cannot_be_given_to_other_lanes(tiny: TinyRuns) -> None:
    """No number of segments would replay it."""
    settings = (*SETTINGS, "model.memory=running_mean", "training.num_steps=4")
    tiny.trained(tiny.path, *settings, num_ranks=1)
    changed = (*SETTINGS, "model.memory=running_mean", "data.num_lanes=6")
    allowed = ("data.num_lanes", "training.num_steps")
    spec = tiny.spec(tiny.path, *changed, allow_change=allowed)
    assert tiny.ranks(1).run(train, spec) == [ConfigError.exit_code]
    assert "model.memory=running_mean may depend on any earlier token" in refusal(tiny.path)
