"""MlflowRun: which MLflow run a run directory is; found, made, described, ended and replaced.

A run is replaced by a new one when it was deleted, or when training went back behind points that it
has: MLflow cannot delete points. What a rollback leaves becomes a child of the run that goes on.
RUN/tracking.json is written before every step that a kill could otherwise repeat.
"""

import logging
import uuid
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from txl_dist.config.redaction import redact
from txl_dist.tracking.mlflow_client import (
    MlflowStore,
    RefusedError,
    RunGoneError,
    UnavailableError,
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


class MlflowRun:
    """The MLflow run of one run directory. Methods raise what `mlflow_client` raises."""

    def __init__(self, run_dir: Path, request: TrackingRequest) -> None:
        self._run_dir = run_dir
        self._name = run_dir.resolve().name
        self._request = request
        self._store: MlflowStore | None = None
        self._state = self._first_state()
        self._is_open = False
        self._to_describe: list[Callable[[], None]] = []
        self._files = self._all_files()
        self.is_new = False
        """Made just now, and nothing was sent that may be recorded already."""

    @property
    def id(self) -> str:
        assert self._state.run_id is not None
        return self._state.run_id

    def update(self, **changes: Any) -> None:
        """Change fields of the state, and write it."""
        self._state = replace(self._state, **changes)
        try:
            self._state.save(self._run_dir / STATE)
        except OSError as error:  # a full disk: the server still knows the run by its key
            log.warning("%s not written: %s", STATE, error)

    def connect(self) -> MlflowStore:
        """The server, with the run open and described."""
        if self._store is None:
            server = resolve_server(self._request.server, self._run_dir)
            if server is None:
                raise UnavailableError("its credentials are not stored; set MLFLOW_TRACKING_URI")
            self.update()  # the key, before a run is made with it
            self._store = MlflowStore(server, artifact_location(server))
        store = self._store
        if not self._is_open:
            if self._state.run_id is None:
                self._find_or_create(store)
            elif not store.is_active(self._state.run_id):
                raise RunGoneError(self._state.run_id)
            self._is_open = True
            self._to_describe = self._description(store, self.id)
        while self._to_describe:
            try:
                self._to_describe[0]()
            except RefusedError as error:
                log.warning("tags or parameters not recorded: %s", error)
            del self._to_describe[0]
        return store

    def end(self) -> None:
        """Record how the run ended."""
        store = self.connect()
        store.set_tags(self.id, {"txl.status": self._state.status})
        store.set_status(self.id, RUN_STATUSES[self._state.status])

    def keep_files(self, store: MlflowStore) -> None:
        """Once, after the metrics: files may go to another store, and never hold these up."""
        files, self._files = self._files, {}
        for name, path in files.items():
            try:
                store.log_text(self.id, redact(path.read_text(encoding="utf-8")), name)
            except (OSError, ValueError, UnavailableError, RefusedError) as error:
                log.warning("artifact %s not recorded: %s", name, error)

    def replace_deleted(self) -> None:
        """Go on in a new run; someone deleted this one."""
        log.warning("MLflow run %s is gone; starting a new one", self._state.run_id)
        self._replace(experiment_id=None, parent_run_id=self._state.run_id)

    def replace_abandoned(self, step: int) -> None:
        """Go on in a new run; this one has points from `step` on that training took back."""
        log.warning(
            "training went back behind step %d, which MLflow run %s has: that run is kept as a "
            "child of a new one, which gets the whole journal",
            step,
            self._state.run_id,
        )
        self._replace(abandoned_run_id=self._state.run_id, abandoned_from_step=step)

    def _replace(self, **changes: Any) -> None:
        self._is_open = False
        self._files = self._all_files()
        self.update(key=uuid.uuid4().hex, run_id=None, **changes)

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
            run_id = store.create_run(experiment_id, self._name, tags)
            self.is_new = True
        self.update(run_id=run_id)
        log.info("MLflow run %s", run_id)

    def _description(self, store: MlflowStore, run_id: str) -> list[Callable[[], None]]:
        request = self._request
        return [
            lambda: store.set_status(run_id, "RUNNING"),
            lambda: store.set_tags(run_id, {"txl.status": "running", **request.tags}),
            lambda: store.log_params(run_id, request.params),
            lambda: self._file_abandoned(store),
        ]

    def _file_abandoned(self, store: MlflowStore) -> None:
        """Put the run that a rollback left, and whatever lies under it, under the present one."""
        old, step = self._state.abandoned_run_id, self._state.abandoned_from_step
        experiment_id = self._state.experiment_id
        if old is None or experiment_id is None:
            return
        if store.is_active(old):
            for child in store.children(experiment_id, old):
                store.set_tags(child, {"mlflow.parentRunId": self.id})
            tags = {
                "mlflow.parentRunId": self.id,
                "txl.abandoned": f"from step {step} on; run {self.id} goes on from there",
                "txl.status": "abandoned",
            }
            store.set_tags(old, tags)
            store.rename(old, f"{self._name} (abandoned from step {step})")
            store.set_status(old, RUN_STATUSES["interrupted"])
        self.update(abandoned_run_id=None, abandoned_from_step=None)

    def _all_files(self) -> dict[str, Path]:
        files = {"config.yaml": self._run_dir / "config.yaml"}
        if self._request.data_manifest:
            files["data-manifest.json"] = Path(self._request.data_manifest)
        return files
