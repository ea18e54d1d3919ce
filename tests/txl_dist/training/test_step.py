"""A rejected step leaves no trace, and no token attends across the gap that it leaves."""

from collections.abc import Iterator
from copy import deepcopy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from data_pipeline.errors import DataError
from data_pipeline.streams.segments import IGNORED, NO_LANE, Batch
from tests.support.training_runs import NO_EVALUATION, TURNS, ZERO, TinyRuns, opened_trainer
from txl_dist.errors import DivergedError
from txl_dist.evaluation.scores import LossSums
from txl_dist.runtime.world import World
from txl_dist.training.batches import DeviceBatches
from txl_dist.training.engine import Engine
from txl_dist.training.loop import Trainer
from txl_dist.training.spec import TrainSpec
from txl_dist.training.step import StepResult


def step_with_poison(world: World, spec: TrainSpec, poison: str) -> tuple[str, bool]:
    """Rank 1 has a NaN or infinity at step 2. Returns the error, and whether weights are equal."""
    with opened_trainer(world, spec) as trainer:
        engine = trainer.step.engine
        before: list[Tensor] = []

        def poisoned(_: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
            hidden_BTD, *others = inputs
            if trainer.state.step == 1:
                before[:] = masters(engine)
                if world.rank == 1 and poison == "loss":
                    hidden_BTD = hidden_BTD * float("nan")
                if world.rank == 1 and poison == "gradient":
                    hidden_BTD.register_hook(lambda gradient: gradient * float("inf"))
            return (hidden_BTD, *others)

        engine.model.softmax.register_forward_pre_hook(poisoned)
        try:
            trainer.run()
        except DivergedError as error:
            pairs = zip(masters(engine), before, strict=True)
            return str(error), all(torch.equal(after, old) for after, old in pairs)
    return "", False


def masters(engine: Engine) -> list[Tensor]:
    return [fragment.master.clone() for fragment in engine.fragments()]


@pytest.mark.fault_row(28)
@pytest.mark.parametrize("stage", ZERO)
@pytest.mark.parametrize("poison", ["loss", "gradient"])
def test_all_ranks_stop_with_their_weights_as_they_were(
    tiny: TinyRuns, stage: str, poison: str
) -> None:
    spec = tiny.spec(tiny.path, NO_EVALUATION, *ZERO[stage])
    outcomes = tiny.ranks(2).run(step_with_poison, spec, poison)
    for message, unchanged in outcomes:
        assert "no rank has changed its weights" in message
        assert unchanged
    assert not (tiny.path / "LATEST").exists()


# --- a rejected step ----------------------------------------------------------------------------


def snapshot(trainer: Trainer) -> list[Tensor]:
    """Masters, optimizer state and step counts, and the memory of this rank."""
    engine = trainer.step.engine
    fragments = list(engine.fragments())
    return [
        *(fragment.master.clone() for fragment in fragments),
        *(state.clone() for fragment in fragments for state in fragment.states.values()),
        *(state["step"].clone() for state in engine._optimizer.state.values()),
        *(x.clone() for _, row in trainer.step.memory_of_lanes() for x in row.values()),
    ]


def compute(
    trainer: Trainer,
    batch: Batch,
    step: int,
    *,
    lr: float = 0.01,
    is_accepted: bool = True,
    contiguous_from: int = 0,
) -> StepResult:
    computed = trainer.step.compute(batch, step=step, contiguous_from=contiguous_from)
    event = None if is_accepted else "rejected"
    result = trainer.step.update(computed, lr=lr, check=lambda *_: event)
    assert result.event == event
    return result


def with_and_without_a_rejected_step(world: World, spec: TrainSpec) -> list[list[Tensor]]:
    """State after step 1; after 1, 3; after 1, 2 (NaN on rank 1, rejected); after 1, 2, 3."""
    with opened_trainer(world, spec) as trainer:
        engine, first = trainer.step.engine, trainer.batches.read()
        bad, last = trainer.batches.read(), trainer.batches.read()
        compute(trainer, first, 1)
        seen = [snapshot(trainer)]
        memories = [[*turn] for turn in trainer.step.memories]
        fragments = [(f.master.clone(), deepcopy(f.states)) for f in engine.fragments_to_load()]
        compute(trainer, last, 3)
        seen.append(snapshot(trainer))

        trainer.step.memories = memories
        for fragment, (master, states) in zip(engine.fragments_to_load(), fragments, strict=True):
            fragment.master.copy_(master)
            for name, state in fragment.states.items():
                state.copy_(states[name])
        engine.finish_loading(num_steps=1)
        is_poisoned = [world.rank == 1]

        def poison(_: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
            hidden_BTD, *others = inputs
            return (hidden_BTD * float("nan") if is_poisoned[0] else hidden_BTD, *others)

        engine.model.softmax.register_forward_pre_hook(poison)
        compute(trainer, bad, 2, is_accepted=False)
        seen.append(snapshot(trainer))
        is_poisoned[0] = False
        compute(trainer, last, 3)
        seen.append(snapshot(trainer))
    return seen


SLOW_STAGES = [pytest.param(stage, marks=pytest.mark.slow) for stage in ("1", "3")]


@pytest.mark.parametrize("stage", ["0", "2", "3-all-spread", *SLOW_STAGES])
def test_a_run_after_a_rejected_step_equals_one_without_it(tiny: TinyRuns, stage: str) -> None:
    """Bit for bit: weights, optimizer state and its step count, and memory."""
    settings = (NO_EVALUATION, "training.micro_batch_lanes=2", "model.dropout=0.1", *ZERO[stage])
    seen = tiny.ranks(2).run(with_and_without_a_rejected_step, tiny.spec(tiny.path, *settings))
    for before, without, rejected, after in seen:
        assert all(map(torch.equal, rejected, before))
        assert all(map(torch.equal, after, without))
        assert not any(map(torch.equal, after, before))


def steps_in_turns(world: World, spec: TrainSpec) -> dict[str, Any]:
    """Of every turn: its lanes, and a rejected step. Then an accepted one without targets."""
    with opened_trainer(world, spec) as trainer:
        batches = [trainer.batches.read() for _ in trainer.step.memories]
        results = [compute(trainer, batch, 1, is_accepted=False) for batch in batches]
        engine, losses = trainer.step.engine, list[float]()
        before, backward = masters(engine), engine.backward

        def recorded(loss: Tensor) -> None:
            losses.append(float(loss.detach()))
            backward(loss)

        engine.backward = recorded  # type: ignore[method-assign]
        target = np.full_like(batches[0].target, IGNORED)
        last = compute(trainer, replace(batches[0], target=target, num_targets=0), 2, lr=0.0)
        return {
            "lanes": [[lane for lane in batch.lanes if lane != NO_LANE] for batch in batches],
            "results": results,
            "last": last,
            "losses": losses,
            "is_unchanged": all(map(torch.equal, masters(engine), before)),
        }


def test_a_step_names_the_lanes_of_its_turn_and_one_without_targets_changes_nothing(
    tiny: TinyRuns,
) -> None:
    spec = tiny.spec(tiny.path, NO_EVALUATION, *TURNS, "training.micro_batch_lanes=2")
    (seen,) = tiny.ranks(1).run(steps_in_turns, spec)
    for lanes, result in zip(seen["lanes"], seen["results"], strict=True):
        assert [*result.lane_sums] == lanes
        assert result.sums.nats == pytest.approx(sum(x.nats for x in result.lane_sums.values()))
        assert result.sums.num_tokens == sum(x.num_tokens for x in result.lane_sums.values())
    assert seen["last"].sums == LossSums()
    # On a GPU a gradient of infinity would become NaN where it is multiplied by 0.
    assert seen["losses"] == [0.0, 0.0]
    assert seen["last"].gradient_norm == 0
    assert seen["is_unchanged"]


def loss_with_memory(
    trainer: Trainer, batch: Batch, fill: float, contiguous_from: int
) -> tuple[float, float]:
    """Loss and share of valid memory of a rejected step with this memory."""
    for memory in trainer.step.memories[0]:
        for tensor in memory.tensors().values():
            tensor.fill_(fill)
    result = compute(trainer, batch, 5, is_accepted=False, contiguous_from=contiguous_from)
    return result.sums.nats, result.memory_valid


def losses_after_gaps(world: World, spec: TrainSpec) -> dict[int, tuple[bool, float]]:
    """By tokens since the gap: whether the memory affects the loss, and its valid share."""
    with opened_trainer(world, spec) as trainer:
        batch = [trainer.batches.read() for _ in range(4)][-1]
        seen = {}
        for distance in (0, 1, 7, 9):
            start = batch.position - distance
            nats_0, share = loss_with_memory(trainer, batch, 0.0, start)
            nats_1, _ = loss_with_memory(trainer, batch, 1.0, start)
            seen[distance] = (nats_0 != nats_1, share)
    return seen


@pytest.mark.parametrize(("kind", "after_a_token"), [("recurrent", 1 / 7), ("running_mean", 1.0)])
def test_no_token_reads_across_a_gap(tiny: TinyRuns, kind: str, after_a_token: float) -> None:
    """The memory has 7 tokens. A gap directly before the segment hides all of them.

    A mean has no tokens: the first segment after a gap does not read it, and begins another one.
    """
    kind = f"model.memory={kind}"
    spec = tiny.spec(tiny.path, NO_EVALUATION, "data.reset=stream", kind)
    (seen,) = tiny.ranks(1).run(losses_after_gaps, spec)
    assert seen == {0: (False, 0.0), 1: (True, after_a_token), 7: (True, 1.0), 9: (True, 1.0)}


CPU = torch.device("cpu")


def stream(num_batches: int) -> Iterator[Batch]:
    for position in range(num_batches):
        row = np.full((2, 3), position)
        arrays = row, row + 1, row.astype(np.int32)
        yield Batch(*arrays, position, position + 1, (0, 1), num_targets=6, turn=0, next_turn=0)
    raise DataError("damaged")


@pytest.mark.parametrize("calls", [(0, 0, 0), (1, 1, 1), (2, 0, 1)], ids=str)
def test_no_batch_is_lost_or_read_twice(calls: tuple[int, ...]) -> None:
    """`calls` of prefetch before each batch."""
    batches = DeviceBatches(stream(3), CPU, is_ready=lambda: True)
    for position, num_calls in enumerate(calls):
        for _ in range(num_calls):
            batches.prefetch()
        batch = next(batches)
        assert batch.position == position
        assert torch.equal(batch.input_BT, torch.from_numpy(batch.input))
        assert torch.equal(batch.age_BT, torch.from_numpy(batch.age))


def test_a_batch_that_is_not_ready_is_not_waited_for() -> None:
    taken: list[int] = []

    def recorded() -> Iterator[Batch]:
        for batch in stream(2):
            taken.append(batch.position)
            yield batch

    batches = DeviceBatches(recorded(), CPU, is_ready=lambda: False)
    batches.prefetch()
    assert taken == []
    assert next(batches).position == 0


def test_an_error_of_the_stream_is_raised_at_its_batch() -> None:
    batches = DeviceBatches(stream(1), CPU, is_ready=lambda: True)
    assert next(batches).position == 0
    batches.prefetch()  # the step that is running must not fail
    with pytest.raises(DataError, match="damaged"):
        next(batches)


# --- a replay -----------------------------------------------------------------------------------


def read_and_replayed(world: World, spec: TrainSpec) -> list[list[Tensor]]:
    """This rank's memory after two steps with a rate of 0, and after a replay of their segments."""
    with opened_trainer(world, spec) as trainer:
        step, memories = trainer.step, []
        empty = [[*turn] for turn in step.memories]
        batches = [trainer.batches.read(), trainer.batches.read()]
        for number, batch in enumerate(batches, start=1):
            compute(trainer, batch, number, lr=0.0)
        memories.append([x.clone() for _, row in step.memory_of_lanes() for x in row.values()])
        step.memories = empty
        with step.engine.whole_model() as model:
            model.eval()
            for batch in batches:
                step.replay(batch, model, "fp32")
        memories.append([x.clone() for _, row in step.memory_of_lanes() for x in row.values()])
    return memories


@pytest.mark.parametrize("backprop_segments", [1, 3])
def test_a_replay_gives_the_memory_that_training_had(
    tiny: TinyRuns, backprop_segments: int
) -> None:
    settings = (NO_EVALUATION, f"training.backprop_segments={backprop_segments}")
    # A short memory and large weights, so that it matters where segments begin.
    spec = tiny.spec(
        tiny.path,
        *settings,
        "training.micro_batch_lanes=2",
        "model.mem_len=2",
        "model.init_std=0.2",
    )
    ((read, replayed),) = tiny.ranks(1).run(read_and_replayed, spec)
    assert any(x.any() for x in read)
    torch.testing.assert_close(replayed, read, rtol=0, atol=1e-6)
