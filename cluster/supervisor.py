"""Supervisor: the launcher's main thread while Ray, in another thread, starts and runs the ranks.

Calls into Ray can last for minutes or for ever, and no signal is handled inside them. So the main
thread makes none: it answers stop signals, says what is waited for, names a rank that died, and
gives up when Ray makes no progress: it ends Ray's processes and leaves Ray's thread where it is.
"""

import atexit
import logging
import re
import threading
import time
from collections.abc import Callable

from cluster.address import answers
from cluster.attempt import AttemptFiles, Failure, Place
from cluster.own_ray import end_own_ray
from cluster.watch import ClusterWatch
from data_pipeline.processes.process_exit import exit_without_teardown
from data_pipeline.processes.stop_signals import StopSignals, block_stop_signals, end_now
from txl_dist.checkpoint.directory import resume_advice
from txl_dist.errors import PreemptedError, TxlError
from txl_dist.launch.launcher import OnLine
from txl_dist.runtime.stop_request import STOPPING
from txl_dist.training.follow import LogFollower, step_of
from txl_dist.training.run_directory import RunDirectory

POLL_SECONDS = 0.2
QUIET_SECONDS = 10.0
"""Longest silence before the first step."""
NAMING_SECONDS = 6.0
"""How long a failure may go unreported while Ray finds out whether a node is gone."""
HEAD_SECONDS = 30.0
"""How long the head may not answer. Ray itself ends this process after 60 seconds of it."""
END_SECONDS = 15.0
"""How long Ray gets to end once it is known how the ranks ended."""

log = logging.getLogger("ray.txl")
_RECORD = re.compile(r"^\d\d:\d\d:\d\d (?!rank \d+ failed$)")
"""The first line of a log record. What failed is said by the supervisor; tracebacks stay there."""


class Supervisor:
    """Watches one attempt. What runs in Ray's thread sets `watch` once it is connected."""

    def __init__(
        self,
        directory: RunDirectory,
        files: AttemptFiles,
        *,
        num_ranks: int,
        address: str | None,
        start_timeout_seconds: float,
        on_line: OnLine,
    ) -> None:
        self.watch: ClusterWatch | None = None
        self._directory, self._files = directory, files
        self._num_ranks, self._address = num_ranks, address
        self._start_timeout_seconds = start_timeout_seconds
        self._on_line, self._speaking = on_line, threading.Lock()
        self._begun = self._last_line = time.monotonic()
        self._places: dict[int, Place] = {}
        self._failure: tuple[float, Failure] | None = None
        self._has_stepped = self._has_failed = False
        self._answered_stop = False
        self._ended_at: float | None = None
        self._error: Exception | None = None

    def run(self, work: Callable[[], None]) -> None:
        """Do `work` in a thread. Raises the TxlError that ended the attempt.

        `work` must call `ended` when the ranks have, before it takes Ray down.
        """
        thread = threading.Thread(target=self._work, args=(work,), name="ray", daemon=True)
        log_of_rank_0 = LogFollower(self._directory.log(0), self._on_rank_line)
        with StopSignals(on_insist=self._insist) as stop, log_of_rank_0:
            thread.start()
            while thread.is_alive() and not self._may_leave():
                # When Ray connects it installs a C++ handler in place of ours, which prints a stack
                # and aborts the process three seconds after a SIGTERM.
                stop.catch_again()
                if self._ended_at is None:
                    self._look(bool(stop))
                thread.join(POLL_SECONDS)
        if error := self._outcome(bool(stop)):
            raise error

    def ended(self, error: Exception | None) -> None:
        """The ranks have ended, with what Ray Train or Ray says about it."""
        self._error, self._ended_at = error, time.monotonic()

    def _work(self, work: Callable[[], None]) -> None:
        # What this thread starts inherits the mask: a signal to every process of the job must not
        # end a private Ray while its ranks still have to save.
        block_stop_signals()
        try:
            work()
        except Exception as error:
            self.ended(error)

    def _outcome(self, was_stop_requested: bool) -> TxlError | None:
        if recorded := self._files.end():
            return recorded
        error = self._error
        if error is None:
            return None
        log.warning("%s", error)
        first_line = next(iter(str(error).splitlines()), type(error).__name__)
        if was_stop_requested:
            return PreemptedError(
                f"stopped on request, but Ray ended before the ranks had saved: {first_line}. "
                f"{resume_advice(self._directory.path)}"
            )
        if isinstance(error, TxlError):
            return error
        if self.watch is not None and not answers(self.watch.head):
            return self._head_is_gone(self.watch)
        return TxlError(
            f"Ray ended with an error: {first_line}. More in {self._directory.logs}. "
            f"{resume_advice(self._directory.path)}"
        )

    def _head_is_gone(self, watch: ClusterWatch) -> TxlError:
        return TxlError(
            f"the head of the Ray cluster at {watch.head} does not answer any more: its node or "
            "its network is gone, and the ranks end with it. Start the cluster again. "
            f"{resume_advice(self._directory.path)}"
        )

    def _look(self, is_stop_requested: bool) -> None:
        self._notice_ranks()
        self._name_failure()
        if is_stop_requested:
            self._answer_stop()
        silent = time.monotonic() - self._last_line
        if not self._has_stepped and silent > QUIET_SECONDS:
            self._say(f"waiting {time.monotonic() - self._begun:.0f} s for {self._waited_for()}")
        if not self._places and time.monotonic() - self._begun > self._start_timeout_seconds:
            raise self._give_up(
                TxlError(
                    f"the ranks did not start within {self._start_timeout_seconds:g} s "
                    "(ray.start_timeout_seconds), which were spent waiting for "
                    f"{self._waited_for()}. What Ray said: {self._log_path}. The same command "
                    "tries again; --on processes does without Ray"
                )
            )
        if self.watch is not None and self.watch.silent_seconds > HEAD_SECONDS:
            raise self._give_up(self._head_is_gone(self.watch))

    # --- the ranks --------------------------------------------------------------------------------

    def _notice_ranks(self) -> None:
        """Note where the ranks are once all have begun, and that they are gone after a failure."""
        if not self._places:
            places = self._files.places(self._num_ranks)
            if len(places) == self._num_ranks:
                self._places = places
        for failure in self._files.new_failures():
            for rank, text in failure.errors.items():
                log.warning("rank %d: %s", rank, text)
            self._failure = time.monotonic(), failure
            self._files.forget_places(self._num_ranks)  # before those of the next ranks appear

    def _name_failure(self) -> None:
        """Say which ranks died, once Ray knows whether their nodes are gone; back to waiting."""
        if self._failure is None or self._files.end() is not None:
            return
        since, failure = self._failure
        died = self._on_lost_nodes() or failure.died
        if not died and time.monotonic() - since < NAMING_SECONDS:
            return
        if died:
            what = " and ".join(f"rank {rank}{self._place_of(rank)} died" for rank in died)
        else:
            rank, text = next(iter(failure.errors.items()))
            what = f"rank {rank}{self._place_of(rank)} failed ({text.splitlines()[0]})"
        self._failure, self._places, self._has_failed = None, {}, True
        self._begun, self._has_stepped = time.monotonic(), False
        self._say(
            f"{what}; waiting for {self._waited_for()}. Training then goes on from the newest "
            f"checkpoint (details: {self._log_path})"
        )

    def _on_lost_nodes(self) -> tuple[int, ...]:
        state = self.watch.state if self.watch else None
        if state is None:
            return ()
        return tuple(
            rank for rank, place in self._places.items() if place.node_id not in state.node_ids
        )

    def _place_of(self, rank: int) -> str:
        place = self._places.get(rank)
        return f" (node {place.address}, pid {place.pid})" if place else ""

    def _waited_for(self) -> str:
        if self._places:
            return "the first step: the ranks run and load data and model"
        if self.watch is not None:
            return self.watch.waiting_for(self._num_ranks)
        return "Ray to start" if self._address is None else f"the Ray cluster at {self._address}"

    @property
    def _log_path(self) -> str:
        return str(self._directory.logs / "ray.log")

    # --- what is said -----------------------------------------------------------------------------

    def _on_rank_line(self, line: str) -> None:
        if _RECORD.match(line):
            self._has_stepped |= step_of(line) is not None
            self._say(line)

    def _say(self, line: str) -> None:
        with self._speaking:
            self._last_line = time.monotonic()
            self._on_line(line)

    # --- stopping ---------------------------------------------------------------------------------

    def _answer_stop(self) -> None:
        """The first time: ask the ranks, if there are any, or end here."""
        if not self._places:
            nothing = "no rank is training" if self._has_failed else "nothing has been trained yet"
            self._say(f"stopping: {nothing}")
            raise self._give_up(
                PreemptedError(
                    "stopped on request while no rank was training. "
                    f"{resume_advice(self._directory.path)}"
                )
            )
        if not self._answered_stop:
            self._answered_stop = True
            self._files.stop.touch()
            self._say(STOPPING)
        if self._files.end() is not None:
            self.ended(None)

    def _may_leave(self) -> bool:
        """Whether it is known how the ranks ended, and Ray does not come to its own end."""
        if self._ended_at is None or time.monotonic() - self._ended_at < END_SECONDS:
            return False
        error = self._outcome(was_stop_requested=self._answered_stop)
        self._leave_ray(error.exit_code if error else 0)
        return True

    def _give_up(self, error: TxlError) -> TxlError:
        self._leave_ray(error.exit_code)
        return error

    def _leave_ray(self, exit_code: int) -> None:
        """Ray's thread and its exit handlers would hold up the end of this process."""
        if self._address is None:
            end_own_ray()
        atexit.register(exit_without_teardown, exit_code)

    def _insist(self) -> None:
        """Asked again, seconds later: end now."""
        if self._address is None:
            end_own_ray()
        end_now()
