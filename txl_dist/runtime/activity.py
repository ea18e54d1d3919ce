"""Activity: what a rank is doing now, and how many seconds it has spent on each kind of work.

At any moment the main thread of a rank is in exactly one span (`data wait`, `forward`, ...), so the
seconds of all spans add up to the time since `reset`. The thread of `waiting.py` reads the
current activity for messages about ranks that are slow or do not respond.

The times are those of the host, from the monotonic clock. GPU kernels run asynchronously: their
time is in the span that waits for their results. That is `optimizer`, where the loss and the
gradient norm are read; with several ranks DeepSpeed also waits at the end of `backward`.
"""

import time
from dataclasses import dataclass, field
from enum import StrEnum


class Span(StrEnum):
    """A kind of work of the main thread."""

    START_UP = "start-up"
    """Until the end of the first step of this process, which compiles and allocates."""
    DATA_WAIT = "data wait"
    FORWARD = "forward"
    BACKWARD = "backward"
    """Contains the reduction of the gradients, and so the wait for slower ranks."""
    REDUCE = "reduce"
    """The collective of the step, which sums the losses."""
    OPTIMIZER = "optimizer"
    SAVE_WAIT = "save wait"
    EVALUATION = "evaluation"
    OTHER = "other"
    """Everything else in the loop, such as logging."""


STEP_SPANS = (Span.FORWARD, Span.BACKWARD, Span.REDUCE, Span.OPTIMIZER)


def _zeros() -> dict[Span, float]:
    return dict.fromkeys(Span, 0.0)


@dataclass(slots=True)
class Activity:
    """`name` is for messages: `start-up`, `step 12`, `checkpoint of step 12`, ..."""

    name: str = "start-up"
    span: Span = Span.START_UP
    num_steps: int = 0
    """Steps that this process has done since `reset`."""
    num_collectives: int = 0
    """Collectives of `World` that this process has begun."""
    unfinished_seconds: float = 0.0
    """Of the step in progress, in STEP_SPANS."""
    _seconds: dict[Span, float] = field(default_factory=_zeros, repr=False)
    _since: float = field(default_factory=time.monotonic, repr=False)

    def reset(self) -> None:
        """Begin with the start-up of a run, at 0 seconds."""
        self.name, self.span, self.num_steps = "start-up", Span.START_UP, 0
        self._seconds, self._since = _zeros(), time.monotonic()
        self.unfinished_seconds = 0.0

    def enter(self, span: Span) -> Span:
        """End the current span and begin `span`; returns the one that has ended."""
        now = time.monotonic()
        self._seconds[self.span] += now - self._since
        if self.span in STEP_SPANS:
            self.unfinished_seconds += now - self._since
        previous, self.span, self._since = self.span, span, now
        return previous

    def end_step(self) -> None:
        """Call at the end of each step. The first one belongs to the start-up."""
        self.enter(Span.OTHER)
        self.unfinished_seconds = 0.0
        self.num_steps += 1
        if self.num_steps == 1:
            for span in STEP_SPANS:
                self._seconds[Span.START_UP] += self._seconds[span]
                self._seconds[span] = 0.0

    def seconds(self) -> dict[Span, float]:
        """Seconds in each span until now."""
        self.enter(self.span)
        return self._seconds.copy()
