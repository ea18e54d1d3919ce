"""LaunchOutput: the lines that a launch prints, its own and those of rank 0's log.

Until the first step, a launch names its stages, and is never silent for long:

    2 ranks start          by the launcher        (on Ray: Ray starts, Ray is up after 9 s)
    rank 0 is up           by rank 0, which has imported its libraries
    2 of 2 ranks are up    the process group exists
    the model is built     with the optimizer
    first batch            then the first step begins

If no line was printed for STATUS_SECONDS, the launcher prints what it waits for; after the first
batch, for TRAINING_SECONDS.
"""

import re
import threading
import time

from txl_dist.launch.launcher import OnLine
from txl_dist.training.follow import FIRST_BATCH, step_of

STATUS_SECONDS = 4.0
"""Before the first batch, a status line is printed after this time without output."""
TRAINING_SECONDS = 30.0
"""The same between the first batch and the first step line, which may come after many steps."""
_RECORD = re.compile(r"^\d\d:\d\d:\d\d (?!rank \d+ failed$)")
"""First line of a log record. Failures are excluded, as are the lines of tracebacks: the supervisor
prints one line per failure."""


class LaunchOutput:
    """Prints through `on_line`, from several threads."""

    def __init__(self, on_line: OnLine) -> None:
        self._on_line, self._lock = on_line, threading.Lock()
        self._began = self._last_print = time.monotonic()
        self.has_stepped = False
        """Whether the running ranks have printed a step."""
        self.has_records = False
        """Whether rank 0 has written anything to its log."""
        self.is_training = False
        """Whether the first step of the running ranks has begun."""
        self.last_step = 0
        """The last step that was printed since the launch began."""

    @property
    def silent_seconds(self) -> float:
        """Time since the last line."""
        return time.monotonic() - self._last_print

    @property
    def status_is_due(self) -> bool:
        """Whether the launch was silent for too long."""
        limit_seconds = TRAINING_SECONDS if self.is_training else STATUS_SECONDS
        return not self.has_stepped and self.silent_seconds > limit_seconds

    def begin_ranks(self) -> None:
        """The ranks start, for the first time or again."""
        self._began = time.monotonic()
        self.has_stepped = self.has_records = self.is_training = False

    def print_wait(self) -> None:
        """Print what the ranks do before their first step line."""
        self.print(f"waiting {time.monotonic() - self._began:.0f} s for {self.describe_ranks()}")

    def describe_ranks(self) -> str:
        """What the running ranks do, as far as their log says."""
        if self.is_training:
            return "the first step line; the ranks train"
        work = "load data and model" if self.has_records else "import their libraries"
        return f"the ranks, which {work}"

    def print(self, line: str) -> None:
        with self._lock:  # the log of rank 0 is followed in another thread
            self._last_print = time.monotonic()
            try:
                self._on_line(line)
            except OSError:  # the terminal or the reader of a pipe is gone; training goes on
                self._on_line = lambda line: None

    def print_record(self, line: str) -> None:
        """A line of rank 0's log, if it is not part of a traceback."""
        if _RECORD.match(line):
            self.print_log_line(line)

    def print_log_line(self, line: str) -> None:
        """Any line of rank 0's log."""
        if (step := step_of(line)) is not None:
            self.has_stepped, self.last_step = True, step
        self.has_records = True
        self.is_training |= line.endswith(f" {FIRST_BATCH}")
        self.print(line)

    def describe_loss(self, newest_step: int | None) -> str:
        """How many steps a resume from the newest checkpoint has to repeat, in words."""
        num_lost = max(0, self.last_step - (newest_step or 0))
        if num_lost == 0:
            return "no step is lost"
        # Steps between two lines of the log are not printed.
        return f"at least {num_lost} step{'s are' if num_lost > 1 else ' is'} lost"
