"""Goodput: productive seconds divided by the wall seconds since the first start of a run.

Productive are the seconds of the steps that are part of the final trajectory. The rest is lost to

    start-up     from the start of a rank to the end of its first step: imports of libraries, data,
                 resume, compilation
    data wait, save wait, evaluation     the time for which the training loop was blocked by them
    lost steps   steps that were trained again, and a step that never ended, as when a rank hung
    down         between the end of a process and the start of the next one
    other        the rest of the loop, such as logging

`WallTime` adds them up from the events of a run (txl_dist/events.py), which have the sums of a
process at each of its checkpoints, rollbacks, and at its end. What follows the last one of a killed
process is lost until its launcher or another rank has noticed, and then down. Only that is the
difference of two wall clocks; a negative one counts as 0. The times are those of rank 0: when any
rank waits, rank 0 waits too.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Self

from data_pipeline.errors import clock, counted
from txl_dist.events import AttemptStart, Event
from txl_dist.runtime.activity import STEP_SPANS, Activity, Span

STEPS = "steps"
LOST, DOWN = "lost steps", "down"
LOSSES = (
    Span.START_UP.value, Span.EVALUATION.value, Span.SAVE_WAIT.value, Span.DATA_WAIT.value,
    LOST, DOWN, Span.OTHER.value,
)  # fmt: skip


class WallTime:
    """The seconds of a run by cause, until the last event that has sums."""

    def __init__(self) -> None:
        self.restarts = 0
        """Starts after a failure: not the first, and not those after a stop request or the end."""
        self.lost_steps = 0
        self.productive: dict[int, float] = {}
        """Productive seconds up to a checkpoint, by step."""
        self._earlier: defaultdict[str, float] = defaultdict(float)
        """Of earlier processes, and corrections of this one for lost steps."""
        self._process: Mapping[str, float] = {}
        """Of the newest process, at its last event with sums."""
        self._known_at: float | None = None
        """Wall clock of that event; None: there was no attempt."""
        self._noticed_at = 0.0
        """Wall clock of the newest event at which the process lived, or its end was noticed."""
        self._step = 0
        self._has_begun = self._has_ended = self._is_stopped = self._is_complete = False
        """Of the newest attempt: whether a step has begun, whether it has given its last sums,
        whether it was stopped on request, and whether no step is left."""

    @classmethod
    def of(cls, events: Iterable[Event]) -> Self:
        """The sums of all events of a run."""
        time = cls()
        for event in events:
            time.take(event)
        return time

    @property
    def seconds(self) -> Mapping[str, float]:
        """Seconds by cause since the first start; 0 for a cause that it does not have."""
        return self.with_process(self._process)

    def with_process(self, process: Mapping[str, float]) -> Mapping[str, float]:
        """The same with newer sums of the newest process."""
        seconds = self._earlier.copy()
        for cause, spent in process.items():
            seconds[cause] += spent
        return seconds

    def __str__(self) -> str:
        """`3 restarts, 41 steps lost | goodput 96.2% of 312:08:10 | start-up 0.4% | down 1.2%`."""
        wall_seconds = max(1e-9, sum(self.seconds.values()))
        shares = {cause: self.seconds.get(cause, 0.0) / wall_seconds for cause in LOSSES}
        return " | ".join(
            (
                f"{counted(self.restarts, 'restart')}, {counted(self.lost_steps, 'step')} lost",
                f"goodput {goodput_of(self.seconds):.1%} of {clock(wall_seconds)}",
                *(f"{cause} {share:.1%}" for cause, share in shares.items() if share >= 5e-4),
            )
        )

    def take(self, event: Event) -> None:
        """Continue with the next event of the run."""
        if event.kind not in ("ranks_started", "start"):
            self._noticed_at = event.time
        if event.start is not None:
            self._begin(event, event.start)
        self._has_begun |= event.kind == "first_batch"
        # A run that was finished already stays as it is.
        if event.seconds is not None and (self._has_begun or not self._is_complete):
            self._process, self._known_at = event.seconds, event.time
            if event.kind == "rollback":
                self._step = event.reached_step
                self._rewind(event.step or 0, event.reached_step)
            elif event.kind == "save":
                self.productive[event.step or 0] = self.seconds[STEPS]
            else:
                self._is_complete, self._has_ended = event.kind == "finished", True
            self._step = event.step or 0
        self._is_stopped |= event.kind == "stopped"

    def _begin(self, event: Event, start: AttemptStart) -> None:
        began, step = event.time - start.process_seconds, event.step or 0
        if self._known_at is not None and not self._is_complete:
            self.restarts += not self._is_stopped
            ended_at = self._known_at
            if not self._has_ended:
                ended_at = max(ended_at, min(self._noticed_at, began))
            lost = LOST if self._has_begun else Span.START_UP.value
            self._earlier[lost] += ended_at - self._known_at
            self._earlier[DOWN] += max(0.0, began - ended_at)
        self._earlier, self._process = defaultdict(float, self.seconds), {}
        self._rewind(step, max(event.reached_step, self._step))
        self._is_complete &= step >= start.num_steps
        self._has_begun = self._has_ended = self._is_stopped = False
        self._known_at = event.time
        self._process = {} if self._is_complete else {Span.START_UP: start.process_seconds}
        self.productive.setdefault(step, self._earlier[STEPS])

    def _rewind(self, step: int, reached_step: int) -> None:
        """The run goes back to `step`: the time of the steps after it was lost."""
        if step < reached_step:
            self.lost_steps += reached_step - step
            productive = self.seconds.get(STEPS, 0.0)
            # If its event was lost: by the mean time of a step.
            kept = self.productive.get(step, productive * step / max(step, self._step, 1))
            self._earlier[STEPS] -= productive - kept
            self._earlier[LOST] += productive - kept
            self.productive = {s: p for s, p in self.productive.items() if s <= step}
        self._step = step


def goodput_of(seconds: Mapping[str, float]) -> float:
    """The share of the productive seconds of all `seconds` by cause."""
    return seconds.get(STEPS, 0.0) / max(1e-9, sum(seconds.values()))


def process_seconds(activity: Activity) -> dict[str, float]:
    """The seconds of a process until now by cause; its unfinished step is lost."""
    seconds: defaultdict[str, float] = defaultdict(float)
    for span, spent in activity.seconds().items():
        seconds[STEPS if span in STEP_SPANS else span.value] += spent
    seconds[STEPS] -= activity.unfinished_seconds
    lost = LOST if activity.num_steps else Span.START_UP.value
    seconds[lost] += activity.unfinished_seconds
    return dict(seconds)
