"""An observer is one class: it sees every event, adds metrics, and may call collectives."""

from pathlib import Path
from typing import Any

from tests.support.diverging_runs import NanHidden
from tests.support.gloo_ranks import RankGroups
from tests.support.training_runs import metrics, opened_trainer, tiny_spec
from txl_dist.runtime.world import World
from txl_dist.training.report import Observer, Values
from txl_dist.training.scores import StepScore
from txl_dist.training.spec import TrainSpec
from txl_dist.training.state import TrainState
from txl_dist.training.step import StepResult


class Everything(Observer):
    """Records all events, and adds a metric."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.events: list[tuple[str, int]] = []

    def start(self, state: TrainState) -> None:
        self.events.append(("start", state.step))

    def segment(self, step: int) -> None:
        self.events.append(("segment", step))

    def step(self, state: TrainState, result: StepResult) -> None:
        self.events.append(("step", state.step))

    def line(self, state: TrainState, values: Values) -> None:
        values["answer"] = 42.0

    def report(self, state: TrainState, values: Values) -> None:
        self.events.append(("report", state.step))

    def save(self, state: TrainState) -> None:
        self.world.barrier()  # a collective call, after the same step on all ranks
        self.events.append(("save", state.step))

    def score(self, score: StepScore, gain: float | None) -> None:
        self.events.append(("score", score.step))

    def rollback(self, state: TrainState, reached_step: int) -> None:
        self.events.append(("rollback", state.step))

    def end(self, state: TrainState, *, is_complete: bool, is_stopped: bool) -> None:
        self.events.append(("end", state.step))


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


def test_an_observer_sees_every_event_on_all_ranks_and_adds_a_metric(
    ranks: RankGroups, dataset: Path, tmp_path: Path
) -> None:
    settings = (
        "training.num_steps=4", "training.log_interval_steps=2", "optimizer.warmup_steps=2",
        "training.checkpoint_interval_steps=2", "evaluation.max_tokens=100",
    )  # fmt: skip
    seen = ranks(2).run(train_observed, tiny_spec(dataset, tmp_path, *settings))
    expected = [
        ("start", 0),
        *of_step(1),
        *of_step(2, "report", "save"),
        *of_step(3),
        *of_step(4, "report", "save", "score"),
        ("end", 4),
    ]
    assert seen == [expected, expected]
    assert [line.get("answer") for line in metrics(tmp_path) if "loss" in line] == [42.0, 42.0]


def test_an_observer_is_told_of_a_rollback_before_the_steps_after_it(
    ranks: RankGroups, dataset: Path, tmp_path: Path
) -> None:
    settings = (
        "training.num_steps=4", "training.log_interval_steps=4", "evaluation.split=null",
        "training.checkpoint_interval_steps=1", "divergence.policy=rollback",
    )  # fmt: skip
    spec = tiny_spec(dataset, tmp_path, *settings)
    (seen,) = ranks(1).run(train_observed, spec, NanHidden(rank=0, steps=(3,)))
    at = seen.index(("rollback", 1))
    assert seen[at - 2 : at] == [("save", 2), ("segment", 3)]
    assert seen[at + 1 : at + 3] == [("segment", 2), ("step", 2)]  # excluded: no update
