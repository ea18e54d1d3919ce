"""Writes a checkpoint: every rank its own slices, rank 0 the manifest, one rename makes it real.

    aside/           all ranks write, sync and hash their files
    aside/manifest   rank 0, last
    step-NNNNNNNN    by rename; then LATEST by rename
    .../manifest     by rename again, when the step has been evaluated: now with its score

A kill at any moment leaves the older checkpoints as they were. No rank holds more than its part.
Numbers that are not finite are never written: such a checkpoint would only push good ones out.
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
    TrainState,
    file_name,
    lane_key,
    load_checkpoint_manifest,
)
from txl_dist.errors import CheckpointError, DivergedError, TxlError
from txl_dist.runtime.world import World


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

    Raises CheckpointError on every rank, with what was written removed, if any rank fails, and
    DivergedError before anything is written if any number of any rank is not finite.
    """
    mine = _RankContent(list(fragments), memory_of_lane)
    sizes, not_finite = zip(*world.gather((mine.num_bytes, mine.not_finite)), strict=True)
    _require_finite(state, not_finite)
    with explain_failed_save(directory):
        try:
            world.run_on_rank_zero(lambda: _begin(directory, sum(sizes)))
            parts = world.run_on_all(lambda: mine.write(directory.aside, world.rank))
            world.run_on_rank_zero(lambda: _finish(directory, header, state, parts, mlflow_run_id))
        except TxlError:
            if world.is_rank_zero:
                shutil.rmtree(directory.aside, ignore_errors=True)
            raise
    return directory.at(state.step)


def save_score(directory: CheckpointDirectory, state: TrainState) -> None:
    """Put the score that `state` has now into the manifest of its step's checkpoint; on rank 0."""
    path = directory.at(state.step)
    manifest = load_checkpoint_manifest(path)
    scored = {"best": state.best, "evaluation_pending": state.evaluation_pending}
    scored_state = manifest.state.model_copy(update=scored)
    scored_manifest = manifest.model_copy(update={"state": scored_state})
    write_file(path / MANIFEST_NAME, scored_manifest.to_json())


@contextmanager
def explain_failed_save(directory: CheckpointDirectory) -> Iterator[None]:
    """Around collective work on a checkpoint: its errors become a CheckpointError with advice."""
    try:
        yield
    except TxlError as error:
        raise CheckpointError(
            f"{directory.path}: the checkpoint could not be written: {error}. Free some space or "
            f"mend the directory. {resume_advice(directory.run)}"
        ) from error


def _require_finite(state: TrainState, not_finite_of_ranks: Sequence[Sequence[str]]) -> None:
    bad = [f"{name} (rank {r})" for r, names in enumerate(not_finite_of_ranks) for name in names]
    if bad:
        more = f" and {len(bad) - 3} more" if len(bad) > 3 else ""
        raise DivergedError(
            f"after step {state.step} not all numbers are finite in {', '.join(bad[:3])}{more}: "
            "the update was too large, so no checkpoint is written"
        )


def _begin(directory: CheckpointDirectory, need: int) -> None:
    free = shutil.disk_usage(directory.begin()).free
    if free < need:
        raise CheckpointError(f"disk full: {need:,} bytes needed, {free:,} are free")


def _finish(
    directory: CheckpointDirectory,
    header: CheckpointHeader,
    state: TrainState,
    parts: list["_RankPart"],
    mlflow_run_id: str | None,
) -> None:
    _write_manifest(directory.aside, header, state, parts, mlflow_run_id)
    directory.finish(state.step)
    directory.point("LATEST", state.step)


@dataclass(frozen=True, slots=True)
class _RankPart:
    """What one rank wrote."""

    slices: dict[str, tuple[tuple[int, ...], int, int]]
    """Parameter -> shape, start, stop."""
    lanes: list[int]
    files: dict[str, tuple[int, str]]
    """Name -> bytes, sha256."""


class _RankContent:
    """What one rank has to write, copied to the CPU."""

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
        return sum(array.nbytes for kind in self._tensors.values() for array in kind.values())

    @property
    def not_finite(self) -> list[str]:
        """Names of the tensors that hold a NaN or an infinity."""
        tensors = (
            (k, name, a) for k, arrays in self._tensors.items() for name, a in arrays.items()
        )
        return [f"{kind} {name}" for kind, name, a in tensors if not np.isfinite(a).all()]

    def write(self, aside: Path, rank: int) -> _RankPart:
        """Write, sync and hash this rank's files."""
        files = {}
        for kind, arrays in self._tensors.items():
            path = aside / file_name(kind, rank)
            write_with(path, partial(save_file, arrays))
            files[path.name] = (path.stat().st_size, sha256_file(path))
        return _RankPart(self._slices, self._lanes, files)


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


def _to_numpy(tensor: Tensor) -> np.ndarray:
    return tensor.detach().float().cpu().contiguous().numpy()
