"""Delivery: sends one run's journal into one MLflow run, each point exactly once.

A resumed sender first queries the points that the server has and sends only the others, with the
timestamps of the journal. If a call failed, the server may still have executed it, so the points of
its metrics are queried again.

After delivery the curves of the MLflow run equal the journal. If a resume discarded steps that the
MLflow run has, a new run gets the whole journal (docs/decisions/0013-mlflow-after-a-rollback.md).

`pump` does one round of work; `sender.py` decides when to call it and for how long. Progress is not
lost if a call fails: an unreliable server gets all points after enough rounds.
"""

import itertools
import logging
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from txl_dist.tracking.journal import JOURNAL, SUPERSEDED, JournalTail, read_metrics
from txl_dist.tracking.mlflow_client import (
    MAX_POINTS,
    MlflowStore,
    Point,
    Recorded,
    RefusedError,
    RunGoneError,
    UnavailableError,
    clean_key,
)
from txl_dist.tracking.mlflow_run import MlflowRun
from txl_dist.tracking.state import TrackingRequest

log = logging.getLogger(__name__)


class Delivery:
    """One run directory's journal and its MLflow run. Every method may raise UnavailableError."""

    def __init__(self, run_dir: Path, request: TrackingRequest) -> None:
        self._run_dir = run_dir
        self._run = MlflowRun(run_dir, request)
        self._tail = JournalTail(run_dir / JOURNAL)
        self._unsent: list[Point] = []
        self._recorded: dict[str, Recorded] = {}
        """Per metric, the points that the server had when it was queried. Points that this process
        sends are not added, which would keep a whole run in memory."""
        self._is_compared = False
        """The run is known to have no point that the journal does not have."""
        self._has_ended = False
        self._last_step: dict[str, int] = {}
        """Per metric, the last step that was sent or that the server had."""
        self._first_not_finite: dict[str, int] = {}
        self._sent_tags: dict[str, str] = {}

    def pump(self) -> None:
        """Send everything that is in the journal now."""
        self._try(self._pump)

    def set_end_status(self, status: str) -> None:
        """Store how the run ended, also for a later `--sync` if the server is unreachable now."""
        self._run.update(status=status)

    def finish(self) -> None:
        """End the MLflow run, then read back its points and send those that are missing."""
        self._try(self._end_and_verify)
        self._run.update(delivered=True)

    def _try(self, work: Callable[[], None]) -> None:
        try:
            try:
                work()
            except RunGoneError:
                self._run.replace_deleted()
                self._start_over()
                work()
        except (RefusedError, RunGoneError) as error:
            raise UnavailableError(str(error)) from error

    def _pump(self) -> None:
        store = self._connect()
        while self._read_journal():
            while self._unsent:
                self._send(store, self._unsent[:MAX_POINTS])
                del self._unsent[:MAX_POINTS]
            store = self._connect()  # a resume may have replaced the journal in the meantime
        self._send_not_finite_tags(store)
        self._run.log_files(store)

    def _end_and_verify(self) -> None:
        # Verify, because a server behind a proxy can confirm a call that it never executed.
        if not self._has_ended:  # else the server failed during the verification: continue it
            self._run.end()
            self._read_again()
            self._has_ended = True
        self._pump()

    def _connect(self) -> MlflowStore:
        """The server, once its run is known to have no point that the journal does not have."""
        store = self._run.connect()
        if self._tail.is_replaced():
            self._read_again()
        if not (self._run.is_new or self._is_compared):
            keys = journal_keys(self._run_dir)
            recorded = {key: self._recorded_points(store, key) for key in keys}
            step = first_step_not_in_journal(self._run_dir, recorded)
            if step is not None:
                self._run.replace_abandoned(step)
                self._start_over()
                return self._connect()
            self._is_compared = True
        return store

    def _start_over(self) -> None:
        """Send the whole journal to another MLflow run."""
        self._has_ended = False
        self._sent_tags.clear()
        self._read_again()

    def _read_again(self) -> None:
        """Query the server again, and read the journal from the beginning."""
        self._recorded, self._run.is_new, self._is_compared = {}, False, False
        self._unsent.clear()
        self._last_step.clear()
        self._tail.rewind()

    def _read_journal(self) -> bool:
        """Read the next lines into `_unsent`; whether there is anything to send."""
        if not self._unsent:
            for point in itertools.chain.from_iterable(map(points_of, self._tail.lines())):
                if math.isfinite(point.value):
                    self._unsent.append(point)
                else:  # MLflow would store infinity as 1.8e308
                    self._first_not_finite.setdefault(point.key, point.step)
        return bool(self._unsent)

    def _send(self, store: MlflowStore, points: list[Point]) -> None:
        last_step = dict(self._last_step)  # replaced only after the call has succeeded
        new = []
        for point in points:
            if point.step <= last_step.get(point.key, -1):
                continue
            last_step[point.key] = point.step
            recorded = self._recorded_points(store, point.key)
            if (point.step, point.milliseconds) not in recorded:
                new.append(point)
        if new:
            self._log(store, new)
            self._run.update(sent_step=new[-1].step)
        self._last_step = last_step

    def _recorded_points(self, store: MlflowStore, key: str) -> Recorded:
        if key not in self._recorded:
            self._recorded[key] = set() if self._run.is_new else store.recorded(self._run.id, key)
        return self._recorded[key]

    def _log(self, store: MlflowStore, points: list[Point]) -> None:
        """One call. MLflow rejects a batch as a whole, so halve it down to the rejected points."""
        try:
            store.log_points(self._run.id, points)
        except UnavailableError:
            for key in {point.key for point in points}:  # the server may or may not have them
                self._recorded.pop(key, None)
            self._run.is_new = False
            raise
        except RefusedError as error:
            # MLflow reports a deleted run in a batch as an invalid parameter.
            if not store.is_active(self._run.id):
                raise RunGoneError(str(error)) from error
            if len(points) == 1:
                log.warning("%s of step %d refused: %s", points[0].key, points[0].step, error)
                return
            middle = len(points) // 2
            self._log(store, points[:middle])
            self._log(store, points[middle:])

    def _send_not_finite_tags(self, store: MlflowStore) -> None:
        tags = {
            f"txl.not_finite.{key}": f"first at step {step}"
            for key, step in self._first_not_finite.items()
        }
        new = {key: value for key, value in tags.items() if self._sent_tags.get(key) != value}
        if new:
            store.set_tags(self._run.id, new)
            self._sent_tags |= new


def points_of(line: Mapping[str, Any]) -> Iterator[Point]:
    """The metrics of one journal line, including infinities and NaN."""
    seconds = line.get("time")  # anything, in a journal that was edited
    milliseconds = int(seconds * 1000) if isinstance(seconds, int | float) else 0
    for name, value in line.items():
        if name not in ("step", "time") and type(value) in (int, float):
            yield Point(clean_key(name), float(value), line["step"], milliseconds)


def journal_keys(run_dir: Path) -> set[str]:
    """The keys of every metric in the journal and in the lines that resumes have superseded."""
    lines = itertools.chain(_lines(run_dir / JOURNAL), _lines(run_dir / SUPERSEDED))
    names = {name for line in lines for name in line}
    return {clean_key(name) for name in names - {"step", "time"}}


def first_step_not_in_journal(run_dir: Path, recorded: Mapping[str, Recorded]) -> int | None:
    """The first step with a recorded point that the journal does not have; None if it has all.

    Points are compared by key, step and time: a step that was trained again has another time.
    """
    missing = {key: set(points) for key, points in recorded.items()}
    for line in _lines(run_dir / JOURNAL):
        for point in points_of(line):
            missing.get(point.key, set()).discard((point.step, point.milliseconds))
    return min((step for points in missing.values() for step, _ in points), default=None)


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    return read_metrics(path) if path.exists() else iter(())
