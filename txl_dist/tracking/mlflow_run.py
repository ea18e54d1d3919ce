"""MlflowRun: finds, creates, describes, ends and replaces the MLflow run of a run directory.

A run is replaced by a new one if it was deleted, or after a rollback: MLflow cannot delete the
points of steps that training has discarded (docs/decisions/0013-mlflow-after-a-rollback.md). A copy
of a run directory never writes to the run of the original: it gets a new one.
RUN/tracking.json is written before every action that must not be repeated after a kill.
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
    connect,
)
from txl_dist.tracking.state import (
    RUN_STATUSES,
    STATE,
    TrackingRequest,
    TrackingState,
    directory_identity,
)

log = logging.getLogger(__name__)


class MlflowRun:
    """The MLflow run of one run directory. Methods raise the errors of `mlflow_client`."""

    def __init__(self, run_dir: Path, request: TrackingRequest) -> None:
        self._run_dir = run_dir
        self._name = run_dir.resolve().name
        self._request = request
        self._store: MlflowStore | None = None
        self._state = self._first_state()
        self._is_open = False
        self._pending_description: list[Callable[[], None]] = []
        self._pending_files = self._all_files()
        self.is_new = False
        """This process created the run, so the server has no point of it that was not sent here."""

    @property
    def id(self) -> str:
        assert self._state.run_id is not None
        return self._state.run_id

    def update(self, **changes: Any) -> None:
        """Change fields of the state and write it."""
        self._state = replace(self._state, **changes)
        try:
            self._state.save(self._run_dir / STATE)
        except OSError as error:  # a full disk; the run can still be found by its key
            log.warning("%s not written: %s", STATE, error)

    def connect(self) -> MlflowStore:
        """The server, after the run was opened and described there."""
        if self._store is None:
            self.update()  # saves the key before a run is created with it
            self._store = connect(self._request.server, self._run_dir)
        store = self._store
        if not self._is_open:
            if self._state.run_id is None:
                self._find_or_create(store)
            elif not store.is_active(self._state.run_id):
                raise RunGoneError(self._state.run_id)
            self._is_open = True
            self._pending_description = self._description(store, self.id)
        while self._pending_description:  # one call at a time: a failure repeats only that one
            try:
                self._pending_description[0]()
            except RefusedError as error:
                log.warning("tags or parameters not recorded: %s", error)
            del self._pending_description[0]
        return store

    def end(self) -> None:
        """Record how the run ended."""
        store = self.connect()
        store.set_tags(self.id, {"txl.status": self._state.status})
        store.set_status(self.id, RUN_STATUSES[self._state.status])

    def log_files(self, store: MlflowStore) -> None:
        """Record the artifacts, once. Call it after the metrics, which must not wait for them."""
        files, self._pending_files = self._pending_files, {}
        for name, path in files.items():
            try:
                store.log_text(self.id, redact(path.read_text(encoding="utf-8")), name)
            except (OSError, ValueError, UnavailableError, RefusedError) as error:
                # Not tried again: artifacts may be in a store that this host cannot reach at all.
                log.warning("artifact %s not recorded: %s", name, error)

    def replace_deleted(self) -> None:
        """Continue in a new run, because this one was deleted."""
        log.warning("MLflow run %s was deleted; a new one replaces it", self._state.run_id)
        self._replace(experiment_id=None, parent_run_id=self._state.run_id)

    def replace_abandoned(self, step: int) -> None:
        """Continue in a new run, because this one has points from `step` on that were discarded."""
        log.warning(
            "training resumed before step %d, which MLflow run %s has: a new run gets the whole "
            "journal, and the old one becomes its child",
            step,
            self._state.run_id,
        )
        self._replace(abandoned_run_id=self._state.run_id, abandoned_from_step=step)

    def _replace(self, **changes: Any) -> None:
        self._is_open = False
        self._pending_files = self._all_files()
        self.update(key=uuid.uuid4().hex, run_id=None, **changes)

    def _first_state(self) -> TrackingState:
        server = self._request.without_secrets().server
        new_key = self._request.new_run_key
        state = TrackingState.load(self._run_dir / STATE)
        directory = directory_identity(self._run_dir)
        is_copy = state is not None and state.directory not in (None, directory)
        if state is not None and is_copy:
            log.info(
                "a copy of the directory of MLflow run %s: it gets a run of its own", state.run_id
            )
        # Another server does not have the old run, and training from step 0 has other values.
        if state is None or is_copy or state.server != server or new_key not in (None, state.key):
            # The request of the original is a part of the copy, with the key of its run.
            is_own_key = state is None or new_key != state.key
            key = (new_key if is_own_key else None) or uuid.uuid4().hex
            parent = state.run_id if state else None
            return TrackingState(key=key, server=server, directory=directory, parent_run_id=parent)
        return replace(state, directory=directory, delivered=False, status="running")

    def _find_or_create(self, store: MlflowStore) -> None:
        experiment_id = self._state.experiment_id or store.experiment(self._request.experiment)
        self._state = replace(self._state, experiment_id=experiment_id)
        run_ids = store.runs_with_tag(experiment_id, "txl.key", self._state.key)
        if not run_ids:
            tags = {"txl.key": self._state.key}
            if self._state.parent_run_id:
                tags["txl.parent"] = self._state.parent_run_id
            run_ids = [store.create_run(experiment_id, self._name, tags)]
            self.is_new = True
        self.update(run_id=run_ids[0])
        log.info("MLflow run %s", run_ids[0])

    def _description(self, store: MlflowStore, run_id: str) -> list[Callable[[], None]]:
        request = self._request
        return [
            lambda: store.set_status(run_id, "RUNNING"),
            lambda: store.set_tags(run_id, {"txl.status": "running", **request.tags}),
            lambda: store.log_params(run_id, request.params),
            lambda: self._adopt_abandoned(store),
        ]

    def _adopt_abandoned(self, store: MlflowStore) -> None:
        """Make the run of before a rollback, and all its children, children of the present run.

        All, because MLflow shows only one level of children.
        """
        old, step = self._state.abandoned_run_id, self._state.abandoned_from_step
        experiment_id = self._state.experiment_id
        if old is None or experiment_id is None:
            return
        if store.is_active(old):
            for child in store.runs_with_tag(experiment_id, "mlflow.parentRunId", old):
                store.set_tags(child, {"mlflow.parentRunId": self.id})
            tags = {
                "mlflow.parentRunId": self.id,
                "txl.abandoned": f"from step {step} on; continued in run {self.id}",
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
