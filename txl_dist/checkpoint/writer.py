"""Writes a checkpoint: every rank its own slices, rank 0 the manifest, one rename makes it real.

    aside/           all ranks write, sync and hash their files
    aside/manifest   rank 0, last
    step-NNNNNNNN    by rename; then LATEST and BEST by rename; then the old ones go

A kill at any moment leaves the older checkpoints as they were. No rank holds more than its part.
"""

import errno
import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from safetensors.numpy import save_file
from torch import Tensor

from data_pipeline.atomic_files import sha256_file, write_synced
from txl_dist.checkpoint.directory import CheckpointDirectory
from txl_dist.checkpoint.fragments import OPTIMIZER_STATES, Fragment
from txl_dist.checkpoint.manifest import (
    MANIFEST_NAME,
    TOKENIZER_NAME,
    CheckpointManifest,
    FileEntry,
    Kind,
    ParameterEntry,
    Slice,
    TrainState,
    file_name,
    lane_key,
)
from txl_dist.errors import CheckpointError
from txl_dist.world import World

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointHeader:
    """What the manifest says beside tensors; the same for every checkpoint of a run."""

    written_by: str
    model: dict[str, Any]
    run: dict[str, Any]
    tokenizer_json: str
    tokenizer_digest: str
    data_digest: str
    vocab_size: int
    zero_stage: int
    num_lanes: int


def save_checkpoint(
    directory: CheckpointDirectory,
    *,
    header: CheckpointHeader,
    state: TrainState,
    fragments: Iterable[Fragment],
    memory_of_lane: Mapping[int, Tensor],
    mlflow_run_id: str | None,
    world: World,
) -> Path:
    """Save `state` and all tensors; every rank calls it. Returns the final directory.

    Raises CheckpointError on every rank, with what was written removed, if any rank fails.
    """

    def begin() -> None:
        if world.is_first:
            directory.begin()

    _on_all_ranks(world, directory, begin)
    parts = _on_all_ranks(
        world,
        directory,
        lambda: _write_rank(directory.aside, list(fragments), memory_of_lane, world.rank),
    )

    def finish() -> None:
        if world.is_first:
            _write_manifest(directory.aside, header, state, parts, mlflow_run_id)
            directory.finish(state.step)
            directory.point("LATEST", state.step)

    _on_all_ranks(world, directory, finish)
    return directory.at(state.step)


@dataclass(frozen=True, slots=True)
class _RankPart:
    """What one rank wrote."""

    slices: dict[str, tuple[tuple[int, ...], int, int]]
    """Parameter -> shape, start, stop."""
    lanes: list[int]
    files: dict[str, tuple[int, str]]
    """Name -> bytes, sha256."""


def _write_rank(
    aside: Path, fragments: list[Fragment], memory_of_lane: Mapping[int, Tensor], rank: int
) -> _RankPart:
    tensors: dict[Kind, dict[str, np.ndarray]] = {
        "weights": {f.name: _to_numpy(f.master) for f in fragments},
        "optimizer": {
            f"{f.name}/{state}": _to_numpy(f.states[state])
            for f in fragments
            for state in OPTIMIZER_STATES
        },
        "memory": {lane_key(lane): _to_numpy(m) for lane, m in memory_of_lane.items()},
    }
    need = sum(array.nbytes for arrays in tensors.values() for array in arrays.values())
    if (free := shutil.disk_usage(aside).free) < need:
        raise OSError(errno.ENOSPC, f"disk full: this rank needs {need:,} bytes, {free:,} are free")
    files = {}
    for kind, arrays in tensors.items():
        path = aside / file_name(kind, rank)
        save_file(arrays, path)
        _sync(path)
        files[path.name] = (path.stat().st_size, sha256_file(path))
    slices = {f.name: (f.shape, f.start, f.stop) for f in fragments}
    return _RankPart(slices, sorted(memory_of_lane), files)


def _write_manifest(
    aside: Path,
    header: CheckpointHeader,
    state: TrainState,
    parts: list[_RankPart],
    mlflow_run_id: str | None,
) -> None:
    tokenizer = aside / TOKENIZER_NAME
    write_synced(tokenizer, header.tokenizer_json.encode())
    files = {name: entry for part in parts for name, entry in part.files.items()}
    files[TOKENIZER_NAME] = (tokenizer.stat().st_size, sha256_file(tokenizer))
    rank_of_lane = {lane: rank for rank, part in enumerate(parts) for lane in part.lanes}
    manifest = CheckpointManifest(
        written_by=header.written_by,
        state=state,
        model=header.model,
        run=header.run,
        tokenizer_digest=header.tokenizer_digest,
        data_digest=header.data_digest,
        vocab_size=header.vocab_size,
        num_ranks=len(parts),
        zero_stage=header.zero_stage,
        mlflow_run_id=mlflow_run_id,
        rank_of_lane=tuple(rank_of_lane[lane] for lane in range(header.num_lanes)),
        optimizer_states=OPTIMIZER_STATES,
        parameters=_join_slices(parts),
        files={
            name: FileEntry(bytes=size, sha256=digest) for name, (size, digest) in files.items()
        },
    )
    write_synced(aside / MANIFEST_NAME, manifest.to_json())


def _join_slices(parts: list[_RankPart]) -> dict[str, ParameterEntry]:
    slices: dict[str, list[Slice]] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for rank, part in enumerate(parts):
        for name, (shape, start, stop) in part.slices.items():
            shapes[name] = shape
            slices.setdefault(name, []).append(Slice(rank=rank, start=start, stop=stop))
    return {
        name: ParameterEntry(
            shape=shapes[name], slices=tuple(sorted(found, key=lambda part: part.start))
        )
        for name, found in slices.items()
    }


def _on_all_ranks(world: World, directory: CheckpointDirectory, work: Callable[[], T]) -> list[T]:
    """Each rank's result on every rank; if one rank fails, all raise and the attempt is removed."""
    outcome: tuple[T | None, str | None]
    try:
        outcome = (work(), None)
    except OSError as error:
        outcome = (None, f"rank {world.rank}: {error}")
    outcomes = world.gather(outcome)
    failures = [failure for _, failure in outcomes if failure]
    if failures:
        if world.is_first:
            shutil.rmtree(directory.aside, ignore_errors=True)
        raise CheckpointError(
            f"{directory.path}: the checkpoint could not be written: {'; '.join(failures)}. The "
            "previous checkpoint is untouched. Free space or mend the directory, then run the same "
            "command again to resume from it"
        )
    return [result for result, _ in outcomes]


def _to_numpy(tensor: Tensor) -> np.ndarray:
    return tensor.detach().float().cpu().contiguous().numpy()


def _sync(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
