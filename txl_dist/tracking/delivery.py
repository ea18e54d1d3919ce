"""Delivery: carries one run's journal into one MLflow run, each point once.

Before a metric is first sent into a run that existed before, the server is asked which points of it
are recorded; only the others are sent, with the journal's own timestamps. A call that failed may
have been carried out, so its metrics are asked for again.

The curves of the MLflow run equal the journal. MLflow cannot delete points, so when a resume went
back behind points that are recorded, a new run gets the whole journal, and the old one becomes a
child of it, with the tag `txl.abandoned` that says from which step on.

Every call that succeeds is progress that is kept, so that a server which fails often is still
served. One step of work is `pump`; when to call it, and for how long, is `sender.py`'s.
"""

import logging
import math
from collections.abc import Callable
from pathlib import Path

from txl_dist.tracking.journal import JOURNAL, JournalTail
from txl_dist.tracking.mlflow_client import (
    MAX_POINTS,
    MlflowStore,
    Point,
    Recorded,
    RefusedError,
    RunGoneError,
    UnavailableError,
)
from txl_dist.tracking.mlflow_run import MlflowRun
from txl_dist.tracking.points import first_step_not_in_journal, metric_keys, points_of
from txl_dist.tracking.state import TrackingRequest

log = logging.getLogger(__name__)


class RolledBackError(Exception):
    """The MLflow run has points from `step` on that the journal no longer has."""

    def __init__(self, step: int) -> None:
        super().__init__(f"training went back behind step {step}, which was recorded")
        self.step = step


class Delivery:
    """One run directory's journal and its MLflow run. Raises UnavailableError from any method."""

    def __init__(self, run_dir: Path, request: TrackingRequest) -> None:
        self._run_dir = run_dir
        self._run = MlflowRun(run_dir, request)
        self._tail = JournalTail(run_dir / JOURNAL)
        self._waiting: list[Point] = []
        self._recorded: dict[str, Recorded] = {}
        self._is_compared = False
        """Nothing is recorded in the run that is not in the journal."""
        self._has_ended = False
        self._sent_up_to: dict[str, int] = {}
        self._not_finite: dict[str, int] = {}
        self._tags_told: dict[str, str] = {}

    def pump(self) -> None:
        """Send everything that is in the journal now."""
        self._attempt(self._pump)

    def ends_with(self, status: str) -> None:
        """Note how the run ended, for a later sync should the server not hear of it now."""
        self._run.update(status=status)

    def finish(self) -> None:
        """End the run, then make sure from the server's own answer that nothing is missing."""
        self._attempt(self._end_and_verify)
        self._run.update(delivered=True)

    def _attempt(self, work: Callable[[], None]) -> None:
        try:
            try:
                work()
            except RunGoneError:
                self._run.replace_deleted()
                self._start_over()
                work()
            except RolledBackError as error:
                self._run.replace_abandoned(error.step)
                self._start_over()
                work()
        except (RefusedError, RunGoneError, RolledBackError) as error:
            raise UnavailableError(str(error)) from error

    def _pump(self) -> None:
        store = self._run.connect()
        self._compare(store)
        while self._fill():
            while self._waiting:
                self._send(store, self._waiting[:MAX_POINTS])
                del self._waiting[:MAX_POINTS]
            self._compare(store)
        self._tell_tags(store)
        self._run.keep_files(store)

    def _end_and_verify(self) -> None:
        if not self._has_ended:  # else the server failed during the verification, which goes on
            self._run.end()
            self._read_again()
            self._has_ended = True
        self._pump()

    def _start_over(self) -> None:
        self._has_ended = False
        self._tags_told.clear()
        self._read_again()

    def _read_again(self) -> None:
        """Ask the server again what it has, and read the journal from its beginning."""
        self._recorded, self._run.is_new, self._is_compared = {}, False, False
        self._waiting.clear()
        self._sent_up_to.clear()
        self._tail.rewind()

    def _compare(self, store: MlflowStore) -> None:
        """Raises RolledBackError if something is recorded that is not in the journal."""
        if self._tail.is_replaced():
            self._read_again()
        if self._run.is_new or self._is_compared:
            return
        keys = metric_keys(self._run_dir)
        recorded = {key: self._recorded_points(store, key) for key in keys}
        step = first_step_not_in_journal(self._run_dir, recorded)
        if step is not None:
            raise RolledBackError(step)
        self._is_compared = True

    def _fill(self) -> bool:
        if not self._waiting:
            for line in self._tail.lines():
                for point in points_of(line):
                    if math.isfinite(point.value):
                        self._waiting.append(point)
                    else:  # MLflow would store infinity as 1.8e308
                        self._not_finite.setdefault(point.key, point.step)
        return bool(self._waiting)

    def _send(self, store: MlflowStore, points: list[Point]) -> None:
        sent_up_to = dict(self._sent_up_to)
        new = []
        for point in points:
            if point.step <= sent_up_to.get(point.key, -1):
                continue
            sent_up_to[point.key] = point.step
            recorded = self._recorded_points(store, point.key)
            if (point.step, point.milliseconds) not in recorded:
                new.append(point)
        if new:
            self._log(store, new)
            self._run.update(sent_step=new[-1].step)
        self._sent_up_to = sent_up_to

    def _recorded_points(self, store: MlflowStore, key: str) -> Recorded:
        if key not in self._recorded:
            self._recorded[key] = set() if self._run.is_new else store.recorded(self._run.id, key)
        return self._recorded[key]

    def _log(self, store: MlflowStore, points: list[Point]) -> None:
        """One call; a batch that is refused is halved down to the points that cause it."""
        try:
            store.log_points(self._run.id, points)
        except UnavailableError:
            for key in {point.key for point in points}:  # perhaps recorded, perhaps not
                self._recorded.pop(key, None)
            self._run.is_new = False
            raise
        except RefusedError as error:
            if not store.is_active(self._run.id):
                raise RunGoneError(str(error)) from error
            if len(points) == 1:
                log.warning("%s of step %d refused: %s", points[0].key, points[0].step, error)
                return
            middle = len(points) // 2
            self._log(store, points[:middle])
            self._log(store, points[middle:])

    def _tell_tags(self, store: MlflowStore) -> None:
        tags = {
            f"txl.not_finite.{key}": f"first at step {step}"
            for key, step in self._not_finite.items()
        }
        new = {key: value for key, value in tags.items() if self._tags_told.get(key) != value}
        if new:
            store.set_tags(self._run.id, new)
            self._tags_told |= new
