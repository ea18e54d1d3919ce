"""Skip and rollback: the trajectory afterwards, the run directory, and resumes; a stop instead."""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest

from data_pipeline.shards.shard_reader import open_split
from data_pipeline.streams.lanes import LanePlan
from data_pipeline.streams.segments import SegmentReader
from data_pipeline.tokenizers import ByteTokenizer
from tests.support.diverging_runs import (
    Fault,
    HighRate,
    NanHidden,
    NanWeight,
    SkipSteps,
    StopAfter,
    final_state,
    train_with,
)
from tests.support.training_runs import NO_EVALUATION, ZERO, TinyRuns, losses, metrics
from txl_dist.checkpoint.directory import CheckpointDirectory
from txl_dist.errors import DivergedError
from txl_dist.training.loop import Trainer
from txl_dist.training.spec import TrainSpec

# As in tests/properties/test_one_trajectory.py: another number of ranks sums in another order.
TOLERANCE = 2e-6
SETTINGS = (NO_EVALUATION, "training.num_steps=12", "training.checkpoint_interval_steps=3")
SKIP, ROLLBACK = "divergence.policy=skip", "divergence.policy=rollback"
SPIKES = ("divergence.loss_spike=10", "divergence.window_steps=6")


def counters(run: Path) -> dict[int, tuple[int, int]]:
    """Step -> (skipped_steps, rollbacks), of lines that have one of them; each step once."""
    lines = [line for line in metrics(run) if {"skipped_steps", "rollbacks"} & line.keys()]
    assert len({line["step"] for line in lines}) == len(lines)
    return {
        line["step"]: (line.get("skipped_steps", 0), line.get("rollbacks", 0)) for line in lines
    }


def specs_with_change(
    tiny: TinyRuns, run: Path, *settings: str, change: tuple[str, ...], step: int = 6
) -> list[TrainSpec]:
    """The specs of a run of 12 steps, the second of which changes settings after `step`."""
    allowed = ("training.num_steps", *(override.partition("=")[0] for override in change))
    constant = (*settings, "optimizer.schedule=constant", "optimizer.warmup_steps=0")
    return [
        tiny.spec(run, *constant, f"training.num_steps={last_step}", *more, allow_change=allowed)
        for last_step, more in ((step, ()), (12, change))
    ]


def ended(
    tiny: TinyRuns, spec: TrainSpec, *faults: Fault, num_ranks: int = 2, code: int = 0
) -> list[tuple[int, str, list[str]]]:
    """How each rank ends that trains with these faults; all have this exit code."""
    ends = tiny.ranks(num_ranks).run(train_with, spec, *faults)
    assert [end for end, *_ in ends] == [code] * num_ranks, ends
    return ends


def dumps(run: Path, step: int) -> list[dict[str, Any]]:
    """The dumps of all ranks, in rank order."""
    paths = sorted((run / "events").glob(f"divergence-step-{step:08d}-rank-*.json"))
    return [json.loads(path.read_text()) for path in paths]


def texts_of_lanes(spec: TrainSpec, position: int) -> list[str]:
    """What the lanes read in the step at this position."""
    data = spec.config.data
    source = open_split(data.path, "train")
    plan = LanePlan(num_tokens=source.num_tokens, num_lanes=5, tgt_len=3)
    order: Any = {"ordering": data.ordering, "seed": spec.config.seed}
    reader = SegmentReader(source, plan, lanes=range(5), reset=data.reset, **order)
    (segment,) = reader.read(position, 1)
    return [ByteTokenizer().decode(row) for row in segment.input]


def test_a_rollback_continues_as_if_the_steps_had_never_been_computed(tiny: TinyRuns) -> None:
    """On two ranks after a poisoned weight, and on one rank that skips the steps directly."""
    run, reference = tiny.path / "run", tiny.path / "reference"
    spec = tiny.spec(run, *SETTINGS, ROLLBACK, *ZERO["2"])
    ended(tiny, spec, NanWeight(rank=1, step=8))
    (end,) = tiny.ranks(1).run(train_with, tiny.spec(reference, *SETTINGS), SkipSteps(7, 8))
    assert end[0] == 0
    assert losses(run) == pytest.approx(losses(reference), rel=TOLERANCE)
    assert [*losses(run)] == [1, 2, 3, 4, 5, 6, 9, 10, 11, 12]
    assert counters(run) == {step: (min(2, step - 6), 1) for step in range(7, 13)}
    assert counters(reference) == {step: (min(2, step - 6), 0) for step in range(7, 13)}
    # The gap hides the memory of step 6: a segment of 3 tokens, a memory of 7.
    shares = {line["step"]: line.get("memory_valid") for line in metrics(run)}
    assert [shares[step] for step in (9, 10)] == [0.0, pytest.approx(3 / 7)]


@pytest.mark.fault_row(28)
def test_a_skipped_step_is_dumped_and_a_resume_in_the_gap_changes_nothing(tiny: TinyRuns) -> None:
    straight, resumed = tiny.path / "straight", tiny.path / "resumed"
    settings = (*SETTINGS, SKIP, "training.num_steps=8")
    spec = tiny.spec(straight, *settings)
    ends = ended(tiny, spec, NanHidden(rank=1, steps=(5,)))
    assert [*losses(straight)] == [1, 2, 3, 4, 6, 7, 8]
    assert counters(straight) == dict.fromkeys(range(5, 9), (1, 0))
    # A process says this before its first step, and the ranks of a test may have made steps.
    (event,) = [event for event in ends[0][2] if event != "first batch"]
    assert "policy=skip, event 1 of at most 10: the loss of step 5 is nan" in event

    # Lanes 2, 3 and 4 are on rank 1.
    first, second = dumps(straight, 5)
    assert [(lane["lane"], lane["loss"] == "nan") for lane in first["lanes"] + second["lanes"]] == [
        (0, False), (1, False), (2, True), (3, True), (4, True),
    ]  # fmt: skip
    texts = texts_of_lanes(spec, 12)
    for dump in (first, second):
        assert (dump["position"], dump["loss"]) == (12, "nan")
        assert dump["epochs"] == [{"epoch": 0, "start": 12, "stop": 15}]
        for lane in dump["lanes"]:
            assert (lane["targets"], lane["text"]) == (3, texts[lane["lane"]])

    spec = tiny.spec(resumed, *settings)
    ended(tiny, spec, NanHidden(rank=1, steps=(5,)), StopAfter(5), code=75)
    state = final_state(resumed, 5)
    assert (state.skipped_steps, state.contiguous_from, state.position) == (1, 15, 15)
    tiny.trained(resumed, *settings)
    assert losses(resumed) == losses(straight)
    assert counters(resumed) == counters(straight)


@pytest.mark.slow
@pytest.mark.parametrize("stage", ZERO)
@pytest.mark.parametrize("policy", [SKIP, ROLLBACK])
def test_every_stage_has_the_same_trajectory_and_resumes_bit_for_bit(
    tiny: TinyRuns, stage: str, policy: str
) -> None:
    """Two events, stops before and after them, on 2 ranks; and straight on 1 rank."""
    one, two, resumed = tiny.path / "one", tiny.path / "two", tiny.path / "resumed"
    settings = (*SETTINGS, policy, "model.dropout=0.1", *ZERO[stage])
    faults = (NanHidden(rank=0, steps=(6,)), NanHidden(rank=0, steps=(10,)))
    for num_ranks, run in ((1, one), (2, two)):
        ended(tiny, tiny.spec(run, *settings), *faults, num_ranks=num_ranks)
    assert losses(two) == pytest.approx(losses(one), rel=TOLERANCE)
    for step in (5, 7, 10):
        ended(tiny, tiny.spec(resumed, *settings), *faults, StopAfter(step), code=75)
    ended(tiny, tiny.spec(resumed, *settings), *faults)
    assert losses(resumed) == losses(two)
    skipped = {5, 6, 9, 10} if policy == ROLLBACK else {6, 10}
    assert {*range(1, 13)} - {*losses(two)} == skipped


@pytest.mark.fault_row(29)
@pytest.mark.slow
def test_a_spike_is_undone_with_the_update_that_caused_it(tiny: TinyRuns) -> None:
    """The update of step 8 is too large, and the loss of step 9 shows it."""
    run, reference = tiny.path / "run", tiny.path / "reference"
    spec = tiny.spec(run, *SETTINGS, *SPIKES, ROLLBACK, "training.keep_checkpoints=1")
    assert [code for code, *_ in tiny.ranks(2).run(train_with, spec, HighRate(8))] == [0, 0]
    tiny.ranks(2).run(train_with, tiny.spec(reference, *SETTINGS), SkipSteps(8, 9))
    assert losses(run) == losses(reference)
    assert dumps(run, 9)[0]["loss"] > 20
    # No step was compared with losses of the abandoned trajectory.
    accepted = [loss for step, loss in losses(run).items() if step <= 12]
    assert final_state(run, 12).divergence.losses == pytest.approx(accepted[-6:])


@pytest.mark.slow
def test_a_checkpoint_of_the_update_that_led_to_the_event_is_not_used(tiny: TinyRuns) -> None:
    spec = tiny.spec(tiny.path, *SETTINGS, *SPIKES, ROLLBACK, "training.keep_checkpoints=1")
    ends = tiny.ranks(2).run(
        train_with, spec, HighRate(9)
    )  # the checkpoint of step 9 has its weights
    assert [code for code, *_ in ends] == [0, 0]
    returned = "to the checkpoint of step 6; the run continues without steps 9 and 10"
    assert any(returned in event for event in ends[0][2])
    names = {path.name for path in CheckpointDirectory(tiny.path).path.iterdir()}
    assert "superseded-step-00000009" in names


@pytest.mark.parametrize("num_ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_weights_that_a_save_refuses_are_undone(tiny: TinyRuns, num_ranks: int) -> None:
    """Step 9 has a checkpoint, so its save finds the infinite weights too, at any time."""
    run, reference = tiny.path / "run", tiny.path / "reference"
    spec = tiny.spec(run, *SETTINGS, ROLLBACK)
    ends = ended(tiny, spec, HighRate(9, factor=math.inf), num_ranks=num_ranks)
    returned = "to the checkpoint of step 6; the run continues without steps 9 and 10"
    assert any(returned in event for event in ends[0][2])
    tiny.ranks(num_ranks).run(train_with, tiny.spec(reference, *SETTINGS), SkipSteps(9, 10))
    assert losses(run) == losses(reference)
    assert CheckpointDirectory(run).steps() == [9, 12]


class RefuseSave:
    """The save of a step finds weights on one rank that are not finite, which no loss shows."""

    def __init__(self, step: int, *, rank: int) -> None:
        self.step, self.rank = step, rank

    def __call__(self, trainer: Trainer) -> None:
        write = trainer.saver._write

        def refuse(save: Any, snapshot: Any) -> None:
            is_first = not trainer.state.divergence.num_rollbacks
            if (save.state["step"], save.rank, is_first) == (self.step, self.rank, True):
                raise DivergedError(f"weights of step {save.state['step']} are not finite")
            write(save, snapshot)

        trainer.saver._write = refuse  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("num_ranks", "last_step"), [(2, 12), pytest.param(2, 9, marks=pytest.mark.slow), (1, 9)]
)
def test_weights_that_only_a_save_refuses_are_undone(
    tiny: TinyRuns, num_ranks: int, last_step: int
) -> None:
    """Of two ranks, only the last one finds them."""
    run, reference = tiny.path / "run", tiny.path / "reference"
    settings = (*SETTINGS, ROLLBACK, f"training.num_steps={last_step}")
    fault = RefuseSave(9, rank=num_ranks - 1)
    ended(tiny, tiny.spec(run, *settings), fault, num_ranks=num_ranks)
    tiny.ranks(num_ranks).run(train_with, tiny.spec(reference, *settings), SkipSteps(9))
    assert losses(run) == losses(reference)
    checkpoints = CheckpointDirectory(run)
    assert checkpoints.newest_step() == last_step
    assert not list(checkpoints.path.glob(".saving-*"))


@pytest.mark.slow
def test_skipped_steps_survive_a_kill_directly_after_the_rollback(tiny: TinyRuns) -> None:
    """The checkpoint of step 6 has them, before any later checkpoint is written."""
    straight, killed = tiny.path / "straight", tiny.path / "killed"
    fault = NanWeight(rank=1, step=8)
    tiny.ranks(2).run(train_with, tiny.spec(straight, *SETTINGS, ROLLBACK), fault)
    spec = tiny.spec(killed, *SETTINGS, ROLLBACK)
    # The second fault ends the run as a kill would: nothing is saved.
    ended(tiny, spec, fault, EndAtStep(7), code=3)
    assert CheckpointDirectory(killed).steps() == [3, 6]
    tiny.trained(killed, *SETTINGS, ROLLBACK)
    assert losses(killed) == losses(straight)
    assert counters(killed) == counters(straight)


class EndAtStep:
    """The data fails at a step that a rollback has excluded."""

    def __init__(self, step: int) -> None:
        self.step = step

    def __call__(self, trainer: Any) -> None:
        from txl_dist.errors import DataError

        skip = trainer.step.skip

        def failing(**arguments: Any) -> Any:
            if trainer.state.step + 1 == self.step:
                raise DataError("the run ends here")
            return skip(**arguments)

        trainer.step.skip = failing


@pytest.mark.slow
def test_a_rollback_to_a_change_of_lanes_rebuilds_the_memory(tiny: TinyRuns) -> None:
    """The checkpoint of the change has the memory of other lanes."""
    run, reference = tiny.path / "run", tiny.path / "reference"
    settings = (*SETTINGS, ROLLBACK, "data.reset=stream")
    for path, fault in ((run, NanHidden(rank=0, steps=(9,))), (reference, SkipSteps(8, 9))):
        specs = specs_with_change(tiny, path, *settings, change=("data.num_lanes=3",))
        for spec, faults in zip(specs, ((), (fault,)), strict=True):
            assert [code for code, *_ in tiny.ranks(2).run(train_with, spec, *faults)] == [0, 0]
    assert losses(run) == losses(reference)
    assert metrics(run)[-1]["lost_steps"] == 2


@pytest.mark.slow
def test_a_rollback_without_an_older_checkpoint_stops(tiny: TinyRuns) -> None:
    spec = tiny.spec(tiny.path, *SETTINGS, ROLLBACK)
    ends = tiny.ranks(2).run(train_with, spec, NanHidden(rank=0, steps=(4,)))
    for code, message, _ in ends:
        assert code == 5
        assert "finds no checkpoint of a step before 3" in message
    assert len(dumps(tiny.path, 4)) == 2


@pytest.mark.slow
@pytest.mark.parametrize("policy", [SKIP, ROLLBACK])
def test_too_many_events_end_the_run_and_name_the_last_good_checkpoint(
    tiny: TinyRuns, policy: str
) -> None:
    """Also after a resume, which resets the number of events only if it names a checkpoint."""
    settings = (*SETTINGS, policy, "divergence.max_events=2", "training.keep_checkpoints=9")
    fault = NanHidden(rank=1, steps=range(8, 13))
    spec = tiny.spec(tiny.path, *settings)
    assert tiny.ranks(2).run(train_with, spec, fault, StopAfter(8))[0][0] == 75
    for code, message, _ in tiny.ranks(2).run(train_with, tiny.spec(tiny.path, *settings), fault):
        assert code == 5
        assert "This is event 3 within 1000 steps, more than divergence.max_events=2" in message
        # The rollback of step 9 has excluded step 6 too, the last update before it.
        last_good = CheckpointDirectory(tiny.path).at(6 if policy == SKIP else 3)
        assert f"--resume {last_good}" in message
    given = tiny.spec("fork", *settings, resume=str(CheckpointDirectory(tiny.path).at(3)))
    for code, message, events in tiny.ranks(2).run(train_with, given, fault):
        assert code == 5
        # The checkpoint of step 3 has the steps 6 to 9 that rollbacks have excluded. So step 10 is
        # the first event of the fork, whose directory has no checkpoint before step 5.
        cause = "This is event 3 within" if policy == SKIP else "no checkpoint of a step before 5"
        assert cause in message
        assert sum("event 1 of at most 2" in event for event in events) == 1


def test_weights_that_cannot_be_evaluated_are_given_up(tiny: TinyRuns) -> None:
    """The update of step 8 is too large; the evaluation of step 8 shows it before the next loss."""
    settings = (
        "training.num_steps=12", "training.checkpoint_interval_steps=3", ROLLBACK,
        "evaluation.interval_steps=4", "evaluation.max_tokens=200",
    )  # fmt: skip
    run, reference = tiny.path / "run", tiny.path / "reference"
    for path, fault in ((run, HighRate(8, factor=1e30)), (reference, SkipSteps(8))):
        (end,) = tiny.ranks(1).run(train_with, tiny.spec(path, *settings), fault)
        assert end[0] == 0, end[1]
    assert losses(run) == losses(reference)
    assert scores(run) == scores(reference)
    assert counters(run) == {7: (0, 1), **dict.fromkeys(range(8, 13), (1, 1))}
    assert 8 not in losses(run)
    assert set(scores(run)) == {4, 8, 12}


def scores(run: Path) -> dict[int, float]:
    return {line["step"]: line["valid/loss"] for line in metrics(run) if "valid/loss" in line}


@pytest.mark.parametrize("change", ["data.num_lanes=3", "data.tgt_len=4"])
def test_after_a_change_of_lanes_or_batches_steps_are_other_steps(
    tiny: TinyRuns, change: str
) -> None:
    """A new window begins, and the steps that a rollback has excluded are those of other text."""
    settings = (*SETTINGS, "divergence.loss_spike=10", "divergence.window_steps=10")
    first, second = specs_with_change(tiny, tiny.path, *settings, change=(change,))
    ended(tiny, first, SkipSteps(4, 9), num_ranks=1)
    assert final_state(tiny.path, 6).divergence.skip_steps == (4, 9)
    ended(tiny, second, num_ranks=1)
    divergence = final_state(tiny.path, 12).divergence
    assert len(divergence.losses) == 6
    assert divergence.skip_steps == (4,)


@pytest.mark.parametrize("at", ["start", "inside"])
def test_the_step_in_which_an_epoch_begins_is_no_spike(tiny: TinyRuns, at: str) -> None:
    """The tokens after the end of the epoch have no memory, so the loss is higher."""
    source = open_split(tiny.dataset, "train")
    lane_tokens = source.num_tokens // 5
    tgt_len = next(n for n in range(4, 40) if (lane_tokens % n == 0) == (at == "start"))
    settings = (*SETTINGS, f"data.tgt_len={tgt_len}", "divergence.loss_spike=3")
    begins = -(-lane_tokens // tgt_len) + (at == "start")
    spec = tiny.spec(
        tiny.path, *settings, "divergence.window_steps=5", f"training.num_steps={begins + 1}",
        "optimizer.lr=1e-30", "optimizer.warmup_steps=0",
    )  # fmt: skip
    ended(tiny, spec, HighLoss(begins), num_ranks=1)
    assert begins in losses(tiny.path)
    shutil.rmtree(tiny.path)
    ended(tiny, spec, HighLoss(begins - 1), num_ranks=1, code=DivergedError.exit_code)


class HighLoss:
    """One step has ten times its loss."""

    def __init__(self, step: int) -> None:
        self.step = step

    def __call__(self, trainer: Trainer) -> None:
        local_values = trainer.step._local_values

        def higher(*arguments: Any) -> Any:
            values = local_values(*arguments)
            values[0] *= 10.0 if trainer.state.step + 1 == self.step else 1.0
            return values

        trainer.step._local_values = higher  # type: ignore[assignment]


IN_TURNS = (
    "data.num_lanes=6", "data.lanes_per_step=2", "training.checkpoint_interval_steps=1",
    "training.keep_checkpoints=9",
)  # fmt: skip
"""Three turns: after the steps 4 and 5 some lanes are a segment ahead of others."""


@pytest.mark.parametrize(
    ("num_ranks", "more", "change"),
    [
        (1, (), ("data.num_lanes=3", "model.mem_len=4")),
        pytest.param(2, (), ("data.num_lanes=3", "model.mem_len=4"), marks=pytest.mark.slow),
        (1, IN_TURNS, ("data.num_lanes=4",)),
    ],
    ids=["1 rank", "2 ranks", "turns"],
)
def test_a_rollback_to_before_a_change_continues_with_the_new_settings(
    tiny: TinyRuns, num_ranks: int, more: tuple[str, ...], change: tuple[str, ...]
) -> None:
    """Step 7 is the first one with other lanes; its loss comes from the update of step 6. So the
    run is that which was changed after step 3, without the steps 6 and 7."""
    run, reference = tiny.path / "run", tiny.path / "reference"
    settings = (*SETTINGS, ROLLBACK, *more)
    for path, step, fault in (
        (run, 6, NanHidden(rank=0, steps=(7,))), (reference, 3, SkipSteps(6, 7))
    ):  # fmt: skip
        specs = specs_with_change(tiny, path, *settings, change=change, step=step)
        for spec, faults in zip(specs, ((), (fault,)), strict=True):
            ends = ended(tiny, spec, *faults, num_ranks=num_ranks)
        if path == run:
            returned = "returned from step 6 to the checkpoint of step 3"
            assert any(returned in event for event in ends[0][2])
    assert losses(run) == losses(reference)
    assert [*losses(run)] == [1, 2, 3, 4, 5, *range(8, 13)]


def test_lines_of_a_resumed_run_do_not_depend_on_where_it_stopped(tiny: TinyRuns) -> None:
    """Step 6 has a line, and is skipped by the process that resumes after step 5."""
    straight, resumed = tiny.path / "straight", tiny.path / "resumed"
    settings = (*SETTINGS, SKIP, "training.log_interval_steps=2")
    fault = NanHidden(rank=0, steps=(6,))
    for run, faults in (
        (straight, (fault,)),
        (resumed, (fault, StopAfter(5))),
        (resumed, (fault,)),
    ):
        tiny.ranks(1).run(train_with, tiny.spec(run, *settings), *faults)
    names = ("step", "loss", "lr", "gradient_norm", "memory_valid", "skipped_steps")
    lines = [
        [{name: line.get(name) for name in names} for line in metrics(run)]
        for run in (straight, resumed)
    ]
    assert lines[0] == lines[1]
    assert [line["step"] for line in lines[0]] == [2, 4, 6, 8, 10, 12]


@pytest.mark.parametrize(("step", "share"), [(1, (3 + 7 + 7) / 21), (6, 1.0)])
def test_a_memory_that_was_replayed_has_no_gap(tiny: TinyRuns, step: int, share: float) -> None:
    """Also where the replay begins before the first token of the run: after one step of 3 tokens
    two of three new lanes have a full memory of 7, from the text before them."""
    settings = (*SETTINGS, SKIP, "data.reset=stream", "training.checkpoint_interval_steps=1")
    specs = specs_with_change(tiny, tiny.path, *settings, change=("data.num_lanes=3",), step=step)
    for spec in specs:
        assert tiny.ranks(1).run(train_with, spec, NanHidden(rank=0, steps=(6,)))[0][0] == 0
    valid = {line["step"]: line.get("memory_valid") for line in metrics(tiny.path)}
    assert valid[step + 1] == pytest.approx(share)


# --- without recovery -----------------------------------------------------------------------------


@pytest.mark.fault_row(28, 29)
@pytest.mark.fault
@pytest.mark.parametrize("fault", [NanWeight(rank=1, step=10), HighRate(9)], ids=["nan", "spike"])
def test_stop_ends_the_run_at_the_event(tiny: TinyRuns, fault: Fault) -> None:
    """Both are seen in the loss of step 10."""
    spec = tiny.spec(tiny.path, *SETTINGS, *SPIKES)
    for code, message, _ in tiny.ranks(2).run(train_with, spec, fault):
        assert code == 5
        assert "the loss of step 10 is " in message
        assert "no rank has changed its weights" in message
        assert str(tiny.path / "events" / "divergence-step-00000010-rank-*.json") in message
    assert max(losses(tiny.path)) == 9
    assert len([*(tiny.path / "events").iterdir()]) == 2
