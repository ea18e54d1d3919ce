"""CheckpointMirror: copies the checkpoints of a run to a URL, in a background thread of each rank.

Every `update` uploads the local checkpoints that the URL lacks, newest first. So a failed upload
needs no record: the next update repeats it, and an unavailable store never stops training. Copies
are removed by the rule for local checkpoints (`Retention`), not because they are missing locally: a
run that has moved to an empty disk keeps its older copies. Each rank
uploads the files that it wrote; rank 0 uploads the metrics and the manifest, when the store has all
other files, then LATEST. A run that was started again elsewhere has a newer attempt at the URL
(`attempts.py`): then nothing is changed there any more.
"""

import logging
import threading
import time
from contextlib import suppress
from dataclasses import replace
from functools import partial

from data_pipeline.errors import printable
from data_pipeline.system.remote_path import RemotePath
from data_pipeline.system.workers import BackgroundQueue
from txl_dist.checkpoint.attempts import Attempt
from txl_dist.checkpoint.directory import CheckpointDirectory, Retention, reading
from txl_dist.checkpoint.manifest import (
    MANIFEST_NAME,
    CheckpointManifest,
    load_checkpoint_manifest,
    rank_of,
)
from txl_dist.checkpoint.remote import (
    RUN_FILES,
    RemoteCheckpoints,
    abandoned_names,
    local_names,
    remote_name,
    step_of,
)
from txl_dist.errors import CheckpointError, FencedError, StoreError
from txl_dist.runtime.fault_injection import fault_point

POLL_SECONDS = 0.5
"""Polling interval while waiting for a checkpoint or for the uploads of the other ranks."""

log = logging.getLogger(__name__)


class CheckpointMirror:
    """One rank's part of the copies. No method is collective."""

    def __init__(
        self,
        url: str,
        checkpoints: CheckpointDirectory,
        *,
        rank: int,
        num_ranks: int,
        timeout_seconds: float,
        retention: Retention,
        attempt: Attempt | None = None,
    ) -> None:
        self._remote, self._checkpoints = RemoteCheckpoints(RemotePath(url)), checkpoints
        self._rank, self._num_ranks, self._timeout_seconds = rank, num_ranks, timeout_seconds
        self._retention = retention
        self._sent_manifests: dict[str, bytes] = {}
        self._expected: tuple[int, str] | None = None
        self._num_updates = 0
        self._closing = threading.Event()
        self.failure: str | None = None
        """Why the last update has failed; None if it has not."""
        self._attempt = attempt and replace(attempt, folder=self._remote.attempts)
        self._is_added = False
        """Whether the URL has the attempt."""
        self._fenced: FencedError | None = None
        self._queue = BackgroundQueue("upload")

    def __str__(self) -> str:
        return str(self._remote.url)

    def open(self) -> None:
        """Record this attempt, and remove the copies of checkpoints that the run has abandoned by
        resuming from an older one. Call on rank 0 before any rank uploads.

        Raises FencedError if a newer attempt uses the URL, StoreError if the store fails; not at a
        restart, for which the run directory has everything: the next update records the attempt.
        """
        try:
            self._add_attempt()  # not earlier: a refused start must not stop that run
            newest = max(self._checkpoints.steps(), default=0)
            for name in self._remote.names():
                if step_of(name) > newest:
                    log.warning("removing %s | the run continues from step %d", name, newest)
                    self._remote.remove(name)
        except OSError as error:
            if self._attempt is None or self._attempt.previous is None:
                raise unreachable(self._remote, error) from error
            log.warning("%s does not respond (%s). Copies are made later", self, error.strerror)

    def _add_attempt(self) -> None:
        if self._attempt is not None and not self._is_added:
            self._attempt.add()
        self._is_added = True

    def update(self, *, published: tuple[int, str] | None = None) -> None:
        """Copy what is missing; returns immediately.

        `published`: step and save id of a checkpoint that rank 0 is about to publish.
        """
        self._expected = published or self._expected
        self._num_updates += 1
        self._queue.submit(partial(self._try_update, self._num_updates))

    @property
    def is_fenced(self) -> bool:
        """Whether the URL has a newer attempt; nothing is changed there any more."""
        return self._fenced is not None

    def require_newest_attempt(self) -> None:
        """Raise the FencedError of the last update, if it had one. Without a request."""
        if self._fenced is not None:
            raise self._fenced

    def wait(self, timeout_seconds: float) -> bool:
        """Wait for the updates of this rank; returns whether all have ended."""
        return self._queue.wait(timeout_seconds)

    def close(self) -> None:
        """End the thread. An upload in progress is not completed."""
        self._closing.set()
        self._queue.close(POLL_SECONDS)

    # --- in the background thread ---------------------------------------------------------------

    def _try_update(self, number: int) -> None:
        # A later update copies everything: a slow store must not get a queue of updates.
        if self._closing.is_set() or self.is_fenced or number < self._num_updates:
            return
        try:
            self._wait_for_publication()
            self._update(number)
            self.failure = None
        except FencedError as error:
            self._fenced = error
        except Exception as error:  # every client library has its own error classes
            if self._closing.is_set():
                log.info("upload to %s | not completed: the same command continues it", self)
                return
            reason = getattr(error, "strerror", None) or str(error)
            self.failure = f"rank {self._rank}: {type(error).__name__}: {printable(reason)}"
            log.warning(
                "upload to %s | %s. Training continues, and the next checkpoint repeats the upload",
                self,
                self.failure,
            )

    def _wait_for_publication(self) -> None:
        deadline = time.monotonic() + self._timeout_seconds
        while expected := self._expected:
            is_over = time.monotonic() > deadline or self._closing.is_set()
            if not (is_over or self._is_published(*expected)):
                self._closing.wait(POLL_SECONDS)
            elif self._expected == expected:  # else the next save has begun meanwhile
                self._expected = None

    def _is_published(self, step: int, save_id: str) -> bool:
        try:
            return load_checkpoint_manifest(self._checkpoints.at(step)).save_id == save_id
        except CheckpointError:
            return False

    def _update(self, number: int) -> None:
        if self._rank == 0:
            self._add_attempt()
        present: dict[int, str | None] = {}
        for step in reversed(self._checkpoints.steps()):
            if present and number < self._num_updates:
                return  # a later update begins with a newer checkpoint
            try:
                present[step] = self._upload(step)
            except CheckpointError as error:
                if self._checkpoints.at(step).exists():  # else it was removed meanwhile
                    log.info("checkpoint at step %d | not copied: %s", step, error)
                present[step] = None
        if self._rank != 0 or not present:
            return
        newest = next((name for name in present.values() if name), None)
        self._check_attempt()
        if newest:
            (self._remote.url / "LATEST").write_bytes(f"checkpoints/{newest}\n".encode())
        self._upload_run_files()
        self._prune(present)

    def _prune(self, present: dict[int, str | None]) -> None:
        """Remove copies, given the remote names of the local checkpoints (None: unreadable)."""
        abandoned = abandoned_names(self._checkpoints)
        # Also of checkpoints since `present` was read: another rank may have uploaded its part.
        local = {*present.values(), *local_names(self._checkpoints)}
        self._check_attempt()
        names, newest = self._remote.names(), max(present)
        # Another rank may already be uploading a newer checkpoint than those in `present`.
        steps = sorted({step_of(name) for name in names if step_of(name) <= newest})
        obsolete = self._retention.removed(steps, kept={self._best_step()})
        for name in names:
            step = step_of(name)
            # A local checkpoint that cannot be read is no reason to remove its copy.
            is_replaced = present.get(step) is not None
            is_obsolete = step in obsolete and step not in present
            if name not in local and (is_replaced or is_obsolete or name in abandoned):
                self._remote.remove(name)

    def _best_step(self) -> int | None:
        step = self._checkpoints.newest_step()
        with suppress(CheckpointError):
            if step is not None:
                return load_checkpoint_manifest(self._checkpoints.at(step)).best_step
        return None

    def _upload(self, step: int) -> str | None:
        """Upload this rank's files of a checkpoint, and on rank 0 the manifest; its remote name."""
        path = self._checkpoints.at(step)
        with reading(path):
            manifest = load_checkpoint_manifest(path)
            name = remote_name(manifest)
            if name is None:
                return None
            target = self._remote.at(name)
            present = _sizes(target)
            fault_point("upload")
            for file, entry in manifest.files.items():
                if self._is_own(file) and present.get(file) != entry.bytes:
                    (target / file).write_from(path / file)
            if self._rank == 0:
                self._wait_for_files(target, manifest)
                content = (path / MANIFEST_NAME).read_bytes()
                if self._sent_manifests.get(name) != content:
                    self._check_attempt()
                    # First, because a resume from this copy needs the metrics up to its step.
                    self._upload_run_files()
                    (target / MANIFEST_NAME).write_bytes(content)
                    self._sent_manifests[name] = content
                    log.info("checkpoint at step %d | copied to %s", step, target)
        return name

    def _upload_run_files(self) -> None:
        for name in RUN_FILES:
            if (path := self._checkpoints.run / name).is_file():
                (self._remote.url / name).write_from(path)

    def _check_attempt(self) -> None:
        """Raise FencedError if another process has continued the run from the copies."""
        if self._attempt is not None:
            self._attempt.require_newest()

    def _is_own(self, file: str) -> bool:
        # Modulo: an older checkpoint may have been written by more ranks than there are now.
        return rank_of(file) % self._num_ranks == self._rank

    def _wait_for_files(self, target: RemotePath, manifest: CheckpointManifest) -> None:
        """Wait until the store has all files, also those that other ranks upload."""
        expected = {file: entry.bytes for file, entry in manifest.files.items()}
        deadline = time.monotonic() + self._timeout_seconds
        while missing := sorted(expected.items() - _sizes(target).items()):
            if time.monotonic() > deadline or self._closing.is_set():
                raise TimeoutError(f"{target / missing[0][0]} was not uploaded by its rank")
            self._closing.wait(POLL_SECONDS)


def unreachable(remote: RemoteCheckpoints, error: OSError) -> StoreError:
    """The error of a start that cannot read the URL of its checkpoints."""
    return StoreError(
        f"training.checkpoint_url={remote.url} cannot be read: {error.strerror}. It may have newer "
        "checkpoints than the run directory, so nothing is trained. Check the bucket, the "
        "credentials and the network and run it again, or train without it: "
        "training.checkpoint_url=null"
    )


def _sizes(target: RemotePath) -> dict[str, int]:
    try:
        return target.sizes()
    except FileNotFoundError:  # a folder of an object store exists once it contains a file
        return {}
