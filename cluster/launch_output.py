"""LaunchOutput: the lines that a launch prints, its own and those of rank 0's log."""

import re
import threading
import time

from txl_dist.launch.launcher import OnLine
from txl_dist.training.follow import step_of

_RECORD = re.compile(r"^\d\d:\d\d:\d\d (?!rank \d+ failed$)")
"""First line of a log record. Failures are excluded, as are the lines of tracebacks: the supervisor
prints one line per failure."""


class LaunchOutput:
    """Prints through `on_line`, from several threads."""

    def __init__(self, on_line: OnLine) -> None:
        self._on_line, self._lock = on_line, threading.Lock()
        self._last_print = time.monotonic()
        self.has_stepped = False
        """Whether the running ranks have printed a step."""
        self.last_step = 0
        """The last step that was printed since the launch began."""

    @property
    def silent_seconds(self) -> float:
        """Time since the last line."""
        return time.monotonic() - self._last_print

    def print(self, line: str) -> None:
        with self._lock:  # the log of rank 0 is followed in another thread
            self._last_print = time.monotonic()
            self._on_line(line)

    def print_record(self, line: str) -> None:
        """A line of rank 0's log."""
        if _RECORD.match(line):
            if (step := step_of(line)) is not None:
                self.has_stepped, self.last_step = True, step
            self.print(line)

    def describe_loss(self, newest_step: int | None) -> str:
        """How many steps a resume from the newest checkpoint has to repeat, in words."""
        num_lost = max(0, self.last_step - (newest_step or 0))
        if num_lost == 0:
            return "no step is lost"
        # Steps between two lines of the log are not printed.
        return f"at least {num_lost} step{'s are' if num_lost > 1 else ' is'} lost"
