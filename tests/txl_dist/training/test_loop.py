"""A run computes the same as a plain PyTorch loop, and its observers see every event.

The loop below shares only the model and the order of tokens with the project. The other tests
compare runs with each other (ranks, stages, resumes); a setting that never reaches the optimizer
would not fail any of them.
"""

import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from data_pipeline.shards.shard_reader import open_split
from data_pipeline.streams.lanes import LanePlan
from data_pipeline.streams.order import ORDERINGS
from data_pipeline.streams.segments import SegmentReader
from tests.support.diverging_runs import NanHidden
from tests.support.plain_optimizers import plain_optimizer
from tests.support.training_runs import (
    NO_EVALUATION,
    ZERO,
    TinyRuns,
    losses,
    metrics,
    opened_trainer,
    train,
)
from txl_dist.checkpoint.tensors import load_model
from txl_dist.config.run_config import RunConfig
from txl_dist.model.transformer_xl import TransformerXL
from txl_dist.runtime.world import World
from txl_dist.training.report import Observer, Values
from txl_dist.training.spec import TrainSpec
from txl_dist.training.state import TrainState

# Both compute in fp32, but sum in different orders. Largest difference over all cases: 8e-7 in a
# weight. A wrong setting changes losses by 1e-3 or more.
TOLERANCE = 1e-5
# Newton-Schulz iterations enlarge small singular values, and with them their rounding, 500 times.
# Largest difference of a weight here: 4.3e-3, in a projection of distances; with a momentum of 0.8
# instead of 0.95 it is 5e-2. Losses and gradient norms agree as for the others.
MUON_WEIGHT_TOLERANCE = 1e-2
# Every value differs from its default and from all others: an exchanged or lost one changes losses.
SETTINGS = (
    NO_EVALUATION,
    "optimizer.lr=0.02",
    "optimizer.min_lr=0.003",
    "optimizer.beta1=0.7",
    "optimizer.beta2=0.95",
    "optimizer.eps=1e-5",
    "optimizer.weight_decay=0.3",
    "optimizer.gradient_clipping=1.6",
    "optimizer.warmup_steps=4",
    "training.num_steps=20",
)
NUM_STEPS, WARMUP_STEPS, DECAY_STEPS, LR, MIN_LR, CLIPPING = 20, 4, 6, 0.02, 0.003, 1.6
RULES = {
    "adamw": "optimizer={schedule: cosine}",
    "adam": "optimizer={name: adam, schedule: linear}",
    "lamb": f"optimizer={{name: lamb, schedule: wsd, decay_steps: {DECAY_STEPS}}}",
    "muon": "optimizer={name: muon, schedule: inverse_sqrt}",
}
"""Every optimizer, each with another schedule."""


def plain_run(
    config: RunConfig, dataset: Path, optimizer_name: str
) -> tuple[TransformerXL, list[dict[str, float]]]:
    """The trained model, and loss, rate and gradient norm of every step."""
    source = open_split(dataset, "train")
    plan = LanePlan(num_tokens=int(source.block_tokens.sum()), num_lanes=5, tgt_len=3)
    segments = SegmentReader(
        source,
        plan,
        lanes=range(5),
        reset="document",
        ordering=ORDERINGS["blocks"],
        seed=3,
    )
    model = TransformerXL(replace(config.model, vocab_size=257, attention="reference"), seed=3)
    optimizer = plain_optimizer(optimizer_name, model)
    schedule = config.optimizer.schedule
    memory, lines = model.empty_memory(5), []
    for step, segment in enumerate(segments.read(0, NUM_STEPS), start=1):
        columns = (segment.input, segment.target, segment.age)
        nats_BT, memory = model(*map(torch.from_numpy, columns), memory)
        loss = nats_BT.sum() / (segment.target >= 0).sum()
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), CLIPPING)
        rate = rate_of(step, schedule)
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        lines.append({"loss": loss.item(), "lr": rate, "gradient_norm": norm.item()})
    return model, lines


def rate_of(step: int, schedule: str) -> float:
    """Linear up to LR, then by the schedule."""
    if step <= WARMUP_STEPS:
        return LR * step / WARMUP_STEPS
    if schedule == "inverse_sqrt":
        return LR * (WARMUP_STEPS / step) ** 0.5
    remaining, decay_steps = NUM_STEPS - step, NUM_STEPS - WARMUP_STEPS
    if schedule == "cosine":
        angle = math.pi * (1 - remaining / decay_steps)
        return (LR + MIN_LR) / 2 + (LR - MIN_LR) / 2 * math.cos(angle)
    if schedule == "wsd":
        decay_steps = DECAY_STEPS
    return min(LR, MIN_LR + (LR - MIN_LR) * remaining / decay_steps)


CASES = [
    ("adamw", "0"), ("adamw", "1"), ("adamw", "3-all-spread"),
    ("lamb", "0"), ("muon", "1"),
]  # fmt: skip
SLOW_CASES = [
    ("adamw", "2"), ("adamw", "3"), ("adam", "0"), ("adam", "1"), ("adam", "2"),
    ("adam", "3-all-spread"), ("muon", "0"), ("muon", "2"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("optimizer", "stage"),
    [*CASES, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW_CASES)],
)
def test_losses_rates_norms_and_weights_are_those_of_a_plain_loop(
    tiny: TinyRuns, optimizer: str, stage: str
) -> None:
    # In this order: the first override replaces the whole section.
    spec = tiny.spec(tiny.path, RULES[optimizer], *SETTINGS, *ZERO[stage])
    assert tiny.ranks(1).run(train, spec) == [0]
    model, expected = plain_run(spec.config, tiny.dataset, optimizer)
    norms = [line["gradient_norm"] for line in expected]
    assert min(norms) < CLIPPING < max(norms), "some steps are clipped, others are not"
    actual = [{name: line[name] for name in expected[0]} for line in metrics(tiny.path)]
    assert len(actual) == NUM_STEPS
    for line, plain in zip(actual, expected, strict=True):
        assert line == pytest.approx(plain, rel=TOLERANCE)
    trained, _, _ = load_model(tiny.path / "checkpoints" / f"step-{NUM_STEPS:08d}")
    weights = dict(trained.named_parameters())
    atol = MUON_WEIGHT_TOLERANCE if optimizer == "muon" else TOLERANCE
    for name, weight in model.named_parameters():
        torch.testing.assert_close(weights[name], weight, rtol=TOLERANCE, atol=atol)


@pytest.mark.parametrize("option", ["model.dropout", "model.dropatt"])
def test_a_small_dropout_rate_has_an_effect(tiny: TinyRuns, option: str) -> None:
    one_step = (
        NO_EVALUATION,
        "training.num_steps=1",
        "optimizer.warmup_steps=0",
        "model.init_std=0.5",  # with the default, attention hardly affects the first loss
    )
    for rate in (0, 0.05):
        tiny.trained(tiny.path / str(rate), *one_step, f"{option}={rate}", num_ranks=1)
    without, with_dropout = losses(tiny.path / "0"), losses(tiny.path / "0.05")
    assert with_dropout != pytest.approx(without, rel=TOLERANCE)


# --- observers ------------------------------------------------------------------------------------


class Everything(Observer):
    """Records all events, and adds a metric."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.events: list[tuple[str, int]] = []
        for name in ("start", "segment", "step", "report", "score", "rollback", "end"):
            setattr(self, name, partial(self.record, name))

    def record(self, name: str, subject: Any, *_: object, **__: object) -> None:
        """An event of a step, which is the number, a state or a score."""
        self.events.append((name, subject if isinstance(subject, int) else subject.step))

    def line(self, state: TrainState, values: Values) -> None:
        values["answer"] = 42.0

    def save(self, state: TrainState) -> None:
        self.world.barrier()  # a collective call, after the same step on all ranks
        self.record("save", state)


def train_observed(world: World, spec: TrainSpec, *faults: Any) -> list[tuple[str, int]]:
    """The events that an observer sees."""
    with opened_trainer(world, spec) as trainer:
        trainer.observers.append(everything := Everything(world))
        for fault in faults:
            fault(trainer)
        trainer.run()
    return everything.events


def of_step(step: int, *more: str) -> list[tuple[str, int]]:
    return [(name, step) for name in ("segment", "step", *more)]


def test_an_observer_sees_every_event_on_all_ranks_and_adds_a_metric(tiny: TinyRuns) -> None:
    settings = (
        "training.num_steps=4", "training.log_interval_steps=2", "optimizer.warmup_steps=2",
        "training.checkpoint_interval_steps=2", "evaluation.max_tokens=100",
    )  # fmt: skip
    seen = tiny.ranks(2).run(train_observed, tiny.spec(tiny.path, *settings))
    expected = [
        ("start", 0),
        *of_step(1),
        *of_step(2, "report", "save"),
        *of_step(3),
        *of_step(4, "report", "save", "score"),
        ("end", 4),
    ]
    assert seen == [expected, expected]
    assert [line.get("answer") for line in metrics(tiny.path) if "loss" in line] == [42.0, 42.0]


def test_an_observer_is_told_of_a_rollback_before_the_steps_after_it(tiny: TinyRuns) -> None:
    settings = (
        "training.num_steps=4", "training.log_interval_steps=4", "evaluation.split=null",
        "training.checkpoint_interval_steps=1", "divergence.policy=rollback",
    )  # fmt: skip
    spec = tiny.spec(tiny.path, *settings)
    (seen,) = tiny.ranks(1).run(train_observed, spec, NanHidden(rank=0, steps=(3,)))
    at = seen.index(("rollback", 1))
    assert seen[at - 2 : at] == [("save", 2), ("segment", 3)]
    assert seen[at + 1 : at + 3] == [("segment", 2), ("step", 2)]  # excluded: no update
