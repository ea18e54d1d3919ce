"""Supervision of ranks: why they ended, and whether they are restarted.

    RankEnd ... -> failure_of -> RunFailure -> RestartBudget -> restart, or raise

The budget is shared with the Ray launcher, which learns of failures from Ray Train instead.
"""

import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from data_pipeline.errors import printable
from data_pipeline.system.signals import STOP_SIGNALS
from txl_dist.checkpoint.directory import resume_advice
from txl_dist.errors import OUTAGES, LostRankError, PreemptedError, TxlError
from txl_dist.training.run_directory import RunDirectory

LAST_BYTES = 8192
"""Bytes at the end of a log that are searched for the error that ended its process."""
_TRACEBACK = "Traceback (most recent call last):"
MAX_CHARS = 300
"""Longest excerpt of that error."""
MAX_DELAY_SECONDS = 60.0
"""Longest wait between a failure and the restart."""


class RestartBudget:
    """Counts failures since the newest checkpoint grew, and allows `max_restarts` of them.

    A run of weeks with one failure a day therefore never exhausts the budget; ranks that fail
    before they save do. Every reset needs a checkpoint of a later step than all before, so a loop
    that falls back to older checkpoints ends too.
    """

    def __init__(self, max_restarts: int) -> None:
        self.max_restarts = max_restarts
        self.num_failures = 0
        """Failures since the newest checkpoint grew."""
        self._newest_step = -1

    def allows_restart(self, *, newest_step: int | None) -> bool:
        """Count a failure; `newest_step` is that of the newest complete checkpoint, if any."""
        self.begin_at(newest_step)
        self.num_failures += 1
        return self.num_failures <= self.max_restarts

    def begin_at(self, newest_step: int | None) -> None:
        """Forget the failures before this checkpoint, if it is later than all before."""
        if newest_step is not None and newest_step > self._newest_step:
            self._newest_step, self.num_failures = newest_step, 0

    def exhausted_error(self, event: str, directory: RunDirectory) -> TxlError:
        """The error after a failure that the budget does not allow; `event` says what failed."""
        restarts = f"{self.max_restarts} restart{'' if self.max_restarts == 1 else 's'}"
        setting = "(--max-restarts, or ray.max_restarts with Ray)"
        failure = (
            f"the ranks failed again after {restarts} without a new checkpoint {setting}; the last "
            f"failure: {event}"
            if self.max_restarts
            else f"{event}; no restart is allowed {setting}"
        )
        return TxlError(
            f"{failure}. Logs of all ranks: {directory.logs}. {resume_advice(directory.path)}"
        )


def restart_delay_seconds(num_failures: int) -> float:
    """How long to wait before a restart: 0 after one failure without a new checkpoint, then 1, 2,
    4, ... up to MAX_DELAY_SECONDS. A file server or network that failed may work again by then.
    """
    return 0.0 if num_failures <= 1 else min(MAX_DELAY_SECONDS, 2.0 ** (num_failures - 2))


@dataclass(frozen=True, slots=True)
class RankEnd:
    """How one rank ended."""

    rank: int
    code: int
    """Exit code, or minus the number of the signal that killed the process."""
    error: TxlError | None
    hung: bool
    """The launcher killed it, because it did not end after a failure or a stop request."""


@dataclass(frozen=True, slots=True)
class RunFailure:
    """What ended a run."""

    error: TxlError
    event: str
    """The failure without advice, for the line about the restart."""
    can_restart: bool
    """A restart can help: a rank was killed, hung, was lost, or ended without a TxlError; or
    storage has failed after the launch had saved."""


def failure_of(
    ends: Sequence[RankEnd],
    *,
    stop_requested: bool,
    has_saved: bool,
    directory: RunDirectory,
) -> RunFailure | None:
    """The failure that ended the run; None if all ranks succeeded. `has_saved`: the launch has
    written a checkpoint, so what it reads was there.

    One failure usually makes all ranks fail. The first of these that exists is the cause:
    1. a stop request; 2. a rank killed from outside; 3. an error of a rank's own; 4. a rank that
    ended without one; 5. a rank that hung. LostRankError comes last, because it is a consequence of
    another rank's failure.
    """
    failed = [end for end in ends if end.code]
    if not failed:
        return None
    if stop := _stop_of(failed, stop_requested=stop_requested, directory=directory):
        return RunFailure(stop, "stopped on request", can_restart=False)
    advice, logs = resume_advice(directory.path), f"Logs of all ranks: {directory.logs}"
    for end in failed:
        if end.code < 0 and not end.hung:
            event = f"rank {end.rank} was killed by {signal.Signals(-end.code).name}"
            error = TxlError(f"{event}; the run stopped. {logs}. {advice}")
            return RunFailure(error, event, can_restart=True)
    own = [end.error for end in failed if not isinstance(end.error, LostRankError | None)]
    if own:
        # Not an outage, if there is another error: it would be repeated.
        error = min(own, key=lambda error: isinstance(error, OUTAGES))
        return RunFailure(error, str(error), can_restart=has_saved and isinstance(error, OUTAGES))
    hung = [end.rank for end in failed if end.hung]
    unexplained = [end for end in failed if end.error is None and not end.hung]
    if unexplained:
        rank, code = unexplained[0].rank, unexplained[0].code
        event = f"rank {rank} ended with code {code}{_reason_in(directory.log(rank))}"
    elif hung:
        event = f"{_ranks(hung)} hung and {_was(hung)} killed"
    else:
        event = f"rank {failed[0].rank} ended with code {failed[0].code}"
    consequence = next((str(end.error) for end in failed if end.error is not None), advice)
    return RunFailure(TxlError(f"{event}. {consequence}. {logs}"), event, can_restart=True)


def _stop_of(
    failed: Sequence[RankEnd], *, stop_requested: bool, directory: RunDirectory
) -> PreemptedError | None:
    """The PreemptedError of a run that a stop request ended; None if something else did."""
    for end in failed:
        if isinstance(end.error, PreemptedError):
            return end.error
    advice = resume_advice(directory.path)
    if any(is_stop_code(end.code) for end in failed):
        return PreemptedError(f"stopped on request. {advice}")
    hung = [end.rank for end in failed if end.hung]
    if stop_requested and hung:
        return PreemptedError(
            f"stopped on request; {_ranks(hung)} {_was(hung)} killed after not ending within "
            f"training.grace_seconds. {advice}"
        )
    return None


def _reason_in(log: Path) -> str:
    """The error in the last traceback of a log, such as `ImportError: ...`, or its last line."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - LAST_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return ""
    text = "\n".join(lines).rpartition(" is up\n")[2]  # of the last start
    if _TRACEBACK in text:  # the error follows the indented frames; its message may have more lines
        frames = text.rpartition(_TRACEBACK)[2].splitlines()[1:]
        reasons = [line for line in frames if not line.startswith(" ")]
    else:
        reasons = text.splitlines()[::-1]
    reason = next((line.strip() for line in reasons if line.strip()), "")
    return f" (its log: {printable(reason[:MAX_CHARS])})" if reason else ""


def _ranks(ranks: Sequence[int]) -> str:
    return " and ".join(f"rank {rank}" for rank in ranks)


def _was(ranks: Sequence[int]) -> str:
    return "was" if len(ranks) == 1 else "were"


def is_stop_code(code: int) -> bool:
    """Whether a rank ended because of a stop request. In its first moments the signal kills it."""
    return code == PreemptedError.exit_code or -code in STOP_SIGNALS


def restart_line(
    failure: RunFailure, budget: RestartBudget, *, newest_step: int | None, resume: str
) -> str:
    """The line that announces a restart; `resume` is that of the TrainJob."""
    if resume == "auto" and newest_step is not None:
        start = f"step {newest_step}"
    else:
        is_new = resume in ("auto", "never")
        start = "the beginning" if is_new else f"{resume}, or the newest checkpoint since"
    return (
        f"{failure.event}; restart {budget.num_failures} of at most {budget.max_restarts} (a new "
        f"checkpoint resets the count), from {start}"
    )
