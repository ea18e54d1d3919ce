"""Training runs with an injected fault: a NaN on one rank, or a learning rate that is too high."""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

from tests.support.training_runs import opened_trainer
from txl_dist.errors import TxlError
from txl_dist.runtime.world import World
from txl_dist.training.engine.stages import Accept
from txl_dist.training.loop import Trainer
from txl_dist.training.spec import TrainSpec
from txl_dist.training.state import TrainState

Fault = Callable[[Trainer], None]


@contextmanager
def logged_events() -> Iterator[list[str]]:
    """What the loop and the recovery of a run log inside the context."""
    events: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: events.append(record.getMessage())  # type: ignore[method-assign]
    loggers = [logging.getLogger(f"txl_dist.training.{name}") for name in ("loop", "recovery")]
    for logger in loggers:
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
    try:
        yield events
    finally:
        for logger in loggers:
            logger.removeHandler(handler)


def train_with(world: World, spec: TrainSpec, *faults: Fault) -> tuple[int, str, list[str]]:
    """Run a spec with faults. Returns the exit code, the error's message, and the log's events."""
    with logged_events() as events, opened_trainer(world, spec) as trainer:
        for fault in faults:
            fault(trainer)
        try:
            trainer.run()
        except TxlError as error:
            return error.exit_code, str(error), events
    return 0, "", events


class NanHidden:
    """The inputs of the softmax are NaN on one rank, whenever it computes one of these steps."""

    def __init__(self, rank: int, steps: Sequence[int]) -> None:
        self.rank, self.steps = rank, steps

    def __call__(self, trainer: Trainer) -> None:
        def poisoned(_: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
            hidden_BTD, *others = inputs
            if trainer.state.step + 1 in self.steps and trainer.step.world.rank == self.rank:
                hidden_BTD = hidden_BTD * float("nan")
            return (hidden_BTD, *others)

        trainer.step.engine.model.softmax.register_forward_pre_hook(poisoned)


class NanWeight:
    """One weight of one rank becomes NaN before a step, once, as by a failing memory chip."""

    def __init__(self, rank: int, step: int) -> None:
        self.rank, self.step = rank, step

    def __call__(self, trainer: Trainer) -> None:
        pending = [self.step]

        def poison(module: nn.Module, _: object) -> None:
            if pending == [trainer.state.step + 1] and trainer.step.world.rank == self.rank:
                pending.clear()
                weight = next(p for p in module.parameters() if p.numel())
                weight.data.view(-1)[0] = float("nan")

        trainer.step.engine.model.layers[1].register_forward_pre_hook(poison)


class HighRate:
    """The learning rate of one step is `factor` times too high, whenever it is computed."""

    def __init__(self, step: int, *, factor: float = 1e3) -> None:
        self.step, self.factor = step, factor

    def __call__(self, trainer: Trainer) -> None:
        update = trainer.step.engine.step

        def too_high(lr: float, accept: Accept) -> None:
            is_high = trainer.state.step + 1 == self.step
            update(lr * self.factor if is_high else lr, accept)

        trainer.step.engine.step = too_high  # type: ignore[method-assign]


class SkipSteps:
    """The run begins with steps that a rollback has excluded."""

    def __init__(self, *steps: int) -> None:
        self.steps = steps

    def __call__(self, trainer: Trainer) -> None:
        divergence = trainer.state.divergence.model_copy(update={"skip_steps": self.steps})
        trainer.state = trainer.state.model_copy(update={"divergence": divergence})


class StopAfter:
    def __init__(self, step: int) -> None:
        self.step = step

    def __call__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        trainer.stop = self  # type: ignore[assignment]

    def __bool__(self) -> bool:
        return self.trainer.state.step + 1 >= self.step


def final_state(run: Any, step: int) -> TrainState:
    from txl_dist.checkpoint.directory import CheckpointDirectory
    from txl_dist.checkpoint.tensors import verify_checkpoint
    from txl_dist.training.state import load_state

    path = CheckpointDirectory(run).at(step)
    return load_state(path, verify_checkpoint(path))
