"""Delivery: carries one run's journal into one MLflow run, each point once.

Before a metric is first sent into a run that was there before, the server is asked which steps of
it are recorded; only others are sent, with the journal's own timestamps. A call that failed may
have been carried out, so its metrics are asked for again. What a resume trains anew is therefore
not recorded twice: the first value of a step stays, and tag `txl.replayed_steps` names such steps.

Every call that succeeds is progress that is kept, so that a server which fails often is still
served. One step of work is `pump`; when to call it, and for how long, is `sender.py`'s.
"""

import logging
import math
import uuid
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from txl_dist.redaction import redact
from txl_dist.tracking.journal import JOURNAL, JournalTail
from txl_dist.tracking.mlflow_client import (
    MAX_POINTS,
    MlflowStore,
    Point,
    RefusedError,
    RunGoneError,
    Steps,
    UnavailableError,
    clean_key,
)
from txl_dist.tracking.state import (
    RUN_STATUSES,
    STATE,
    TrackingRequest,
    TrackingState,
    artifact_location,
    public_server,
    resolve_server,
)

log = logging.getLogger(__name__)


class Delivery:
    """One run directory's journal and its MLflow run. Raises UnavailableError from any method."""

    def __init__(self, run_dir: Path, request: TrackingRequest) -> None:
        self._run_dir = run_dir
        self._request = request
        self._tail = JournalTail(run_dir / JOURNAL)
        self._store: MlflowStore | None = None
        self._state = self._first_state()
        self._open = False
        self._to_describe: list[Callable[[], None]] = []
        self._files = self._all_files()
        self._waiting: list[Point] = []
        self._recorded: dict[str, Steps] = {}
        self._is_new = False
        """The run was made just now: a metric that is not in `_recorded` has no point."""
        self._sent_up_to: dict[str, int] = {}
        self._replayed: set[int] = set()
        self._not_finite: dict[str, int] = {}
        self._tags_told: dict[str, str] = {}

    def pump(self) -> None:
        """Send everything that is in the journal now."""
        self._attempt(self._pump)

    def ends_with(self, status: str) -> None:
        """Note how the run ended, for a later sync should the server not hear of it now."""
        self._state = replace(self._state, status=status)
        self._save()

    def finish(self) -> None:
        """End the run, then make sure from the server's own answer that nothing is missing."""
        self._attempt(self._end_run)
        self._recorded, self._is_new = {}, False
        self._tail.rewind()
        self._sent_up_to.clear()
        self._attempt(self._pump)
        self._state = replace(self._state, delivered=True)
        self._save()

    def _attempt(self, work: Callable[[], None]) -> None:
        try:
            try:
                work()
            except RunGoneError:
                self._start_over()
                self._pump()
                work()
        except (RefusedError, RunGoneError) as error:
            raise UnavailableError(str(error)) from error

    def _pump(self) -> None:
        store = self._connect()
        while self._fill():
            while self._waiting:
                self._send(store, self._waiting[:MAX_POINTS])
                del self._waiting[:MAX_POINTS]
        self._tell_tags(store)
        self._keep_files(store)

    def _end_run(self) -> None:
        store = self._connect()
        store.set_tags(self._run_id(), {"txl.status": self._state.status})
        store.set_status(self._run_id(), RUN_STATUSES[self._state.status])

    # --- the run --------------------------------------------------------------------------------

    def _first_state(self) -> TrackingState:
        server = public_server(self._request.server)
        new_key = self._request.new_run_key
        state = TrackingState.load(self._run_dir / STATE)
        old_run_id = state.run_id if state else None
        # Another server knows nothing of the old run; training begun anew has other values.
        if state is None or state.server != server or new_key not in (None, state.key):
            key = new_key or uuid.uuid4().hex
            return TrackingState(key=key, server=server, parent_run_id=old_run_id)
        return replace(state, delivered=False, status="running")

    def _connect(self) -> MlflowStore:
        if self._store is None:
            server = resolve_server(self._request.server, self._run_dir)
            if server is None:
                raise UnavailableError("its credentials are not stored; set MLFLOW_TRACKING_URI")
            self._save()  # the key, before a run is made with it
            self._store = MlflowStore(server, artifact_location(server))
        store = self._store
        if not self._open:
            if self._state.run_id is None:
                self._find_or_create(store)
            elif not store.is_active(self._state.run_id):
                raise RunGoneError(self._state.run_id)
            self._open = True
            self._to_describe = self._description(store, self._run_id())
        while self._to_describe:
            try:
                self._to_describe[0]()
            except RefusedError as error:
                log.warning("tags or parameters not recorded: %s", error)
            del self._to_describe[0]
        return store

    def _find_or_create(self, store: MlflowStore) -> None:
        experiment_id = self._state.experiment_id
        if experiment_id is None:
            experiment_id = store.experiment(self._request.experiment)
            self._state = replace(self._state, experiment_id=experiment_id)
        run_id = store.find_run(experiment_id, self._state.key)
        if run_id is None:
            tags = {"txl.key": self._state.key}
            if self._state.parent_run_id:
                tags["txl.parent"] = self._state.parent_run_id
            run_id = store.create_run(experiment_id, self._run_dir.resolve().name, tags)
        self._state = replace(self._state, run_id=run_id)
        self._is_new = True
        self._save()
        log.info("MLflow run %s", run_id)

    def _description(self, store: MlflowStore, run_id: str) -> list[Callable[[], None]]:
        request = self._request
        return [
            lambda: store.set_status(run_id, "RUNNING"),
            lambda: store.set_tags(run_id, {"txl.status": "running", **request.tags}),
            lambda: store.log_params(run_id, request.params),
        ]

    def _keep_files(self, store: MlflowStore) -> None:
        """Once, after the metrics: files may go to another store, and never hold these up."""
        files, self._files = self._files, {}
        for name, path in files.items():
            try:
                store.log_text(self._run_id(), redact(path.read_text(encoding="utf-8")), name)
            except (OSError, ValueError, UnavailableError, RefusedError) as error:
                log.warning("artifact %s not recorded: %s", name, error)

    def _start_over(self) -> None:
        """A new run in place of a deleted one; the journal has everything it needs."""
        log.warning("MLflow run %s is gone; starting a new one", self._state.run_id)
        self._state = replace(
            self._state,
            key=uuid.uuid4().hex,
            run_id=None,
            experiment_id=None,
            parent_run_id=self._state.run_id,
        )
        self._open = False
        self._recorded.clear()
        self._files = self._all_files()
        self._waiting.clear()
        self._sent_up_to.clear()
        self._tags_told.clear()
        self._tail.rewind()

    def _all_files(self) -> dict[str, Path]:
        files = {"config.yaml": self._run_dir / "config.yaml"}
        if self._request.data_manifest:
            files["data-manifest.json"] = Path(self._request.data_manifest)
        return files

    def _run_id(self) -> str:
        assert self._state.run_id is not None
        return self._state.run_id

    def _save(self) -> None:
        try:
            self._state.save(self._run_dir / STATE)
        except OSError as error:  # a full disk: the server still knows the run by its key
            log.warning("%s not written: %s", STATE, error)

    # --- points ---------------------------------------------------------------------------------

    def _fill(self) -> bool:
        if not self._waiting:
            for line in self._tail.lines():
                self._waiting += self._points(line)
        return bool(self._waiting)

    def _points(self, line: dict[str, Any]) -> Iterator[Point]:
        step, seconds = line["step"], line.get("time", 0)
        milliseconds = int(seconds * 1000) if isinstance(seconds, (int, float)) else 0
        for name, value in line.items():
            if name in ("step", "time") or type(value) not in (int, float):
                continue
            if math.isfinite(value):
                yield Point(clean_key(name), float(value), step, milliseconds)
            else:  # MLflow would store infinity as 1.8e308
                self._not_finite.setdefault(name, step)

    def _send(self, store: MlflowStore, points: list[Point]) -> None:
        sent_up_to = dict(self._sent_up_to)
        new = []
        for point in points:
            if point.step <= sent_up_to.get(point.key, -1):
                continue
            sent_up_to[point.key] = point.step
            at = self._steps(store, point.key).get(point.step)
            if at is None:
                new.append(point)
            elif at != point.milliseconds:
                self._replayed.add(point.step)
        if new:
            self._log(store, new)
            self._state = replace(self._state, sent_step=new[-1].step)
            self._save()
        self._sent_up_to = sent_up_to

    def _steps(self, store: MlflowStore, key: str) -> Steps:
        if key not in self._recorded:
            self._recorded[key] = {} if self._is_new else store.recorded(self._run_id(), key)
        return self._recorded[key]

    def _log(self, store: MlflowStore, points: list[Point]) -> None:
        """One call; a batch that is refused is halved down to the points that cause it."""
        try:
            store.log_points(self._run_id(), points)
        except UnavailableError:
            for key in {point.key for point in points}:  # perhaps recorded, perhaps not
                self._recorded.pop(key, None)
            self._is_new = False
            raise
        except RefusedError as error:
            if not store.is_active(self._run_id()):
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
        if self._replayed:
            low, high = min(self._replayed), max(self._replayed)
            tags["txl.replayed_steps"] = f"{low} to {high}; the first values are kept"
        new = {key: value for key, value in tags.items() if self._tags_told.get(key) != value}
        if new:
            store.set_tags(self._run_id(), new)
            self._tags_told |= new
