"""CheckpointManifest: the content of a checkpoint, with the location of each slice and file hashes.

Slices are identified by parameter and range, so any number of ranks can read what any other number
wrote. File names are derived from rank numbers, so a manifest cannot refer to files outside its
directory. A digest of the manifest itself detects edits and flipped bits.
"""

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, TypeAdapter, ValidationError, field_validator, model_validator

from data_pipeline.system.path_kind import PathKind, kind_of
from data_pipeline.system.remote_path import DatasetPath
from data_pipeline.system.sources import is_read_failure
from data_pipeline.system.strict import (
    StrictModel,
    first_problem,
    load_manifest_file,
    manifest_bytes,
)
from txl_dist.config.removed import PAGE, without_removed
from txl_dist.errors import CheckpointError, StoreError
from txl_dist.model.config import ModelConfig

MANIFEST_NAME = "manifest.json"
TOKENIZER_NAME = "tokenizer.json"
_NAMED_AFTER_SAVE = re.compile(r"(?:superseded-)?step-(\d{8,})(?:\.([0-9a-f]{8,64}))?")

# lt: values are used as numpy and torch int64.
Count = Annotated[int, Field(ge=0, lt=2**63)]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}\z")]
FileName = Annotated[
    str, Field(pattern=r"^(tokenizer\.json|(weights|optimizer|memory)-rank-\d{5}\.safetensors)\z")
]
SaveId = Annotated[str, Field(pattern=r"^[0-9a-f]{8,64}\z")]
Kind = Literal["weights", "optimizer", "memory"]


def file_name(kind: Kind, rank: int) -> str:
    """Name of the file with the weights, optimizer state or memory that `rank` wrote."""
    return f"{kind}-rank-{rank:05d}.safetensors"


def part_name(rank: int) -> str:
    """Name of the list of a rank's files while a checkpoint is being written."""
    return f"part-rank-{rank:05d}.json"


def lane_key(lane: int) -> str:
    """What the names of the tensors of a lane's memory begin with, inside a memory file."""
    return f"lane-{lane:05d}/"


class FileEntry(StrictModel):
    """A file of a checkpoint: its size and sha256."""

    bytes: Count
    sha256: Sha256


class Slice(StrictModel):
    """Elements [start, stop) of a flattened parameter, in the files of rank `rank`."""

    rank: Count
    """The rank that wrote it."""
    start: Count
    stop: Count


class RankPart(StrictModel):
    """The files of one rank, from which rank 0 makes the manifest (`checkpoints.py`)."""

    rank: Count
    shapes: dict[str, tuple[Count, ...]]
    """Of the whole parameters of which it has slices, by name."""
    slices: dict[str, Slice]
    """By parameter."""
    states: tuple[str, ...]
    """Names of the optimizer's states, over these parameters."""
    lanes: tuple[Count, ...]
    files: dict[FileName, FileEntry]


class ParameterEntry(StrictModel):
    """A parameter, and where its slices are."""

    shape: tuple[Count, ...]
    """Of the whole parameter."""
    slices: Annotated[tuple[Slice, ...], Field(min_length=1)]
    """In ascending order and without gaps; together they are the whole parameter."""

    @model_validator(mode="after")
    def _require_whole(self) -> Self:
        # A gap would leave parameters at their initial values without any error.
        covered = 0
        for part in self.slices:
            if part.start != covered or part.stop <= part.start:
                raise ValueError(f"slice [{part.start}, {part.stop}) does not follow {covered}")
            covered = part.stop
        if covered != math.prod(self.shape):
            raise ValueError(
                f"slices end at {covered}, shape {self.shape} has {math.prod(self.shape)}"
            )
        return self


class RunEntries(StrictModel):
    """The entries of a manifest that are the same for every checkpoint of an attempt."""

    written_by: str
    """Version of txl and digest of its sources."""
    model: dict[str, Any]
    """Fields of ModelConfig, as the version that wrote it has them."""
    run: dict[str, Any]
    """The resolved config, by dotted key."""
    run_id: str
    """Identifies the run and stays the same when it resumes."""
    attempt: Count
    """Number of the attempt that wrote it (`attempts.py`)."""
    tokenizer_digest: Sha256
    """sha256 of the content of tokenizer.json."""
    data_digest: Sha256
    """Digest of the dataset, or of the digests of all datasets of a mixture."""
    vocab_size: Count
    """Number of token ids."""
    zero_stage: Count
    """ZeRO stage that wrote it; any stage reads it."""


class CheckpointManifest(RunEntries):
    """One complete checkpoint."""

    format: Literal["txl-checkpoint"] = "txl-checkpoint"
    version: Literal[1] = 1
    """Of the format. Other versions are refused."""
    state: dict[str, Any]
    """Progress of the run, as defined in `txl_dist/training/state.py`. Only two entries are read
    here."""
    num_ranks: Count
    """Ranks that wrote it; any number reads it."""
    mlflow_run_id: str | None
    """Of the run's MLflow run; null without tracking."""
    rank_of_lane: tuple[Count, ...]
    """For each lane, the rank whose file contains its memory."""
    optimizer_states: tuple[str, ...]
    """Names of the optimizer's states, over all parameters; not every parameter has all."""
    parameters: dict[str, ParameterEntry]
    """By name."""
    files: dict[FileName, FileEntry]
    """By name."""
    save_id: SaveId
    """Identifies this save, also among saves of one step."""

    @field_validator("state")
    @classmethod
    def _require_step(cls, state: dict[str, Any]) -> dict[str, Any]:
        TypeAdapter(Count).validate_python(state.get("step"), strict=True)
        return state

    @property
    def step(self) -> int:
        """Optimizer steps done when the checkpoint was written."""
        return int(self.state["step"])

    @property
    def segment_len(self) -> int:
        """Tokens of a lane that the model read at a time."""
        return int(self.run["data.tgt_len"] // self.run.get("training.backprop_segments", 1))

    @property
    def best_step(self) -> int | None:
        """Step of the best score of the run so far, if there is one."""
        best = self.state.get("best")
        step = best.get("step") if isinstance(best, dict) else None
        return step if isinstance(step, int) else None

    @property
    def architecture(self) -> ModelConfig:
        """The architecture. Raises CheckpointError if this version does not support it."""
        try:
            return TypeAdapter(ModelConfig).validate_python(without_removed(self.model, "model."))
        except ValidationError as error:
            raise CheckpointError(
                "this version of txl does not support the checkpoint's model: "
                f"{first_problem(error)}; {self.written_by} wrote it ({PAGE})"
            ) from None

    def to_json(self) -> bytes:
        return manifest_bytes(self.model_dump(mode="json"))


def load_checkpoint_manifest(checkpoint: DatasetPath) -> CheckpointManifest:
    """The validated manifest of a checkpoint. Raises CheckpointError.

    A directory named after a step must contain the checkpoint of that step, because the order of
    checkpoints follows from their names; a copy at a URL also that save. Raises StoreError if a
    file that is there cannot be read, OSError if a URL cannot.
    """
    path, name, advice = checkpoint / MANIFEST_NAME, checkpoint.name, ""
    if isinstance(checkpoint, Path):
        name = checkpoint.absolute().name
        advice = f". To list complete ones: txl checkpoint list {checkpoint.parent.parent}"
    try:
        manifest = load_manifest_file(path, CheckpointManifest)
    except OSError as error:
        if not advice and not isinstance(error, FileNotFoundError):
            raise  # the storage fails: that says nothing about the checkpoint
        if is_read_failure(error):
            raise unread(path, error) from error
        raise CheckpointError(
            f"{path} cannot be read ({error.strerror}): {checkpoint} is not a complete checkpoint"
            f"{advice}"
        ) from None
    except ValueError as error:
        if kind_of(checkpoint) is PathKind.DATASET:
            raise CheckpointError(
                f"{checkpoint} is a dataset; expected a run directory or a checkpoint"
            ) from None
        raise CheckpointError(
            f"{path} {error}; it is damaged or edited, or no checkpoint of this version of txl"
        ) from None
    match = _NAMED_AFTER_SAVE.fullmatch(name)
    if match and (int(match[1]) != manifest.step or match[2] not in (None, manifest.save_id)):
        raise CheckpointError(
            f"{checkpoint} holds the checkpoint of step {manifest.step}, according to its "
            f"{MANIFEST_NAME}: it was copied or renamed. Rename it to step-{manifest.step:08d}"
        )
    return manifest


def unread(path: DatasetPath, error: OSError) -> StoreError:
    """The error for a file that the storage does not deliver, which says nothing about it."""
    return StoreError(
        f"{path} cannot be read ({error.strerror}). It may be intact: check the disk and the "
        "permissions, and run it again. To go on without this checkpoint, move its directory "
        "elsewhere"
    )


def newest_manifest(checkpoints: Sequence[DatasetPath]) -> CheckpointManifest:
    """The manifest of the last of `checkpoints` that has a readable one.

    Raises CheckpointError, which says what is wrong with each, if there is none.
    """
    damage = []
    for checkpoint in reversed(checkpoints):
        try:
            return load_checkpoint_manifest(checkpoint)
        except CheckpointError as error:
            damage.append(str(error))
    raise CheckpointError("; ".join(damage))
