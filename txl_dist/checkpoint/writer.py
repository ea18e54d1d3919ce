"""Writes a checkpoint: every rank its own slices, rank 0 the manifest, then one rename.

    .saving.tmp/            all ranks write, fsync and hash their files
    .saving.tmp/manifest    rank 0, after all other files
    step-NNNNNNNN           by rename; then LATEST, by rename
    .../manifest            replaced by rename when the step has been evaluated, to add its score

A kill at any moment leaves the older checkpoints unchanged. No rank gathers more than its own
slices. A checkpoint with a NaN or an infinity is never written: nothing could resume from it, and
older checkpoints would be removed in favour of it.
"""

import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from torch import Tensor

from data_pipeline.storage.atomic_files import sha256_file, write_file, write_synced, write_with
from txl_dist.checkpoint.directory import CheckpointDirectory, resume_advice
from txl_dist.checkpoint.fragments import OPTIMIZER_STATES, Fragment
from txl_dist.checkpoint.manifest import (
    MANIFEST_NAME,
    TOKENIZER_NAME,
    CheckpointManifest,
    FileEntry,
    Kind,
    ParameterEntry,
    Slice,
    file_name,
    lane_key,
    load_checkpoint_manifest,
)
from txl_dist.errors import CheckpointError, DivergedError, TxlError
from txl_dist.runtime.fault_injection import fault_point
from txl_dist.runtime.world import World


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointHeader:
    """The entries of the manifest that are the same for every checkpoint of a run."""

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
    state: Mapping[str, Any],
    fragments: Iterable[Fragment],
    memory_of_lane: Mapping[int, Tensor],
    mlflow_run_id: str | None,
    world: World,
) -> Path:
    """Save `state` (JSON with a `step`) and all tensors. Collective; returns the final directory.

    Raises CheckpointError on every rank if any rank fails, after removing the written files, and
    DivergedError before anything is written if any rank has a number that is not finite.
    """
    step: int = state["step"]
    local = _RankContent(list(fragments), memory_of_lane)
    sizes, not_finite = zip(*world.all_gather((local.num_bytes, local.not_finite)), strict=True)
    _require_finite(step, not_finite)
    with explain_failed_save(directory):
        try:
            world.run_on_rank_zero(lambda: _begin(directory, sum(sizes)))
            # Files are complete and on disk on all ranks before rank 0 writes the manifest.
            parts = world.run_on_all(lambda: local.write(directory.staging, world.rank))
            world.run_on_rank_zero(lambda: _finish(directory, header, state, parts, mlflow_run_id))
        except TxlError:
            if world.is_rank_zero:
                shutil.rmtree(directory.staging, ignore_errors=True)
            raise
    return directory.at(step)


def update_state(directory: CheckpointDirectory, step: int, changes: Mapping[str, Any]) -> None:
    """Replace entries of `state` in the manifest of a step's checkpoint; called on rank 0."""
    path = directory.at(step)
    manifest = load_checkpoint_manifest(path)
    updated = manifest.model_copy(update={"state": {**manifest.state, **changes}})
    write_file(path / MANIFEST_NAME, updated.to_json())


@contextmanager
def explain_failed_save(directory: CheckpointDirectory) -> Iterator[None]:
    """Turn errors of collective work on a checkpoint into a CheckpointError with advice."""
    try:
        yield
    except TxlError as error:
        raise CheckpointError(
            f"{directory.path}: the checkpoint could not be written: {error}. Free some space "
            f"or repair the directory. {resume_advice(directory.run)}"
        ) from error


def _require_finite(step: int, not_finite_of_ranks: Sequence[Sequence[str]]) -> None:
    bad = [f"{name} (rank {r})" for r, names in enumerate(not_finite_of_ranks) for name in names]
    if bad:
        more = f" and {len(bad) - 3} more" if len(bad) > 3 else ""
        raise DivergedError(
            f"after step {step} not all numbers are finite in {', '.join(bad[:3])}{more}: "
            "the update was too large, so no checkpoint is written"
        )


def _begin(directory: CheckpointDirectory, num_bytes: int) -> None:
    free = shutil.disk_usage(directory.begin()).free
    if free < num_bytes:
        raise CheckpointError(f"disk full: {num_bytes:,} bytes needed, {free:,} are free")


def _finish(
    directory: CheckpointDirectory,
    header: CheckpointHeader,
    state: Mapping[str, Any],
    parts: list["_RankPart"],
    mlflow_run_id: str | None,
) -> None:
    fault_point("save/manifest")
    _write_manifest(directory.staging, header, state, parts, mlflow_run_id)
    directory.finish(state["step"])
    fault_point("save/latest")
    directory.set_pointer("LATEST", state["step"])


@dataclass(frozen=True, slots=True)
class _RankPart:
    """The files and slices that one rank has written."""

    slices: dict[str, tuple[tuple[int, ...], int, int]]
    """Parameter -> its whole shape, start, stop."""
    lanes: list[int]
    files: dict[str, FileEntry]


class _RankContent:
    """The tensors that one rank has to write, copied to the CPU."""

    def __init__(self, fragments: list[Fragment], memory_of_lane: Mapping[int, Tensor]) -> None:
        self._slices = {f.name: (f.shape, f.start, f.stop) for f in fragments}
        self._lanes = sorted(memory_of_lane)
        self._tensors: dict[Kind, dict[str, np.ndarray]] = {
            "weights": {f.name: _to_numpy(f.master) for f in fragments},
            "optimizer": {
                f"{f.name}/{state}": _to_numpy(f.states[state])
                for f in fragments
                for state in OPTIMIZER_STATES
            },
            "memory": {lane_key(lane): _to_numpy(m) for lane, m in memory_of_lane.items()},
        }

    @property
    def num_bytes(self) -> int:
        # Without file headers: a disk that is full because of those fails with ENOSPC later.
        return sum(array.nbytes for kind in self._tensors.values() for array in kind.values())

    @property
    def not_finite(self) -> list[str]:
        """Names of the tensors that contain a NaN or an infinity."""
        tensors = (
            (k, name, a) for k, arrays in self._tensors.items() for name, a in arrays.items()
        )
        return [f"{kind} {name}" for kind, name, a in tensors if not np.isfinite(a).all()]

    def write(self, staging: Path, rank: int) -> _RankPart:
        """Write, fsync and hash this rank's files."""
        fault_point("save/files")
        files = {}
        for kind, arrays in self._tensors.items():
            path = staging / file_name(kind, rank)
            write_with(path, partial(save_file, arrays))
            files[path.name] = _file_entry(path)
        return _RankPart(self._slices, self._lanes, files)


def _write_manifest(
    staging: Path,
    header: CheckpointHeader,
    state: Mapping[str, Any],
    parts: list[_RankPart],
    mlflow_run_id: str | None,
) -> None:
    tokenizer = staging / TOKENIZER_NAME
    write_synced(tokenizer, header.tokenizer_json.encode())
    files = {TOKENIZER_NAME: _file_entry(tokenizer)}
    for part in parts:
        files |= part.files
    # Which ranks had which lanes is stored, because a resume may distribute them differently.
    rank_of_lane = {lane: rank for rank, part in enumerate(parts) for lane in part.lanes}
    manifest = CheckpointManifest(
        written_by=header.written_by,
        state=dict(state),
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
        files=files,
    )
    write_synced(staging / MANIFEST_NAME, manifest.to_json())


def _file_entry(path: Path) -> FileEntry:
    return FileEntry(bytes=path.stat().st_size, sha256=sha256_file(path))


def _join_slices(parts: list[_RankPart]) -> dict[str, ParameterEntry]:
    slices: dict[str, list[Slice]] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for rank, part in enumerate(parts):
        for name, (shape, start, stop) in part.slices.items():
            shapes[name] = shape
            slices.setdefault(name, []).append(Slice(rank=rank, start=start, stop=stop))
    return {
        name: ParameterEntry(
            shape=shapes[name], slices=tuple(sorted(parts_of_name, key=lambda part: part.start))
        )
        for name, parts_of_name in slices.items()
    }


def _to_numpy(tensor: Tensor) -> np.ndarray:
    return tensor.detach().float().cpu().contiguous().numpy()
