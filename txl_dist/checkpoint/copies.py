"""The copies of a run's checkpoints in object storage: names, download, and the uploader.

    URL/checkpoints/step-NNNNNNNN.ID/   the files of one save; complete if manifest.json is there
    URL/LATEST                          for people and scripts
    URL/attempts/                       the attempts of the run; see `attempts.py`
    URL/metrics.jsonl, tracking.json, events.jsonl
                                        RUN_FILES, at least up to the newest checkpoint: metrics,
                                        which MLflow run has them, and events

The name of a copy contains the id of the save: an upload that was interrupted can never be
completed with the files of another save of the same step.

Every `Uploader.update` uploads the checkpoints that the URL lacks, newest first. So a failed upload
needs no record: the next update repeats it, and storage that does not respond never stops training.
Copies are removed by the rule for the run directory (`Retention`), not because they are missing
there: a run that has moved to an empty disk keeps its older copies.
"""

import hashlib
import json
import logging
import re
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path

from data_pipeline.errors import printable
from data_pipeline.system.files import write_file, write_synced
from data_pipeline.system.remote_path import RemotePath
from data_pipeline.system.workers import BackgroundQueue
from txl_dist.checkpoint.attempts import FOLDER
from txl_dist.checkpoint.directory import CheckpointDirectory, Retention, find_damage, reading
from txl_dist.checkpoint.manifest import (
    MANIFEST_NAME,
    CheckpointManifest,
    load_checkpoint_manifest,
    newest_manifest,
)
from txl_dist.errors import CheckpointError, ConfigError, FencedError, StoreError
from txl_dist.events import EVENTS
from txl_dist.runtime.fault_injection import fault_point

TRACKING_STATE = "tracking.json"  # of txl_dist/tracking, which imports this package
RUN_FILES = ("metrics.jsonl", TRACKING_STATE, EVENTS)
RETRY_SECONDS = 5.0
"""Delay between two upload attempts at the end of a run, while the object storage fails."""
CLOSE_SECONDS = 0.5
_NAME = re.compile(r"step-(\d{8,})\.([0-9a-f]{8,64})")
_BLOCK_BYTES = 8 * 2**20

log = logging.getLogger(__name__)


def copy_name(manifest: CheckpointManifest) -> str:
    return f"step-{manifest.step:08d}.{manifest.save_id}"


def names_of(paths: Iterable[Path]) -> set[str]:
    """Names of the copies of checkpoints, of those with a readable manifest."""
    names = set()
    for path in paths:
        with suppress(CheckpointError):  # damaged or removed: its copy cannot be identified
            names.add(copy_name(load_checkpoint_manifest(path)))
    return names


def step_of(name: str) -> int:
    match = _NAME.fullmatch(name)
    assert match is not None
    return int(match[1])


def newest_local_copy(directory: CheckpointDirectory) -> Path | None:
    """The newest complete copy that another tool has downloaded with its name at the URL."""
    paths = [path.parent for path in directory.path.glob(f"*/{MANIFEST_NAME}")]
    copies = [path for path in paths if _NAME.fullmatch(path.name)]
    return max(copies, key=lambda path: step_of(path.name), default=None)


@dataclass(frozen=True, slots=True)
class CheckpointCopies:
    """The copies below `url`. Methods raise OSError if the storage fails, after retries."""

    url: RemotePath

    def at(self, name: str) -> RemotePath:
        return self.url / "checkpoints" / name

    def names(self) -> list[str]:
        """Names of all copies, complete or not, sorted."""
        return [name for name in (self.url / "checkpoints").folders() if _NAME.fullmatch(name)]

    def complete(self) -> list[str]:
        """Names of the complete copies, in ascending order of steps."""
        names = [name for name in self.names() if (self.at(name) / MANIFEST_NAME).is_file()]
        try:
            latest = (self.url / "LATEST").read_bytes().decode(errors="replace").strip()
        except FileNotFoundError:
            latest = ""
        # Two of one step are left by a kill after a step was trained again: LATEST is the new one.
        return sorted(names, key=lambda name: (step_of(name), latest.endswith(name)))

    def remove(self, name: str) -> None:
        """Remove a copy, its manifest first, so that it never looks complete."""
        (self.at(name) / MANIFEST_NAME).remove()
        self.at(name).remove()

    def newest_manifest(self, names: Sequence[str]) -> CheckpointManifest:
        """The last readable manifest of the copies `names`.

        Raises CheckpointError if there is none: this attempt would replace them.
        """
        try:
            return newest_manifest([self.at(name) for name in names])
        except CheckpointError as error:
            raise self.all_damaged(error) from None

    def require_run(self, run_id: str) -> None:
        """Raise ConfigError if the copies are those of another run, which would remove them.

        Raises CheckpointError if no manifest says which run that is.
        """
        if (names := self.complete()) and self.newest_manifest(names).run_id != run_id:
            raise ConfigError(
                f"training.checkpoint_url={self.url} has checkpoints of another run "
                f"({names[-1]}). Use another URL for this run, or remove them with the tools of "
                "the object storage"
            )

    def download(self, name: str, directory: CheckpointDirectory) -> Path:
        """Copy a checkpoint, the best one up to its step, and RUN_FILES to the run's directory.

        Returns the path of the first. Files are verified before it gets its final name. RUN_FILES
        stay as they are here if the run has come further than the copy. Raises CheckpointError for
        a damaged copy; a damaged copy of the best one is logged.
        """
        newest = directory.newest_step()
        with self._staged(name, directory) as manifest:
            # Before the newer checkpoint is there: with it, the next start downloads nothing.
            for file in RUN_FILES:
                if (
                    newest is not None
                    and manifest.step <= newest
                    and (directory.run / file).exists()
                ):
                    continue
                with suppress(FileNotFoundError):  # tracking may be off
                    content = (self.url / file).read_bytes()
                    if file == TRACKING_STATE:
                        content = _for_another_directory(content)
                    write_file(directory.run / file, content)
            self._download_best(manifest, directory)
            path = directory.finish(manifest.save_id, manifest.step)
            directory.set_pointer("LATEST", manifest.step)
        return path

    def _download_best(self, newer: CheckpointManifest, directory: CheckpointDirectory) -> None:
        step = newer.best_step
        if step is None or step in (newer.step, *directory.steps()):
            return
        for name in reversed([name for name in self.complete() if step_of(name) == step]):
            try:
                with self._staged(name, directory) as manifest:
                    directory.finish(manifest.save_id, step)
                return
            except CheckpointError as error:
                log.warning("%s. The checkpoint with the best score is not there", error)

    @contextmanager
    def _staged(self, name: str, directory: CheckpointDirectory) -> Iterator[CheckpointManifest]:
        """Download the files of a copy into a staging directory, removed if anything fails."""
        manifest = load_checkpoint_manifest(self.at(name))
        try:
            staging = directory.begin(manifest.save_id)
            write_synced(staging / MANIFEST_NAME, manifest.to_json())
            for file in manifest.files:
                try:
                    with (self.at(name) / file).open() as stream:
                        write_synced(staging / file, iter(partial(stream.read, _BLOCK_BYTES), b""))
                except FileNotFoundError:  # other errors may end by themselves
                    raise CheckpointError(f"{self.at(name) / file} is missing") from None
            if damage := find_damage(staging, manifest, manifest.files):
                raise CheckpointError(f"{self.at(name)} is damaged: {'; '.join(damage)}")
            yield manifest
        except BaseException:
            directory.remove_staging(manifest.save_id)
            raise

    def unreachable(self, error: OSError) -> StoreError:
        return StoreError(
            f"training.checkpoint_url={self.url} cannot be read: {error.strerror}. It may have "
            "newer checkpoints than the run directory, so nothing is trained. Check the bucket, "
            "the credentials and the network and run it again, or train without it: "
            "training.checkpoint_url=null"
        )

    def all_damaged(self, damage: object) -> CheckpointError:
        """The error of an attempt that finds only damaged copies, and would replace them."""
        return CheckpointError(
            f"all checkpoints at training.checkpoint_url={self.url} are damaged: {damage}. Nothing "
            "was changed. Restore one from a backup; or begin again with another URL, or with "
            "training.checkpoint_url=null"
        )


class Uploader:
    """Uploads in a background thread of rank 0."""

    def __init__(
        self, copies: CheckpointCopies, directory: CheckpointDirectory, retention: Retention
    ) -> None:
        self._copies, self._directory, self._retention = copies, directory, retention
        assert directory.attempt is not None
        self._attempt = replace(directory.attempt, folder=copies.url / FOLDER)
        self._add_attempt = cache(self._attempt.add)  # once, but again if it has failed
        self._sent_manifests: dict[str, bytes] = {}
        """The sha256 of each."""
        self._is_due = False
        """Whether an update was asked for that has not begun."""
        self._closing = threading.Event()
        self.failure: str | None = None
        """Why the last update has failed; None if it has not."""
        self._queue = BackgroundQueue("upload")
        """After a FencedError, it drops all updates: nothing is changed at the URL any more."""

    def open(self) -> None:
        """Record this attempt, and remove the copies of superseded checkpoints.

        Raises FencedError if a newer attempt uses the URL, StoreError if the storage fails; not at
        a restart, for which the run directory has everything: the next update records the attempt.
        """
        try:
            self._add_attempt()  # only now: an attempt that is refused must not stop that run
            newest = self._directory.newest_step() or 0
            for name in self._copies.names():
                if step_of(name) > newest:
                    log.warning("removing %s | the run continues from step %d", name, newest)
                    self._copies.remove(name)
        except OSError as error:
            if self._attempt.previous is None:
                raise self._copies.unreachable(error) from error
            log.warning(
                "%s does not respond (%s). Copies are made later", self._copies.url, error.strerror
            )

    def update(self) -> None:
        """Upload what is missing; returns immediately."""
        self._is_due = True
        self._queue.submit(self._try_update)

    @property
    def fenced(self) -> Exception | None:
        """The FencedError of an update that has found a newer attempt at the URL."""
        return self._queue.error

    def require_newest_attempt(self) -> None:
        """Raise `fenced`, if an update had it. Without a request."""
        if self.fenced is not None:
            raise self.fenced

    def wait(self, timeout_seconds: float) -> bool:
        """Wait for the updates; returns whether all have ended."""
        return self._queue.wait(timeout_seconds)

    def finish(self, timeout_seconds: float, *, retry: bool) -> str | None:
        """Update and wait until all copies are complete; returns why they are not, or None.

        With `retry`, a failed update is repeated for `timeout_seconds`. Raises FencedError.
        """
        deadline = time.monotonic() + timeout_seconds
        while True:
            self.update()
            is_idle = self.wait(max(0.0, deadline - time.monotonic()))
            self.require_newest_attempt()
            if not is_idle:
                return self.failure or "the uploads took too long"
            if self.failure is None or not retry or time.monotonic() > deadline:
                return self.failure
            time.sleep(RETRY_SECONDS)

    def close(self) -> None:
        """End the thread. An upload in progress is not completed."""
        self._closing.set()
        self._queue.close(CLOSE_SECONDS)

    # --- in the background thread ---------------------------------------------------------------

    def _try_update(self) -> None:
        # One update copies everything: slow storage must not get a queue of updates.
        if self._closing.is_set() or not self._is_due:
            return
        self._is_due = False
        try:
            self._update()
            self.failure = None
        except FencedError:
            raise
        except Exception as error:  # every client library has its own error classes
            url = self._copies.url
            if self._closing.is_set():
                log.info("upload to %s | not completed: the same command continues it", url)
                return
            reason = getattr(error, "strerror", None) or str(error)
            self.failure = f"{type(error).__name__}: {printable(reason)}"
            log.warning(
                f"upload to {url} | {self.failure}. Training continues, and the next checkpoint "
                "repeats the upload"
            )

    def _update(self) -> None:
        self._add_attempt()
        steps = self._directory.steps()
        present: dict[int, str | None] = dict.fromkeys(reversed(steps))
        """Names of the copies by step; None: not known."""
        damage = None
        for step in present:
            if step < steps[-1] and self._is_due:
                break  # the next update begins with a newer checkpoint
            try:
                present[step] = self._upload(step)
            except CheckpointError as error:
                if self._directory.at(step).exists():  # else it was removed meanwhile
                    log.info("checkpoint at step %d | not copied: %s", step, error)
                    damage = damage or (error if step == steps[-1] else None)
        if not present:
            return
        self._attempt.require_newest()
        if newest := next((name for name in present.values() if name), None):
            (self._copies.url / "LATEST").write_bytes(f"checkpoints/{newest}\n".encode())
        self._upload_run_files()
        self._prune(present)
        if damage is not None:
            raise damage

    def _upload(self, step: int) -> str:
        """Upload the files of a checkpoint, its manifest last; returns the name of the copy."""
        path = self._directory.at(step)
        with reading(path):
            manifest = load_checkpoint_manifest(path)
            name = copy_name(manifest)
            target = self._copies.at(name)
            present = target.sizes()
            fault_point("upload")
            for file, entry in manifest.files.items():
                if self._closing.is_set():
                    raise TimeoutError("the run has ended")
                if present.get(file) != entry.bytes:
                    (target / file).write_from(path / file)
            content = (path / MANIFEST_NAME).read_bytes()
            digest = hashlib.sha256(content).digest()
            if self._sent_manifests.get(name) != digest:
                self._attempt.require_newest()
                # Before the manifest: a resume from this copy needs the metrics up to its step.
                self._upload_run_files()
                (target / MANIFEST_NAME).write_bytes(content)
                self._sent_manifests[name] = digest
                log.info("checkpoint at step %d | copied to %s", step, target)
        return name

    def _upload_run_files(self) -> None:
        for name in RUN_FILES:
            if (path := self._directory.run / name).is_file():
                (self._copies.url / name).write_from(path)

    def _prune(self, present: dict[int, str | None]) -> None:
        """Remove copies, given those of the checkpoints in the run directory.

        Those of later steps are superseded, by a rollback whose update the storage has missed.
        """
        superseded = names_of(self._directory.superseded())
        self._attempt.require_newest()
        names, newest = self._copies.names(), max(present)
        steps = sorted({step_of(name) for name in names if step_of(name) <= newest})
        manifest = self._directory.newest_manifest()
        obsolete = self._retention.removed(steps, kept={manifest.best_step if manifest else None})
        for name in names:
            step = step_of(name)
            # A checkpoint that cannot be read is no reason to remove its copy.
            is_replaced = present.get(step) not in (None, name)
            is_obsolete = step in obsolete and step not in present
            if step > newest or is_replaced or is_obsolete or name in superseded:
                self._copies.remove(name)


def _for_another_directory(tracking_state: bytes) -> bytes:
    """The run continues there, with its MLflow run: older attempts are fenced."""
    with suppress(ValueError, TypeError):  # damaged
        changed = {**json.loads(tracking_state), "directory": None}
        return json.dumps(changed).encode() + b"\n"
    return tracking_state
