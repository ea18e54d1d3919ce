"""Writes the files of a checkpoint: every rank its own slices, rank 0 the manifest.

    .saving-ID.tmp/                 every rank writes, syncs and hashes its files,
    .saving-ID.tmp/part-rank-N.json and then this list of them
    .saving-ID.tmp/manifest.json    rank 0, when the parts of all ranks are there

There are no collectives, so that a save can run in background threads. No rank gathers more than
its own slices. `Checkpoints.publish` renames the complete directory (`checkpoints.py`).
"""

import shutil
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from data_pipeline.system.files import (
    publish_file,
    sha256_file,
    write_file,
    write_synced,
)
from data_pipeline.system.strict import first_problem
from txl_dist.checkpoint.directory import CheckpointDirectory
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
    load_checkpoint_manifest,
    part_name,
)
from txl_dist.checkpoint.snapshot import Snapshot
from txl_dist.errors import CheckpointError, LostRankError, TxlError
from txl_dist.runtime.fault_injection import fault_point

_LOOK_SECONDS = 1.0
"""Between two looks at the sizes of the other ranks' files."""
_POLL_SECONDS = 0.02
"""Polling interval while waiting for the parts of the other ranks."""


class CheckpointHeader(RunEntries):
    """What is the same for every checkpoint of an attempt."""

    tokenizer_json: str
    num_lanes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Save:
    """One save of one rank. `save_id`, `state` and `num_ranks` are the same on all ranks."""

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

    @property
    def step(self) -> int:
        """The step whose checkpoint is written."""
        step: int = self.state["step"]
        return step

    def write_part(self, staging: Path, snapshot: Snapshot) -> None:
        """Write this rank's files. Raises CheckpointError if the disk has too little room."""
        fault_point("save/files")
        needed, free = snapshot.num_bytes, shutil.disk_usage(staging).free
        if free < needed:
            raise CheckpointError(
                f"disk full: rank {self.rank} needs {needed:,} bytes, {free:,} are free"
            )
        part = snapshot.write(staging, rank=self.rank, before_block=self.require_useful)
        # The last use of the directory: rank 0 may rename it as soon as it finds this file.
        publish_file(staging / part_name(self.rank), part.model_dump_json().encode())

    def complete(self, staging: Path, header: CheckpointHeader) -> None:
        """Rank 0: wait for the parts of all ranks, and write the manifest.

        Raises CheckpointError or LostRankError if a part is missing after `timeout_seconds`.
        """
        self._wait_for_parts(staging)
        fault_point("save/manifest")
        parts = [_read_part(staging, rank) for rank in range(self.num_ranks)]
        self._write_manifest(staging, header, parts)
        for rank in range(self.num_ranks):
            (staging / part_name(rank)).unlink()

    def _wait_for_parts(self, staging: Path) -> None:
        missing, timeout_seconds = set(range(self.num_ranks)), self.timeout_seconds
        num_bytes, deadline, next_look = 0, time.monotonic() + timeout_seconds, 0.0
        while missing := {rank for rank in missing if not (staging / part_name(rank)).exists()}:
            self.require_useful()
            now = time.monotonic()
            # Not at every poll: a network file system is asked for each file.
            if now >= next_look:
                next_look, size = now + _LOOK_SECONDS, _written_bytes(staging)
                if size != num_bytes:
                    num_bytes, deadline = size, now + timeout_seconds
            if now > deadline:
                has_begun = any((staging / file_name("weights", rank)).exists() for rank in missing)
                raise _stalled(missing, timeout_seconds, has_begun=has_begun)
            time.sleep(_POLL_SECONDS)

    def _write_manifest(
        self, staging: Path, header: CheckpointHeader, parts: list[RankPart]
    ) -> None:
        tokenizer = staging / TOKENIZER_NAME
        write_synced(tokenizer, header.tokenizer_json.encode())
        entry = FileEntry(bytes=tokenizer.stat().st_size, sha256=sha256_file(tokenizer))
        files = {TOKENIZER_NAME: entry}
        for part in parts:
            files |= part.files
        # Which ranks had which lanes is stored, because a resume may distribute them differently.
        rank_of_lane = {lane: part.rank for part in parts for lane in part.lanes}
        states = {state for part in parts for each in part.slices.values() for state in each.states}
        manifest = CheckpointManifest(
            **header.model_dump(include=set(RunEntries.model_fields)),
            state=dict(self.state),
            num_ranks=self.num_ranks,
            mlflow_run_id=self.mlflow_run_id,
            rank_of_lane=tuple(rank_of_lane[lane] for lane in range(header.num_lanes)),
            optimizer_states=tuple(sorted(states)),
            parameters=_join_slices(parts),
            files=files,
            save_id=self.save_id,
        )
        write_synced(staging / MANIFEST_NAME, manifest.to_json())


def update_state(directory: CheckpointDirectory, step: int, changes: Mapping[str, Any]) -> None:
    """Replace entries of `state` in the manifest of a step's checkpoint; called on rank 0."""
    directory.require_newest_attempt()
    path = directory.at(step)
    manifest = load_checkpoint_manifest(path)
    updated = manifest.model_copy(update={"state": {**manifest.state, **changes}})
    write_file(path / MANIFEST_NAME, updated.to_json())


def _written_bytes(staging: Path) -> int:
    with suppress(OSError):  # a file that is renamed now
        return sum(path.stat().st_size for path in staging.iterdir())
    return 0


def _stalled(ranks: set[int], seconds: float, *, has_begun: bool) -> TxlError:
    limit = f"training.rank_timeout_seconds={seconds:g}"
    if has_begun:  # a restart may help
        return LostRankError(
            f"the checkpoint files of {_ranks(ranks)} have not grown for {limit}: the storage does "
            "not respond, or is very slow"
        )
    return CheckpointError(
        f"the files of {_ranks(ranks)} are missing after {limit}: the disk is very slow, or the "
        "ranks do not share the run directory; the logs of these ranks say more"
    )


def _read_part(staging: Path, rank: int) -> RankPart:
    path = staging / part_name(rank)
    try:
        return RankPart.model_validate_json(path.read_bytes())
    except ValidationError as error:
        raise CheckpointError(f"{path}: {first_problem(error)}") from None


def _ranks(ranks: set[int]) -> str:
    names = ", ".join(map(str, sorted(ranks)))
    return f"rank {names}" if len(ranks) == 1 else f"ranks {names}"


def _join_slices(parts: list[RankPart]) -> dict[str, ParameterEntry]:
    slices: dict[str, list[Slice]] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for part in parts:
        for name, each in part.slices.items():
            shapes[name] = each.shape
            slices.setdefault(name, []).append(
                Slice(rank=part.rank, start=each.start, stop=each.stop)
            )
    return {
        name: ParameterEntry(
            shape=shapes[name], slices=tuple(sorted(parts_of_name, key=lambda part: part.start))
        )
        for name, parts_of_name in slices.items()
    }
