"""A loss or gradient that is not finite stops every rank before the optimizer step."""

from pathlib import Path

import pytest
import torch

from tests.gloo_ranks import RankGroups
from tests.training_runs import NO_EVALUATION, tiny_job
from txl_dist.errors import DivergedError
from txl_dist.training.build import RankBuilder
from txl_dist.training.job import TrainJob
from txl_dist.training.run_directory import RunDirectory
from txl_dist.world import World


def step_with_poison(world: World, job: TrainJob, poison: str) -> tuple[str, bool]:
    """Rank 1 meets a bad number at step 1; what this rank raised, and if its weights changed."""
    from contextlib import ExitStack

    directory = RunDirectory(job.run_path)
    directory.create()
    with ExitStack() as stack:
        training = RankBuilder(job, world, directory, stack).training()
        model = training.step.engine.model
        if world.rank == 1 and poison == "loss":
            model.softmax.bias.data[:] = float("nan")
        if world.rank == 1 and poison == "gradient":
            model.softmax.bias.register_hook(lambda gradient: gradient * float("inf"))
        before = [p.detach().clone() for p in model.parameters()]
        try:
            training.run()
        except DivergedError as error:
            after = list(model.parameters())
            same = all(
                torch.equal(a, b) or bool(b.isnan().any())
                for a, b in zip(after, before, strict=True)
            )
            return str(error), same
    return "", False


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("poison", ["loss", "gradient"])
def test_all_ranks_stop_with_their_weights_as_they_were(
    ranks: RankGroups, dataset: Path, tmp_path: Path, stage: int, poison: str
) -> None:
    job = tiny_job(dataset, tmp_path, NO_EVALUATION, f"deepspeed.zero_stage={stage}")
    outcomes = ranks(2).run(step_with_poison, job, poison)
    for told, unchanged in outcomes:
        assert "no rank has changed its weights" in told
        assert unchanged
    assert not (tmp_path / "LATEST").exists()
