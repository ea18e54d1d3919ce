"""Goodput: productive seconds divided by the wall seconds since the first start of a run.

Productive are the seconds of the steps that are part of the final trajectory. The rest is lost to

    start-up     from the start of a rank to the end of its first step: imports of libraries, data,
                 resume, compilation
    data wait, save wait, evaluation     the time for which the training loop was blocked by them
    lost steps   steps that were trained again, and a step that never ended, as when a rank hung
    down         between the end of a process and the start of the next one
    other        the rest of the loop, such as logging

RUN/goodput.json has the sums of all processes until the last update, which is at most
UPDATE_SECONDS before the end of a killed process; the time after it counts as down. Only `down` is
the difference of two wall clocks; a negative one counts as 0. The times are those of rank 0: when
any rank waits, rank 0 waits too.
"""

import contextlib
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import Field, ValidationError

from data_pipeline.errors import counted
from data_pipeline.system.files import overwrite_page, remove_leftovers, write_file
from data_pipeline.system.progress import clock
from data_pipeline.system.strict import StrictModel
from txl_dist.runtime.activity import STEP_SPANS, Activity, Span
from txl_dist.training.observer import Observer, Values
from txl_dist.training.state import TrainState

if TYPE_CHECKING:
    from txl_dist.training.step import StepResult

UPDATE_SECONDS = 2.0
MAX_CHECKPOINTS = 20
"""Checkpoints whose productive seconds are stored."""
STEPS = "steps"
LOST, DOWN = "lost steps", "down"
LOSSES = (
    Span.START_UP.value, Span.EVALUATION.value, Span.SAVE_WAIT.value, Span.DATA_WAIT.value,
    LOST, DOWN, Span.OTHER.value,
)  # fmt: skip

log = logging.getLogger(__name__)


class GoodputFile(StrictModel):
    """RUN/goodput.json."""

    updated: float
    """Wall clock of the last update."""
    step: int
    """Last step that was trained."""
    restarts: int = Field(ge=0)
    """Starts of the run after a failure: not the first, and not those after a stop request."""
    lost_steps: int = Field(ge=0)
    is_complete: bool
    """Whether the last process trained to the end. The time until the run is extended does not
    count as down."""
    is_stopped: bool = False
    """The last process ended by a stop request, so the next start is no restart."""
    seconds: dict[str, float]
    """By cause: `steps` are productive."""
    productive: dict[int, float]
    """Productive seconds up to a checkpoint, by step."""

    @property
    def goodput(self) -> float:
        """Productive seconds / wall seconds."""
        return goodput_of(self.seconds)


class Goodput(Observer):
    """The seconds of a run by cause, on rank 0. `activity` measures this process.

    Adds metrics to each line, and logs a summary at the end.
    """

    def __init__(
        self,
        path: Path,
        activity: Activity,
        *,
        step: int,
        kept_step: int | None = None,
        reached_step: int = 0,
        is_finished: bool = False,
        may_write: Callable[[], bool] = lambda: True,
    ) -> None:
        """Begin at `step`: steps of earlier processes after `kept_step` are lost (None: `step`).

        `reached_step`: the last step that they are known to have trained. It may be later than
        their last update. `is_finished`: the run has no steps left. `may_write`: False once another
        process writes the file.
        """
        self._path, self._activity, self._may_write = path, activity, may_write
        self._updated_at = 0.0
        self._step, self._is_complete, self._is_stopped = step, False, False
        self._restarts = self._lost_steps = 0
        self._seconds: defaultdict[str, float] = defaultdict(float)
        """Seconds of earlier processes, corrected for lost steps of this process."""
        self._productive: dict[int, float] = {step: 0.0}
        with contextlib.suppress(OSError):
            remove_leftovers(path)
        if earlier := read_goodput(path):
            kept_step = step if kept_step is None else kept_step
            self._continue(earlier, kept_step, reached_step)
            self._step = step
        self._is_complete &= is_finished
        if not self._is_complete:
            self._write(sync=True)  # counts this start, even if it does not reach a step

    def _continue(self, earlier: GoodputFile, step: int, reached_step: int) -> None:
        self._seconds.update(earlier.seconds)
        self._productive = dict(sorted(earlier.productive.items()))
        # Steps after the last update: their time counts as down.
        steps_after_update = max(0, reached_step - max(earlier.step, step))
        self._lost_steps = earlier.lost_steps + steps_after_update
        self._restarts = earlier.restarts
        self._step, self._is_complete = earlier.step, earlier.is_complete
        if not earlier.is_complete:
            self._restarts += not earlier.is_stopped
            # From the last update to the start of `activity`.
            process_seconds = sum(self._activity.seconds().values())
            self._seconds[DOWN] += max(0.0, time.time() - process_seconds - earlier.updated)
        self._rewind(step)

    @property
    def seconds(self) -> defaultdict[str, float]:
        """Seconds by cause since the first start; their sum is the wall time."""
        seconds = self._seconds.copy()
        for span, spent in self._activity.seconds().items():
            seconds[STEPS if span in STEP_SPANS else span.value] += spent
        unfinished = self._activity.unfinished_seconds
        seconds[STEPS] -= unfinished
        seconds[LOST if self._activity.num_steps else Span.START_UP.value] += unfinished
        return seconds

    def line(self, state: TrainState, values: Values) -> None:
        values |= {
            "goodput": goodput_of(self.seconds),
            "restarts": self._restarts,
            "lost_steps": self._lost_steps,
        }

    def step(self, state: TrainState, result: "StepResult") -> None:
        self._step, self._is_complete = state.step, False
        if time.monotonic() - self._updated_at >= UPDATE_SECONDS:
            self._write(sync=False)

    def save(self, state: TrainState) -> None:
        self._step = state.step
        self._productive[state.step] = self.seconds[STEPS]
        first, *later = self._productive.items()
        self._productive = dict([first, *later[1 - MAX_CHECKPOINTS :]])
        self._write(sync=True)

    def rollback(self, state: TrainState, reached_step: int) -> None:
        self._step = reached_step
        self._rewind(state.step)

    def end(self, state: TrainState, *, is_complete: bool, is_stopped: bool) -> None:
        self._is_stopped = is_stopped
        has_trained = self._activity.num_steps > 0
        seconds = self.seconds
        # A run that was finished already stays as it is; one may end after a last evaluation.
        if has_trained or (is_complete and not self._is_complete):
            self._step, self._is_complete = state.step, is_complete
            self._write(sync=True, seconds=seconds)
        if has_trained:
            log.info("%s", self._summary(seconds))

    def _rewind(self, step: int) -> None:
        """The run goes back to `step`: the time of the steps after it was lost."""
        if step < self._step:
            seconds = self.seconds[STEPS] - self._productive_until(step)
            self._seconds[STEPS] -= seconds
            self._seconds[LOST] += seconds
            self._lost_steps += self._step - step
            self._productive = {s: p for s, p in self._productive.items() if s <= step}
        self._step = step

    def _summary(self, seconds: dict[str, float]) -> str:
        wall_seconds = max(1e-9, sum(seconds.values()))
        shares = {cause: seconds.get(cause, 0.0) / wall_seconds for cause in LOSSES}
        return " | ".join(
            (
                f"summary | {counted(self._restarts, 'restart')}, "
                f"{counted(self._lost_steps, 'step')} lost",
                f"goodput {goodput_of(seconds):.1%} of {clock(wall_seconds)}",
                *(f"{cause} {share:.1%}" for cause, share in shares.items() if share >= 5e-4),
            )
        )

    def _productive_until(self, step: int) -> float:
        """Productive seconds up to a checkpoint before the current step."""
        # If it is not stored any more: by the mean time of a step.
        return self._productive.get(step, self.seconds[STEPS] * step / self._step)

    def _write(self, *, sync: bool, seconds: dict[str, float] | None = None) -> None:
        self._updated_at = time.monotonic()
        if not self._may_write():
            return
        content = GoodputFile(
            updated=time.time(),
            step=self._step,
            restarts=self._restarts,
            lost_steps=self._lost_steps,
            is_complete=self._is_complete,
            is_stopped=self._is_stopped,
            seconds=dict(seconds or self.seconds),
            productive=self._productive,
        )
        with contextlib.suppress(OSError):  # a full disk; training continues without this file
            text = content.model_dump_json(indent=1)
            if sync:
                write_file(self._path, text.encode())
            else:
                overwrite_page(self._path, text)


def goodput_of(seconds: Mapping[str, float]) -> float:
    """The share of the productive seconds of all `seconds` by cause."""
    return seconds.get(STEPS, 0.0) / max(1e-9, sum(seconds.values()))


def read_goodput(path: Path) -> GoodputFile | None:
    """The file, or None if it does not exist or, with a warning, is damaged."""
    try:
        return GoodputFile.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValidationError) as error:
        log.warning("%s cannot be read (%s): the goodput before is not known", path, error)
        return None
