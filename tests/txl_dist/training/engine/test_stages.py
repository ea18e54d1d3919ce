"""The fragments of all ranks together are the model, at every ZeRO stage."""

import shutil
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.support.training_runs import (
    NO_EVALUATION,
    ZERO,
    TinyRuns,
    losses,
    metrics,
    opened_trainer,
    train,
)
from txl_dist.config.training_config import DeepSpeedConfig
from txl_dist.runtime.world import World
from txl_dist.training.engine.stages import Stage0Engine
from txl_dist.training.spec import TrainSpec

Parts = list[tuple[str, int, Tensor]]


def train_and_collect(world: World, spec: TrainSpec) -> tuple[Parts, dict[str, Tensor], set[str]]:
    """After training: this rank's slices, all weights, and the names of sharded parameters."""
    with opened_trainer(world, spec) as trainer:
        trainer.run()
        engine = trainer.step.engine
        parts = [(f.name, f.start, f.master.clone()) for f in engine.fragments()]
        spread = {name for name, p in engine.model.named_parameters() if p.numel() == 0}
        with engine.whole_model() as model:
            whole = {name: p.detach().clone() for name, p in model.named_parameters()}
    return parts, whole, spread


@pytest.mark.parametrize("stage", ZERO)
def test_the_slices_of_all_ranks_are_the_weights_exactly_once(tiny: TinyRuns, stage: str) -> None:
    settings = (NO_EVALUATION, "training.num_steps=2", "optimizer.warmup_steps=0")
    seen = tiny.ranks(2).run(train_and_collect, tiny.spec(tiny.path, *settings, *ZERO[stage]))
    parts = sorted(
        (part for rank_parts, _, _ in seen for part in rank_parts), key=lambda part: part[:2]
    )
    for _, whole, spread in seen:
        assert spread == (set(whole) if stage == "3-all-spread" else set())
        for name, weight in whole.items():
            slices = [(start, part) for part_name, start, part in parts if part_name == name]
            assert torch.equal(torch.cat([part for _, part in slices]), weight.flatten())
            ends = [start + len(part) for start, part in slices]
            assert [start for start, _ in slices] == [0, *ends[:-1]]


def count_waits(world: World, spec: TrainSpec) -> int:
    from deepspeed.accelerator import get_accelerator

    waits = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(get_accelerator(), "synchronize", lambda *_: waits.append(1))
        assert train(world, spec) == 0
    return len(waits)


@pytest.mark.parametrize("stage", ["0", "1", "2", "3"])
def test_deepspeed_does_not_wait_for_the_device(tiny: TinyRuns, stage: str) -> None:
    """Its throughput timer did, before every micro-batch and after every step."""
    settings = (NO_EVALUATION, "training.micro_batch_lanes=2", "training.num_steps=6")
    assert tiny.ranks(1).run(count_waits, tiny.spec(tiny.path, *settings, *ZERO[stage])) == [0]


CLIPPED = (NO_EVALUATION, "deepspeed.zero_stage=0", "optimizer.gradient_clipping=0.3")


def train_without_deepspeeds_copies(world: World, spec: TrainSpec) -> int:
    from deepspeed.runtime.engine import DeepSpeedEngine

    def refuse(*arguments: object, **options: object) -> None:
        raise AssertionError("one rank has nothing to reduce, and knows its norm")

    with pytest.MonkeyPatch.context() as patch:
        for name in ("buffered_allreduce_fallback", "clip_fp32_gradients"):
            patch.setattr(DeepSpeedEngine, name, refuse)
        return train(world, spec)


def train_with_deepspeeds_clipping(world: World, spec: TrainSpec) -> int:
    from deepspeed.runtime.utils import clip_grad_norm_

    def clip(engine: Stage0Engine, gradients: list[Tensor], norm: float) -> None:
        limit = engine._config.gradient_clipping
        clip_grad_norm_(parameters=engine.model.parameters(), max_norm=limit)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Stage0Engine, "_clip", clip)
        return train(world, spec)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_one_rank_at_stage_0_clips_like_deepspeed_without_its_copies(
    tiny: TinyRuns, precision: str
) -> None:
    settings = (*CLIPPED, f"precision={precision}", "training.micro_batch_lanes=2")
    for function in (train_without_deepspeeds_copies, train_with_deepspeeds_clipping):
        spec = tiny.spec(tiny.path / function.__name__, *settings)
        assert tiny.ranks(1).run(function, spec) == [0]
    actual, expected = (losses(run) for run in sorted(tiny.path.iterdir()))
    assert actual == expected
    norms = [line["gradient_norm"] for line in metrics(next(tiny.path.iterdir()))]
    assert min(norms[1:]) > 0.3, "all steps are clipped"


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_stages_0_and_1_on_one_rank_differ_in_the_rounding_of_the_clipping_only(
    tiny: TinyRuns, precision: str
) -> None:
    """So on one GPU stage 1 is computed as stage 0 (`DeepSpeedConfig.computed_stage`)."""
    settings = (NO_EVALUATION, f"precision={precision}", "optimizer.gradient_clipping=0")
    for stage in ("0", "1"):
        tiny.trained(tiny.path / stage, *settings, *ZERO[stage], num_ranks=1)
    assert losses(tiny.path / "0") == losses(tiny.path / "1")


def train_as_on_one_gpu(world: World, spec: TrainSpec) -> int:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DeepSpeedConfig, "computed_stage", lambda self, **_: 0)
        return train(world, spec)


@pytest.mark.parametrize("order", [(train_as_on_one_gpu, train), (train, train_as_on_one_gpu)])
def test_a_checkpoint_of_stage_1_opens_whether_it_is_computed_as_stage_0_or_not(
    tiny: TinyRuns, order: tuple[Callable[[World, TrainSpec], int], ...]
) -> None:
    settings = (NO_EVALUATION, "training.checkpoint_interval_steps=10", *ZERO["1"])
    spec = tiny.spec(tiny.path, *settings)
    assert tiny.ranks(1).run(order[0], spec) == [0]
    expected = losses(tiny.path)
    shutil.rmtree(tiny.path / "checkpoints" / "step-00000020")
    assert tiny.ranks(1).run(order[1], spec) == [0]
    assert losses(tiny.path) == pytest.approx(expected, rel=1e-6)
    log = (tiny.path / "logs" / "rank-0.log").read_text()
    assert log.count("ZeRO stage 1 (on one GPU computed as stage 0)") == 1
