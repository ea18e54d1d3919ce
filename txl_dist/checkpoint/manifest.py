"""CheckpointManifest: what a checkpoint holds, where each slice lies, and every file's hash.

Canonical means the content per parameter: a slice is named by parameter and range, so any number
of ranks can read what any other number wrote. File names follow from rank numbers, so a manifest
cannot point outside its directory. The digest of its own content betrays an edit or a flipped bit.
"""

import re
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, TypeAdapter, ValidationError, model_validator

from data_pipeline.storage import strict_json
from data_pipeline.storage.manifest_file import (
    WrongFormatError,
    load_manifest_file,
    manifest_bytes,
)
from data_pipeline.storage.strict_model import StrictModel
from data_pipeline.streams.mixture import tokens_per_epoch
from txl_dist.errors import CheckpointError
from txl_dist.model.config import ModelConfig

MANIFEST_NAME = "manifest.json"
TOKENIZER_NAME = "tokenizer.json"
_NAMED_AFTER_STEP = re.compile(r"(?:superseded-)?step-(\d{8,})")
MAX_MANIFEST_BYTES = 256 * 2**20

Count = Annotated[int, Field(ge=0, lt=2**63)]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}\z")]
FileName = Annotated[
    str, Field(pattern=r"^(tokenizer\.json|(weights|optimizer|memory)-rank-\d{5}\.safetensors)\z")
]
Kind = Literal["weights", "optimizer", "memory"]


def file_name(kind: Kind, rank: int) -> str:
    """Where rank `rank` wrote its weights, optimizer state or memory."""
    return f"{kind}-rank-{rank:05d}.safetensors"


def lane_key(lane: int) -> str:
    """Name of a lane's memory [L, M, D] inside a memory file."""
    return f"lane-{lane:05d}"


class FileEntry(StrictModel):
    bytes: Count
    sha256: Sha256


class Slice(StrictModel):
    """Elements [start, stop) of a flattened parameter, in the files of rank `rank`."""

    rank: Count
    start: Count
    stop: Count


class ParameterEntry(StrictModel):
    shape: tuple[Count, ...]
    slices: Annotated[tuple[Slice, ...], Field(min_length=1)]
    """In rising order, without a gap; together the whole parameter."""

    @property
    def num_elements(self) -> int:
        count = 1
        for length in self.shape:
            count *= length
        return count

    @model_validator(mode="after")
    def _is_whole(self) -> Self:
        reached = 0
        for part in self.slices:
            if part.start != reached or part.stop <= part.start:
                raise ValueError(f"slice [{part.start}, {part.stop}) does not follow {reached}")
            reached = part.stop
        if reached != self.num_elements:
            raise ValueError(f"slices end at {reached}, shape {self.shape} has {self.num_elements}")
        return self


class BestScore(StrictModel):
    """The lowest validation loss of the run so far."""

    step: Count
    nats_per_token: float
    split: str
    max_tokens: Count | None
    data_digest: Sha256 | None = None
    """What was scored; losses on other text are not compared."""

    def improves_on(self, other: "BestScore | None") -> bool:
        """Lower than the best so far, or the first on this text."""
        return (
            other is None or self._text != other._text or self.nats_per_token < other.nats_per_token
        )

    @property
    def _text(self) -> tuple[str, int | None, str | None]:
        return self.split, self.max_tokens, self.data_digest


class CorpusEntry(StrictModel):
    """One corpus of a phase."""

    name: str
    digest: Sha256
    """Of its manifest; vouches for every shard."""
    tokens: Annotated[Count, Field(ge=1)]
    weight: Annotated[float, Field(gt=0)]
    start: Count = 0
    """Where on its tape (data_pipeline/streams/mixture.py) the phase begins."""


class Phase(StrictModel):
    """What a run reads from a lane position on: it changes when corpora or weights do."""

    position: Count = 0
    first_epoch: Count = 0
    """Number of the epoch that begins at `position`."""
    corpora: Annotated[tuple[CorpusEntry, ...], Field(min_length=1)]

    @property
    def num_tokens(self) -> int:
        """Of an epoch."""
        return sum(corpus.tokens for corpus in self.corpora)

    @property
    def tokens_per_epoch(self) -> dict[str, int]:
        """Of each corpus, by name, in this order; what the weights come to."""
        return tokens_per_epoch(
            {corpus.name: corpus.tokens for corpus in self.corpora},
            {corpus.name: corpus.weight for corpus in self.corpora},
        )

    @property
    def shares(self) -> dict[str, float]:
        """Of each corpus in all weights."""
        total = sum(corpus.weight for corpus in self.corpora)
        return {corpus.name: corpus.weight / total for corpus in self.corpora}


class TrainState(StrictModel):
    """What a run is at, apart from tensors. There is no random state: every draw follows from the
    seed, the step and the lane (training/lane_dropout.py), the order from seed and position.
    """

    step: Count = 0
    """Optimizer steps done."""
    position: Count = 0
    """Lane position of the next segment."""
    tokens: Count = 0
    """Targets trained on, over all lanes."""
    best: BestScore | None = None
    unreported: tuple[float, Count, Count] = (0.0, 0, 0)
    """Nats, tokens and bytes since the last line of metrics.jsonl."""
    unreported_steps: Count = 0
    phases: tuple[Phase, ...] = ()
    """What was read from where on; the last is what is read now."""
    evaluation_pending: bool = False
    """The evaluation due at this step has not been done yet."""


class CheckpointManifest(StrictModel):
    """One complete checkpoint."""

    format: Literal["txl-checkpoint"] = "txl-checkpoint"
    version: Literal[1] = 1
    written_by: str
    state: TrainState
    model: dict[str, Any]
    run: dict[str, Any]
    """The resolved config, by dotted key."""
    tokenizer_digest: Sha256
    data_digest: Sha256
    """Of the only corpus, or of all digests."""
    vocab_size: Count
    num_ranks: Count
    zero_stage: Count
    mlflow_run_id: str | None
    rank_of_lane: tuple[Count, ...]
    """Whose memory file holds lane l."""
    optimizer_states: tuple[str, ...]
    parameters: dict[str, ParameterEntry]
    files: dict[FileName, FileEntry]

    @property
    def model_config_of(self) -> ModelConfig:
        """The architecture, checked. Raises CheckpointError if this version cannot have it."""
        try:
            return TypeAdapter(ModelConfig).validate_python(self.model)
        except ValidationError as error:
            raise CheckpointError(
                f"the checkpoint's model is not one of this txl: {error}"
            ) from None

    @property
    def digest(self) -> str:
        """Hex sha256 of the canonical content."""
        return strict_json.sha256_of(self.model_dump(mode="json"))

    def to_json(self) -> bytes:
        return manifest_bytes(self.model_dump(mode="json"))


def load_checkpoint_manifest(directory: Path) -> CheckpointManifest:
    """The checked manifest of one checkpoint; CheckpointError says what is wrong with it.

    A directory named after a step must hold the checkpoint of that step.
    """
    path = directory / MANIFEST_NAME
    try:
        manifest = load_manifest_file(path, CheckpointManifest)
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be read ({error.strerror}); no complete checkpoint is there. List the "
            f"good ones: txl checkpoint list {directory.parent.parent}"
        ) from None
    except WrongFormatError as error:
        raise CheckpointError(
            f"{path} {error}: it is not a checkpoint of this version of txl. Give a directory "
            "RUN/checkpoints/step-NNNNNNNN, or upgrade txl"
        ) from None
    except ValueError as error:
        raise CheckpointError(f"{path} {error}; it is damaged or edited") from None
    named = _NAMED_AFTER_STEP.fullmatch(directory.absolute().name)
    if named and int(named[1]) != manifest.state.step:
        raise CheckpointError(
            f"{directory} holds the checkpoint of step {manifest.state.step}, says its "
            f"{MANIFEST_NAME}: it was copied or renamed. Name it step-{manifest.state.step:08d}"
        )
    return manifest
