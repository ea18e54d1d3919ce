"""Checkpoints: how the checkpoints of a run are saved, removed and found. Open this file first.

    save    every rank has copied its slices and lane memories (`tensors.py`), writes, syncs and
            hashes them in RUN/checkpoints/.saving-ID.tmp, and then a list of its files;
            rank 0 waits for all lists, writes the manifest (`manifest.py`), renames the directory
            to step-NNNNNNNN, and lets LATEST point to it (`directory.py`);
            the checkpoint is copied to `training.checkpoint_url` in the background (`copies.py`)
    newest  the checkpoint of the highest step: only the name of a directory decides
    best    the checkpoint of the best score: BEST points to it
    prune   once a loss computed from the newest was accepted: removes older ones by `Retention`
    rewind  after a rollback: later checkpoints are superseded
    load    `tensors.py`: verifies the hash of every file, then reads any slice on any rank

A kill at any moment leaves the older checkpoints unchanged. Before each change the attempt is
checked (`attempts.py`): only the newest attempt of a run changes its checkpoints. Nothing here is
collective: a save runs in a background thread of every rank (`txl_dist/training/saving.py`), all
else on rank 0, and no rank gathers more than its own slices. Where a run resumes is decided in
`txl_dist/training/resume.py`.
"""

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from data_pipeline.system.files import publish_file, sha256_file, write_synced
from txl_dist.checkpoint.copies import Uploader
from txl_dist.checkpoint.directory import CheckpointDirectory, Retention, resume_advice
from txl_dist.checkpoint.manifest import (
    MANIFEST_NAME,
    TOKENIZER_NAME,
    CheckpointManifest,
    FileEntry,
    ParameterEntry,
    RankPart,
    RunEntries,
    Slice,
    file_name,
    part_name,
)
from txl_dist.checkpoint.tensors import Snapshot
from txl_dist.errors import CheckpointError, DivergedError, FencedError, LostRankError, TxlError
from txl_dist.runtime.fault_injection import fault_point

_LOOK_SECONDS = 1.0
"""Between two looks at the sizes of the other ranks' files."""
_POLL_SECONDS = 0.02

log = logging.getLogger(__name__)


class CheckpointHeader(RunEntries):
    """What is the same for every checkpoint of an attempt, also the tokenizer itself."""

    tokenizer_json: str
    num_lanes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Save:
    """One save of one rank. `save_id` and `num_ranks` are the same on all ranks, and so is `state`
    but for `best`, which only rank 0 has.
    """

    save_id: str
    """Unique among all saves: the parts of two saves are never in one directory."""
    state: Mapping[str, Any]
    """JSON with a `step`."""
    rank: int
    num_ranks: int
    timeout_seconds: float
    """How long rank 0 waits for a part that does not grow."""
    mlflow_run_id: str | None = None
    require_useful: Callable[[], None] = lambda: None
    """Called often; raises an exception when the save has failed on another rank."""


@dataclass(eq=False)
class Checkpoints:
    """The checkpoints of a run: in its directory, and as copies at a URL if there is an uploader.

    `save` and `prune` raise CheckpointError with the reason and advice, or FencedError if there is
    a newer attempt.
    """

    directory: CheckpointDirectory
    uploader: Uploader | None = None
    retention: Retention = field(default_factory=lambda: Retention(keep=1))

    def save(self, save: Save, snapshot: Snapshot, header: CheckpointHeader) -> Path | None:
        """Write the part of this rank; rank 0 publishes the checkpoint and returns its path.

        Raises DivergedError if `snapshot` has a number that is not finite.
        """
        with self.explained(rank=save.rank):
            self.write_part(save, snapshot)
            if save.rank != 0:
                return None
            path = self.publish(save, header)
        self.upload()
        return path

    def write_part(self, save: Save, snapshot: Snapshot) -> None:
        snapshot.require_finite(step=save.state["step"], rank=save.rank)
        staging = self.directory.begin(save.save_id)
        fault_point("save/files")
        part = snapshot.write(staging, rank=save.rank, before_block=save.require_useful)
        # The last use of the directory: rank 0 may rename it as soon as it finds this file.
        publish_file(staging / part_name(save.rank), part.model_dump_json().encode())

    def publish(self, save: Save, header: CheckpointHeader) -> Path:
        """Rank 0: wait for the parts of all ranks, and publish the checkpoint; returns its path.

        Raises LostRankError if a part has not grown for `save.timeout_seconds`.
        """
        staging = self.directory.staging(save.save_id)
        _wait_for_parts(staging, save)
        fault_point("save/manifest")
        paths = [staging / part_name(rank) for rank in range(save.num_ranks)]
        parts = [RankPart.model_validate_json(path.read_bytes()) for path in paths]
        write_synced(staging / TOKENIZER_NAME, header.tokenizer_json.encode())
        write_synced(staging / MANIFEST_NAME, _manifest(staging, save, header, parts).to_json())
        for path in paths:
            path.unlink()
        checkpoint = self.directory.finish(save.save_id, save.state["step"])
        fault_point("save/latest")
        self.directory.set_pointer("LATEST", save.state["step"])
        return checkpoint

    def rewind(self, step: int, changes: Mapping[str, Any], *, best_step: int | None) -> None:
        """Supersede the checkpoints after `step`, and change entries of the state in its own."""
        self.directory.rewind(step, best_step=best_step)
        self.directory.update_state(step, changes)
        self.upload()  # also removes the copies of the superseded checkpoints

    def prune(self) -> None:
        """Remove what is not kept. Copies are removed at the next upload."""
        with self.explained():
            try:
                best_step = self.directory.read_pointer("BEST")
            except OSError as error:  # the best checkpoint would be removed with the others
                log.warning(
                    f"{error.filename} cannot be read ({error.strerror}), so old checkpoints are "
                    "removed after the next save"
                )
                return
            self.directory.prune(self.retention, best_step=best_step)

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


def _wait_for_parts(staging: Path, save: Save) -> None:
    missing, num_bytes = set(range(save.num_ranks)), 0
    deadline, next_look = time.monotonic() + save.timeout_seconds, 0.0
    while missing := {rank for rank in missing if not (staging / part_name(rank)).exists()}:
        save.require_useful()
        now = time.monotonic()
        # Not at every poll: a network file system is asked for each file.
        if now >= next_look:
            next_look, before = now + _LOOK_SECONDS, num_bytes
            with suppress(OSError):  # a file that is renamed now
                num_bytes = sum(path.stat().st_size for path in staging.iterdir())
            if num_bytes != before:
                deadline = now + save.timeout_seconds
        if now > deadline:
            files = f"files of rank {', '.join(map(str, sorted(missing)))}"
            limit = f"training.rank_timeout_seconds={save.timeout_seconds:g}"
            if any((staging / file_name("weights", rank)).exists() for rank in missing):
                raise LostRankError(  # a restart may help
                    f"the checkpoint {files} have not grown for {limit}: the storage does not "
                    "respond, or is very slow"
                )
            raise CheckpointError(
                f"the {files} are missing after {limit}: the disk is very slow, or the ranks do "
                "not share the run directory; the logs of these ranks say more"
            )
        time.sleep(_POLL_SECONDS)


def _manifest(
    staging: Path, save: Save, header: CheckpointHeader, parts: Sequence[RankPart]
) -> CheckpointManifest:
    tokenizer = staging / TOKENIZER_NAME
    entry = FileEntry(bytes=tokenizer.stat().st_size, sha256=sha256_file(tokenizer))
    files, shapes = {TOKENIZER_NAME: entry}, dict[str, tuple[int, ...]]()
    slices: dict[str, list[Slice]] = {}
    # Which ranks had which lanes is stored, because a resume may distribute them differently.
    rank_of_lane = {lane: part.rank for part in parts for lane in part.lanes}
    for part in parts:
        files |= part.files
        shapes |= part.shapes
        for name, each in part.slices.items():
            slices.setdefault(name, []).append(each)
    return CheckpointManifest(
        **header.model_dump(include=set(RunEntries.model_fields)),
        state=dict(save.state),
        num_ranks=save.num_ranks,
        mlflow_run_id=save.mlflow_run_id,
        rank_of_lane=tuple(rank_of_lane[lane] for lane in range(header.num_lanes)),
        optimizer_states=tuple(sorted({state for part in parts for state in part.states})),
        parameters={
            name: ParameterEntry(
                shape=shapes[name], slices=tuple(sorted(parts_of_name, key=lambda part: part.start))
            )
            for name, parts_of_name in slices.items()
        },
        files=files,
        save_id=save.save_id,
    )
