"""What a request to stop means for a training run: end in start-up, save and end after a step.

The signals are caught in `data_pipeline/system/signals.py`. Imports only the standard
library, so that `txl train` can install it before its first slow import.
"""

from contextlib import suppress
from pathlib import Path

from data_pipeline.system.signals import StopSignals, end_now, print_unbuffered

STOPPING = "stopping after this step, then saving; press Ctrl-C again to end now"
NOTHING_TRAINED = "stopped on request before the first step; nothing is lost"


def exit_before_first_step(_number: int) -> None:
    """End immediately with exit code 75: before the first step there is nothing to save."""
    print_unbuffered(NOTHING_TRAINED)
    end_now()


class StopRequest:
    """True once a stop signal has reached this process, or `stop_file` exists.

    All ranks of a launch have the same `stop_file`. Under Ray a rank runs in a thread, where no
    signal can be caught; the launcher creates the file. Without a launcher of ours (torchrun), the
    ranks agree on it when they have met.
    """

    def __init__(self, signals: StopSignals | None = None, stop_file: Path | None = None) -> None:
        self._signals, self._stop_file = signals, stop_file

    def __bool__(self) -> bool:
        return bool(self._signals) or (self._stop_file is not None and self._stop_file.exists())

    @property
    def has_file(self) -> bool:
        """Whether the request can reach other ranks, and theirs this one."""
        return self._stop_file is not None

    def share_by(self, stop_file: Path) -> None:
        """Use a file that the other ranks use too."""
        self._stop_file = stop_file
        if self._signals:  # has come before there was a file
            self.share()

    def share(self) -> None:
        """Create `stop_file`, so that the request reaches all ranks."""
        if self._stop_file is not None:
            with suppress(OSError):  # a full disk; the ranks then agree at their next step
                self._stop_file.touch()
