"""A loss or gradient that is not finite stops every rank before the optimizer step."""

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.gloo_ranks import RankGroups
from tests.support.training_runs import NO_EVALUATION, ZERO, tiny_job
from txl_dist.errors import DivergedError
from txl_dist.runtime.world import World
from txl_dist.training.build import build_trainer
from txl_dist.training.engine import Engine
from txl_dist.training.job import TrainJob
from txl_dist.training.run_directory import RunDirectory


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
