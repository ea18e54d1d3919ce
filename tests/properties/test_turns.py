"""Training in which a step reads only some of the lanes (`data.lanes_per_step`).

There are nine lanes, and a step reads three. Of two ranks, rank 0 has lanes 0 to 3, so it reads two
lanes in the first turn and one in the others; rank 1 reads one in the first and two in the others.
"""

import pytest
from torch.testing import assert_close

from tests.support.diverging_runs import NanHidden, train_with
from tests.support.training_runs import (
    DROPOUT,
    NO_EVALUATION,
    TURNS,
    ZERO,
    TinyRuns,
    lane_memories,
    losses,
    metrics,
    refusal,
    train,
    train_some,
)
from txl_dist.errors import CheckpointError, ConfigError

NUM_TURNS = 3
CONSTANT = (NO_EVALUATION, "optimizer.lr=1e-30", "training.num_steps=24")
# As in test_one_trajectory.py: another number of ranks sums floats in another order.
TOLERANCE = 2e-6


def test_a_round_of_turns_reads_what_one_step_over_all_lanes_reads(tiny: TinyRuns) -> None:
    """With weights that do not change, and so the same memory of every lane."""
    turns = tiny.trained("turns", *CONSTANT, *TURNS)
    settings = (*CONSTANT, "data.num_lanes=9", "training.num_steps=8")
    whole = tiny.trained("whole", *settings, num_ranks=1)

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
    tiny: TinyRuns, stage: str, micro_batch: str
) -> None:
    settings = (NO_EVALUATION, *DROPOUT, *TURNS)
    one = tiny.trained("one", *settings, *ZERO["0"], num_ranks=1)
    spread = (*ZERO[stage], f"training.micro_batch_lanes={micro_batch}")
    two = tiny.trained("two", *settings, *spread)
    assert losses(two) == pytest.approx(losses(one), rel=TOLERANCE)
    valid = [[line["memory_valid"] for line in metrics(run)] for run in (one, two)]
    assert valid[1] == pytest.approx(valid[0])


def test_no_lane_attends_across_a_step_that_was_skipped(tiny: TinyRuns) -> None:
    """Step 8, the second turn of the third round, diverges; weights do not change in any step."""
    settings = (*CONSTANT, *TURNS, "divergence.policy=skip")
    quiet, run = tiny.trained("quiet", *settings), tiny.path / "run"
    ends = tiny.ranks(2).run(train_with, tiny.spec(run, *settings), NanHidden(1, steps=(8,)))
    assert [code for code, *_ in ends] == [0, 0]

    expected, actual = losses(quiet), losses(run)
    assert expected.keys() - actual.keys() == {8}
    changed = {step for step in actual if actual[step] != expected[step]}
    # The rest of its round and the next one have no memory, as if all lanes had lost theirs.
    assert {9, 10, 11, 12} <= changed <= set(range(9, 25))
    shares = {line["step"]: line.get("memory_valid") for line in metrics(run)}
    assert [shares[step] for step in (9, 10, 11, 12)] == [0, 0, 0, 0]
    assert [shares[step] for step in (13, 14, 15)] == [pytest.approx(3 / 7)] * 3


def test_lanes_change_only_where_all_are_at_one_position(tiny: TinyRuns) -> None:
    settings = (NO_EVALUATION, "training.checkpoint_interval_steps=1")
    first = ("training.keep_checkpoints=9", "training.num_steps=7")
    tiny.trained("a", *settings, *TURNS, *first)
    other = (*settings, "data.num_lanes=6", "data.lanes_per_step=2", "training.num_steps=12")
    allowed = ("data.num_lanes", "data.lanes_per_step", "training.num_steps")
    for step, codes in ((7, [CheckpointError.exit_code] * 2), (6, [0, 0])):
        run = tiny.path / str(step)
        resume = str(tiny.path / "a" / "checkpoints" / f"step-{step:08d}")
        spec = tiny.spec(run, *other, resume=resume, allow_change=allowed)
        assert tiny.ranks(2).run(train, spec) == codes
    assert "1 of them are a segment ahead of the others" in refusal(tiny.path / "7")
    assert sorted(losses(tiny.path / "6")) == list(range(7, 13))


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 3)])
def test_a_round_goes_on_with_other_ranks(tiny: TinyRuns, before: int, after: int) -> None:
    """The checkpoint is that of step 7, where three of nine lanes are a segment ahead."""
    settings = (*DROPOUT, *TURNS, NO_EVALUATION, "training.checkpoint_interval_steps=7")
    straight = tiny.trained("straight", *settings, num_ranks=1)
    tiny.ranks(before).run(train_some, tiny.spec("run", *settings), num_steps=8)
    run = tiny.trained("run", *settings, num_ranks=after)
    assert losses(run) == pytest.approx(losses(straight), rel=TOLERANCE)


def test_more_ranks_than_lanes_of_a_step_are_refused(tiny: TinyRuns) -> None:
    spec = tiny.spec(tiny.path, "data.num_lanes=6", "data.lanes_per_step=1")
    assert tiny.ranks(2).run(train, spec) == [ConfigError.exit_code] * 2
    assert "2 ranks for data.lanes_per_step=1" in refusal(tiny.path)
