"""Training in which a step reads only some of the lanes (`data.lanes_per_step`).

There are nine lanes, and a step reads three. Of two ranks, rank 0 has lanes 0 to 3, so it reads two
lanes in the first turn and one in the others; rank 1 reads one in the first and two in the others.
"""

from pathlib import Path

import pytest
from torch.testing import assert_close

from tests.support.diverging_runs import NanHidden, train_with
from tests.support.gloo_ranks import RankGroups
from tests.support.training_runs import (
    DROPOUT,
    NO_EVALUATION,
    TURNS,
    ZERO,
    lane_memories,
    losses,
    metrics,
    refusal,
    tiny_spec,
    train,
    trained,
)
from txl_dist.errors import CheckpointError, ConfigError

NUM_TURNS = 3
CONSTANT = (NO_EVALUATION, "optimizer.lr=1e-30", "training.num_steps=24")
# As in test_one_trajectory.py: another number of ranks sums floats in another order.
TOLERANCE = 2e-6


def test_a_round_of_turns_reads_what_one_step_over_all_lanes_reads(
    ranks: RankGroups, dataset: Path, tmp_path: Path
) -> None:
    """With weights that do not change, and so the same memory of every lane."""
    turns = trained(ranks, dataset, tmp_path / "turns", *CONSTANT, *TURNS)
    settings = (*CONSTANT, "data.num_lanes=9", "training.num_steps=8")
    whole = trained(ranks, dataset, tmp_path / "whole", *settings, num_ranks=1)

    in_turns, at_once = losses(turns), losses(whole)
    rounds = [
        sum(in_turns[first + turn] for turn in range(NUM_TURNS)) / NUM_TURNS
        for first in range(1, 24, NUM_TURNS)
    ]
    assert rounds == pytest.approx(list(at_once.values()), rel=TOLERANCE)
    assert len({*in_turns.values()}) == 24
    tokens = [[line["tokens"] for line in metrics(run)] for run in (turns, whole)]
    assert tokens[0][2::3] == tokens[1]
    assert_close(*(lane_memories(run, 9) for run in (turns, whole)), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("stage", "micro_batch"), [("1", "null"), ("3-all-spread", "1")], ids=["1", "3"]
)
def test_losses_do_not_depend_on_ranks_stages_or_micro_batches(
    ranks: RankGroups, dataset: Path, tmp_path: Path, stage: str, micro_batch: str
) -> None:
    settings = (NO_EVALUATION, *DROPOUT, *TURNS)
    one = trained(ranks, dataset, tmp_path / "one", *settings, *ZERO["0"], num_ranks=1)
    spread = (*ZERO[stage], f"training.micro_batch_lanes={micro_batch}")
    two = trained(ranks, dataset, tmp_path / "two", *settings, *spread)
    assert losses(two) == pytest.approx(losses(one), rel=TOLERANCE)
    valid = [[line["memory_valid"] for line in metrics(run)] for run in (one, two)]
    assert valid[1] == pytest.approx(valid[0])


def test_no_lane_attends_across_a_step_that_was_skipped(
    ranks: RankGroups, dataset: Path, tmp_path: Path
) -> None:
    """Step 8, the second turn of the third round, diverges; weights do not change in any step."""
    settings = (*CONSTANT, *TURNS, "divergence.policy=skip")
    quiet, run = trained(ranks, dataset, tmp_path / "quiet", *settings), tmp_path / "run"
    ends = ranks(2).run(train_with, tiny_spec(dataset, run, *settings), NanHidden(1, steps=(8,)))
    assert [code for code, *_ in ends] == [0, 0]

    expected, actual = losses(quiet), losses(run)
    assert expected.keys() - actual.keys() == {8}
    changed = {step for step in actual if actual[step] != expected[step]}
    # The rest of its round and the next one have no memory, as if all lanes had lost theirs.
    assert {9, 10, 11, 12} <= changed <= set(range(9, 25))
    shares = {line["step"]: line.get("memory_valid") for line in metrics(run)}
    assert [shares[step] for step in (9, 10, 11, 12)] == [0, 0, 0, 0]
    assert [shares[step] for step in (13, 14, 15)] == [pytest.approx(3 / 7)] * 3


def test_lanes_change_only_where_all_are_at_one_position(
    ranks: RankGroups, dataset: Path, tmp_path: Path
) -> None:
    settings = (NO_EVALUATION, "training.checkpoint_interval_steps=1")
    first = ("training.keep_checkpoints=9", "training.num_steps=7")
    trained(ranks, dataset, tmp_path / "a", *settings, *TURNS, *first)
    other = (*settings, "data.num_lanes=6", "data.lanes_per_step=2", "training.num_steps=12")
    allowed = ("data.num_lanes", "data.lanes_per_step", "training.num_steps")
    for step, codes in ((7, [CheckpointError.exit_code] * 2), (6, [0, 0])):
        run = tmp_path / str(step)
        resume = str(tmp_path / "a" / "checkpoints" / f"step-{step:08d}")
        spec = tiny_spec(dataset, run, *other, resume=resume, allow_change=allowed)
        assert ranks(2).run(train, spec) == codes
    assert "1 of them are a segment ahead of the others" in refusal(tmp_path / "7")
    assert sorted(losses(tmp_path / "6")) == list(range(7, 13))


def test_more_ranks_than_lanes_of_a_step_are_refused(
    ranks: RankGroups, dataset: Path, tmp_path: Path
) -> None:
    spec = tiny_spec(dataset, tmp_path, "data.num_lanes=6", "data.lanes_per_step=1")
    assert ranks(2).run(train, spec) == [ConfigError.exit_code] * 2
    assert "2 ranks for data.lanes_per_step=1" in refusal(tmp_path)
