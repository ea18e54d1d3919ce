"""Observer: something that watches a run without taking part in it, such as a monitor or a tracker.

    start -> (segment -> step -> line -> save) ... -> end
                          score, divergence and rollback at any time

The loop calls each method of all observers on every rank, after the same step. No observer depends
on the others: a value that one adds to a line is not read before `report`. An observer that writes
only on rank 0 exists only there; one with collectives exists on every rank.
"""

from typing import TYPE_CHECKING

from txl_dist.training.state import TrainState

if TYPE_CHECKING:
    from txl_dist.training.scores import StepScore
    from txl_dist.training.step import StepResult

Values = dict[str, float]
"""Metrics by name."""


class Observer:
    """Does nothing at any event. Subclasses override what they need."""

    def start(self, state: TrainState) -> None:
        """The run begins at `state`, after a resume if it has steps."""

    def segment(self, step: int) -> None:
        """Step number `step` begins: the loop is about to wait for its segment."""

    def step(self, state: TrainState, result: "StepResult") -> None:
        """A step is done, or was skipped or rejected. `state` is that after it."""

    def line(self, state: TrainState, values: Values) -> None:
        """A line of metrics is due for the steps in `state.unreported`: add to its values."""

    def report(self, state: TrainState, values: Values) -> None:
        """The values of that line are complete."""

    def save(self, state: TrainState) -> None:
        """A checkpoint of `state` is going to be saved."""

    def score(self, score: "StepScore", gain: float | None) -> None:
        """A step has a score, or never will. `gain`: that of `StepScore.gain_over` the best one."""

    def divergence(self, step: int, reason: str) -> None:
        """Step number `step` has diverged; what follows depends on `divergence.policy`."""

    def rollback(self, state: TrainState, reached_step: int) -> None:
        """The run has returned to `state` from `reached_step`."""

    def end(self, state: TrainState, *, is_complete: bool, is_stopped: bool) -> None:
        """The run ends at `state`. `is_complete`: no step is left. `is_stopped`: on request."""
