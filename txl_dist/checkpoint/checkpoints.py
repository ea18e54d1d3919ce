"""Checkpoints: how the checkpoints of a run are saved, removed and found. Open this file first.

    save    every rank has copied its slices and lane memories (`snapshot.py`), writes them into
            RUN/checkpoints/.saving-ID.tmp, and then a list of its files (`writer.py`);
            rank 0 waits for all lists, writes the manifest (`manifest.py`), renames the directory
            to step-NNNNNNNN, and lets LATEST point to it (`directory.py`);
            the checkpoint is copied to `training.checkpoint_url` in the background (`copies.py`)
    newest  the checkpoint of the highest step: only the name of a directory decides
    best    the checkpoint of the best score: BEST points to it
    prune   once a loss computed from the newest was accepted: removes older ones by `Retention`
    rewind  after a rollback: later checkpoints are superseded
    load    `reader.py`: verifies the hash of every file, then reads any slice on any rank

A kill at any moment leaves the older checkpoints unchanged. Before each change the attempt is
checked (`attempts.py`): only the newest attempt of a run changes its checkpoints. Nothing here is
collective: a save runs in a background thread of every rank (`txl_dist/training/saving.py`), all
else on rank 0. Where a run resumes is decided in `txl_dist/training/resume.py`.
"""

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from txl_dist.checkpoint.copies import Uploader
from txl_dist.checkpoint.directory import CheckpointDirectory, Retention, resume_advice
from txl_dist.checkpoint.snapshot import Snapshot
from txl_dist.checkpoint.writer import CheckpointHeader, Save, update_state
from txl_dist.errors import CheckpointError, DivergedError, FencedError, LostRankError, TxlError
from txl_dist.runtime.fault_injection import fault_point

log = logging.getLogger(__name__)


class Checkpoints:
    """The checkpoints of a run: in its directory, and as copies at a URL if there is an uploader.

    Methods that change anything raise CheckpointError with the reason and advice, or FencedError
    if there is a newer attempt.
    """

    def __init__(
        self,
        directory: CheckpointDirectory,
        uploader: Uploader | None = None,
        *,
        retention: Retention = Retention(keep=1),  # noqa: B008 - frozen
    ) -> None:
        self.directory, self.uploader, self._retention = directory, uploader, retention

    def save(self, save: Save, snapshot: Snapshot, header: CheckpointHeader) -> Path | None:
        """Write the part of this rank; rank 0 publishes the checkpoint and returns its path.

        Raises DivergedError if `snapshot` has a number that is not finite.
        """
        self.write_part(save, snapshot)
        if save.rank != 0:
            return None
        path = self.publish(save, header)
        self.upload()
        return path

    def write_part(self, save: Save, snapshot: Snapshot) -> None:
        """Write the files of this rank into the staging directory."""
        snapshot.require_finite(step=save.step, rank=save.rank)
        with self.explained(rank=save.rank):
            save.write_part(self.directory.begin(save.save_id), snapshot)

    def publish(self, save: Save, header: CheckpointHeader) -> Path:
        """Rank 0: wait for the parts of all ranks, and publish the checkpoint; returns its path."""
        directory = self.directory
        with self.explained():
            save.complete(directory.staging(save.save_id), header)
            path = directory.finish(save.save_id, save.step)
            fault_point("save/latest")
            directory.set_pointer("LATEST", save.step)
        return path

    def rewind(self, step: int, changes: Mapping[str, Any], *, best_step: int | None) -> None:
        """Supersede the checkpoints after `step`, and change entries of the state in its own."""
        self.directory.rewind(step, best_step=best_step)
        update_state(self.directory, step, changes)
        self.upload()  # also removes the copies of the superseded checkpoints

    def prune(self) -> None:
        """Remove what is not kept. Copies are removed at the next upload."""
        with self.explained():
            self.directory.prune(self._retention, best_step=self.directory.pointer("BEST"))

    def upload(self) -> None:
        """Copy what the URL lacks, in the background."""
        if self.uploader is not None:
            self.uploader.update()

    @contextmanager
    def explained(self, *, rank: int = 0) -> Iterator[None]:
        """Turn errors of work on checkpoints into a CheckpointError with the rank and advice.

        If a newer attempt is the reason, into its FencedError.
        """
        directory = self.directory
        try:
            yield
        except (DivergedError, FencedError, LostRankError):
            raise
        except Exception as error:
            # A newer attempt removes the files that older ones are writing.
            with suppress(OSError):
                directory.require_newest_attempt()
            reason = error if isinstance(error, TxlError) else f"{type(error).__name__}: {error}"
            raise CheckpointError(
                f"{directory.path}: the checkpoint could not be written: rank {rank}: {reason}. "
                "Free some space, raise a limit of file sizes, or repair the directory. "
                f"{resume_advice(directory.run)}"
            ) from error
