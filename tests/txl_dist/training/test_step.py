"""A rejected step leaves no trace, and no token attends across the gap that it leaves."""

from contextlib import ExitStack
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from data_pipeline.streams.segments import Segment
from tests.support.gloo_ranks import RankGroups
from tests.support.training_runs import NO_EVALUATION, ZERO, tiny_job
from txl_dist.errors import DivergedError
from txl_dist.runtime.world import World
from txl_dist.training.engine import Engine
from txl_dist.training.job import TrainJob
from txl_dist.training.loop import Trainer
from txl_dist.training.run_directory import RunDirectory
from txl_dist.training.setup import build_trainer


def step_with_poison(world: World, job: TrainJob, poison: str) -> tuple[str, bool]:
    """Rank 1 has a NaN or infinity at step 2. Returns the error, and whether weights are equal."""
    directory = RunDirectory(job.run_path)
    directory.create()
    with ExitStack() as stack:
        trainer = build_trainer(job, world, directory, stack)
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
    ranks: RankGroups, dataset: Path, tmp_path: Path, stage: str, poison: str
) -> None:
    job = tiny_job(dataset, tmp_path, NO_EVALUATION, *ZERO[stage])
    outcomes = ranks(2).run(step_with_poison, job, poison)
    for message, unchanged in outcomes:
        assert "no rank has changed its weights" in message
        assert unchanged
    assert not (tmp_path / "LATEST").exists()


# --- a rejected step ----------------------------------------------------------------------------


def snapshot(trainer: Trainer) -> list[Tensor]:
    """Masters, optimizer state and step counts, and the memory of this rank."""
    engine = trainer.step.engine
    fragments = list(engine.fragments())
    return [
        *(fragment.master.clone() for fragment in fragments),
        *(state.clone() for fragment in fragments for state in fragment.states.values()),
        *(state["step"].clone() for state in engine._optimizer.state.values()),
        *(torch.stack([*layers]) for _, layers in sorted(trainer.step.memory_of_lanes())),
    ]


def compute(trainer: Trainer, segment: Segment, step: int, *, is_accepted: bool = True) -> None:
    result = trainer.step(
        segment,
        step=step,
        num_targets=trainer.plan.targets_in_step(segment.position),
        lr=0.01,
        check=lambda sums, norm: None if is_accepted else "rejected",
    )
    assert result.event == (None if is_accepted else "rejected")


def with_and_without_a_rejected_step(world: World, job: TrainJob) -> list[list[Tensor]]:
    """State after step 1; after 1, 3; after 1, 2 (NaN on rank 1, rejected); after 1, 2, 3."""
    directory = RunDirectory(job.run_path)
    directory.create()
    with ExitStack() as stack:
        trainer = build_trainer(job, world, directory, stack)
        engine, first = trainer.step.engine, next(trainer.segments)
        bad, last = next(trainer.segments), next(trainer.segments)
        compute(trainer, first, 1)
        seen = [snapshot(trainer)]
        memories = trainer.step.memories
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
def test_a_run_after_a_rejected_step_equals_one_without_it(
    ranks: RankGroups, dataset: Path, tmp_path: Path, stage: str
) -> None:
    """Bit for bit: weights, optimizer state and its step count, and memory."""
    settings = (NO_EVALUATION, "training.micro_batch_lanes=2", "model.dropout=0.1", *ZERO[stage])
    seen = ranks(2).run(with_and_without_a_rejected_step, tiny_job(dataset, tmp_path, *settings))
    for before, without, rejected, after in seen:
        assert all(map(torch.equal, rejected, before))
        assert all(map(torch.equal, after, without))
        assert not any(map(torch.equal, after, before))


def loss_with_memory(
    trainer: Trainer, segment: Segment, fill: float, contiguous_from: int
) -> tuple[float, float]:
    """Loss and share of valid memory of a rejected step with this memory."""
    for memory in trainer.step.memories:
        for layer in memory.layers:
            layer.fill_(fill)
    result = trainer.step(
        segment,
        step=5,
        num_targets=trainer.plan.targets_in_step(segment.position),
        lr=0.01,
        check=lambda sums, norm: "rejected",
        contiguous_from=contiguous_from,
    )
    return result.sums.nats, result.memory_valid


def losses_after_gaps(world: World, job: TrainJob) -> dict[int, tuple[bool, float]]:
    """By tokens since the gap: whether the memory affects the loss, and its valid share."""
    directory = RunDirectory(job.run_path)
    directory.create()
    with ExitStack() as stack:
        trainer = build_trainer(job, world, directory, stack)
        segment = [next(trainer.segments) for _ in range(4)][-1]
        seen = {}
        for distance in (0, 1, 7, 9):
            start = segment.position - distance
            nats_0, share = loss_with_memory(trainer, segment, 0.0, start)
            nats_1, _ = loss_with_memory(trainer, segment, 1.0, start)
            seen[distance] = (nats_0 != nats_1, share)
    return seen


def test_no_token_attends_across_a_gap(ranks: RankGroups, dataset: Path, tmp_path: Path) -> None:
    """The memory has 7 tokens. A gap directly before the segment hides all of them."""
    job = tiny_job(dataset, tmp_path, NO_EVALUATION, "data.reset=stream")
    (seen,) = ranks(1).run(losses_after_gaps, job)
    assert seen == {0: (False, 0.0), 1: (True, 1 / 7), 7: (True, 1.0), 9: (True, 1.0)}
