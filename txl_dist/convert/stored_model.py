"""Stored models: a checkpoint, or a directory of `txl export` or `txl import`.

`find_model` describes either one, for evaluation and generation, which check their options against
the description before the weights are loaded.

The export format is a directory with model.safetensors, config.json and, if known, tokenizer.json.
config.json has the ModelConfig, how the model read its text in training, and the sha256 of the
weights. It is written last, so a directory without it is incomplete. Parameters have this project's
names and are fp32. A directory for others (hub.py) has more files, and the tokenizer under another
name.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal, get_args

from pydantic import Field, TypeAdapter, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file

from data_pipeline.shards.manifest import ShardManifest
from data_pipeline.streams.segments import Reset
from data_pipeline.system.files import (
    StagedDirectory,
    explain_disk_errors,
    sha256_file,
    write_synced,
)
from data_pipeline.system.remote_path import DatasetPath
from data_pipeline.system.strict import first_problem
from data_pipeline.system.strict_json import sha256_of
from data_pipeline.tokenizers import Tokenizer, load_tokenizer
from data_pipeline.tokenizers.loading import (
    OWN_NAME,
    StoredTokenizer,
    differences,
    directory_tokenizer,
)
from txl_dist.checkpoint.directory import resolve_checkpoint
from txl_dist.checkpoint.manifest import (
    MANIFEST_NAME,
    TOKENIZER_NAME,
    load_checkpoint_manifest,
)
from txl_dist.checkpoint.tensors import Weights, chosen_weights, load_model, write_tensors
from txl_dist.config.removed import without_removed
from txl_dist.convert.checks import (
    CONFIG_NAME,
    WEIGHTS_NAME,
    assign_weights,
    check_tensors,
    checked_config,
    empty_model,
    read_json,
)
from txl_dist.convert.llama_family import family_config, is_family, read_family
from txl_dist.errors import CheckpointError, ConfigError, DataError
from txl_dist.model.config import ModelConfig
from txl_dist.model.transformer_xl import TransformerXL

FORMAT: Literal["txl-model"] = "txl-model"


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """How a model read its text in training. The defaults are for imported weights: memory that
    continues into the next document, as in the original, and a common segment length.
    """

    tgt_len: Annotated[int, Field(ge=1)] = 128
    reset: Reset = "stream"
    whole_documents: bool = False
    """Whether a token saw its whole document, unless the model has a window, as in transformers."""


DEFAULT_READING = Reading()
FAMILY_READING = Reading(reset="document", whole_documents=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportedConfig:
    """config.json of an exported model."""

    format: Literal["txl-model"] = FORMAT
    version: Literal[1] = 1
    weights_sha256: str
    model: dict[str, Any]
    """The fields of a ModelConfig, as the version that wrote it has them."""
    reading: Reading = DEFAULT_READING


def write_exported(
    directory: str | Path,
    model: TransformerXL,
    tokenizer: Tokenizer | None,
    reading: Reading = DEFAULT_READING,
    *,
    tokenizer_name: str = TOKENIZER_NAME,
    more_files: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Write a model to a new or empty directory, completely or not at all.

    `more_files`: texts by name. Raises CheckpointError if a parameter is NaN or Inf, ConfigError if
    the directory is not empty.
    """
    state = model.state_dict()
    weights = check_tensors(state, state, origin="the model to write")
    with new_directory(Path(directory)) as staging:
        arrays = {name: weight.numpy() for name, weight in weights.items()}
        entry = write_tensors(staging / WEIGHTS_NAME, arrays)
        if tokenizer is not None:
            write_synced(staging / tokenizer_name, tokenizer.to_json().encode())
        for name, content in more_files.items():
            write_synced(staging / name, content.encode())
        config = ExportedConfig(
            weights_sha256=entry.sha256, model=asdict(model.config), reading=reading
        )
        text = json.dumps(asdict(config), indent=1) + "\n"
        write_synced(staging / CONFIG_NAME, text.encode())


@contextmanager
def new_directory(directory: Path) -> Iterator[Path]:
    """A folder whose files appear in the new or empty `directory` at the end, config.json last.

    Raises ConfigError if the directory is not empty.
    """
    with StagedDirectory(directory, last=CONFIG_NAME) as staged:
        if names := sorted(entry.name for entry in directory.iterdir()):
            raise ConfigError(
                f"{directory} is not empty (it has {names[0]}); choose another --out, or empty it"
            )
        with explain_disk_errors("writing the model", directory):
            staging = staged.stage()
            yield staging
            staged.publish([path.name for path in staging.iterdir()])


def _read_config(directory: Path) -> tuple[ExportedConfig, ModelConfig]:
    """Raises CheckpointError for a damaged config.json, ConfigError for an invalid model in it."""
    path = directory / CONFIG_NAME
    content = read_json(path)
    if content.get("format") != FORMAT:
        raise CheckpointError(
            f"{path} is not that of an exported model. Export a run with txl export; import other "
            f"weights with: txl import {directory} --out PATH"
        )
    try:
        text = json.dumps(content)
        exported = TypeAdapter(ExportedConfig).validate_json(text, strict=True)
    except ValidationError as error:
        raise CheckpointError(
            f"{path}: {first_problem(error)}; it is damaged or edited, or a newer txl wrote it"
        ) from None
    model = without_removed(exported.model, "model.")
    return exported, checked_config(model, origin=f"{path}, model")


def _weights(path: Path, exported: ExportedConfig, config: ModelConfig) -> TransformerXL:
    """The model in evaluation mode, on the CPU in fp32. Raises CheckpointError for a damaged file.

    All bytes are hashed first: safetensors does not detect a flipped bit inside a tensor.
    """
    try:
        if (digest := sha256_file(path)) != exported.weights_sha256:
            raise CheckpointError(
                f"{path} has sha256 {digest}, {CONFIG_NAME} says {exported.weights_sha256}; one "
                "of them is damaged. Export it again"
            )
        weights = load_file(path)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}); export it again") from None
    origin = str(path.with_name(CONFIG_NAME))
    model = empty_model(config, origin=origin, num_tensors=len(weights))
    return assign_weights(model, check_tensors(weights, model.state_dict(), origin=str(path)))


def _require_fitting(tokenizer: Tokenizer | None, path: Path, config: ModelConfig) -> None:
    """Raises CheckpointError for the tokenizer of another model."""
    if tokenizer is not None and tokenizer.vocab_size != config.vocab_size:
        raise CheckpointError(
            f"{path} has vocab_size={tokenizer.vocab_size}, {CONFIG_NAME} has "
            f"vocab_size={config.vocab_size}: it is the tokenizer of another model. Replace it, "
            "or export the model again"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredModel:
    """The description of a model, which is available before its weights are read."""

    path: Path
    digest: str
    """Hex sha256 of the architecture and of the hashes of the weights; no weights are read."""
    config: ModelConfig
    tokenizer: StoredTokenizer | None
    """None for imported weights, which have no tokenizer."""
    tgt_len: int
    reset: Reset
    whole_documents: bool = False
    """These three are its `Reading`."""
    weights: Weights = "last"
    """Which weights of a checkpoint: the average over steps, or those of the last step."""
    load: Callable[[ModelConfig], tuple[TransformerXL, Tokenizer | None]]
    """Returns the model on the CPU, in evaluation mode, and its tokenizer. The config may differ
    from the stored one in fields without weights. Raises CheckpointError for damaged files."""

    def check_data(self, manifest: ShardManifest, directory: DatasetPath) -> None:
        """Raises DataError if the dataset was prepared with another tokenizer.

        For a model without a tokenizer, only the vocabulary size can be compared.
        """
        size = self.config.vocab_size
        data_tokenizer = StoredTokenizer(directory / TOKENIZER_NAME, manifest.tokenizer_digest)
        if self.tokenizer and (changes := differences(self.tokenizer, data_tokenizer)):
            raise DataError(
                f"{self.path} was trained with another tokenizer than that of {directory}: "
                f"{changes}. The same ids have another meaning. Prepare the text with the "
                "tokenizer of the model: txl prepare INPUT --out NEW_DIR --tokenizer "
                f"{self.tokenizer.path}"
            )
        if manifest.vocab_size != size:
            raise DataError(
                f"{directory} has vocab_size={manifest.vocab_size}, {self.path} has "
                f"vocab_size={size}, so their tokenizers differ. Prepare the text with the "
                "tokenizer of the model: txl prepare INPUT --out NEW_DIR --tokenizer TOKENIZER"
            )

    def load_with_tokenizer(self) -> tuple[TransformerXL, Tokenizer]:
        """Load both, for generation. Raises CheckpointError if there is no tokenizer."""
        model, tokenizer = self.load(self.config)
        if tokenizer is None:
            raise CheckpointError(
                f"{self.path} has no tokenizer.json, as its weights were imported without one. "
                f"Copy that of a dataset with the same vocabulary ({self.config.vocab_size} ids): "
                f"cp DATA/tokenizer.json {self.path}"
            )
        return model, tokenizer


def find_model(path: str | Path, *, weights: Weights = "auto") -> StoredModel:
    """The model of a checkpoint, of a run (its newest checkpoint) or of an exported directory.

    `weights` chooses between those of a checkpoint; an exported directory has one set. Raises
    CheckpointError if `path` is not one of them, or is damaged, or has no averaged weights.
    """
    path = Path(path)
    if weights not in get_args(Weights):
        raise ConfigError(f"weights={weights!r}: expected one of {', '.join(get_args(Weights))}")
    # A directory with a manifest is a checkpoint, whatever else is in it.
    if (path / CONFIG_NAME).is_file() and not (path / MANIFEST_NAME).is_file():
        if weights == "averaged":
            raise CheckpointError(f"{path} has one set of weights; leave the option out")
        if is_family(options := read_json(path / CONFIG_NAME)):
            return _of_transformers(path, options)
        return _exported(path)
    path = resolve_checkpoint(path)
    manifest = load_checkpoint_manifest(path)
    chosen = chosen_weights(path, manifest, weights)
    # Not the digest of the manifest, which changes when the score of the checkpoint is known.
    hashes = {
        name: entry.sha256
        for name, entry in manifest.files.items()
        if name.startswith("optimizer" if chosen == "averaged" else "weights")
    }
    return StoredModel(
        path=path,
        digest=sha256_of([manifest.model, chosen, hashes]),
        config=manifest.architecture,
        tokenizer=StoredTokenizer(path / TOKENIZER_NAME, manifest.tokenizer_digest),
        tgt_len=manifest.segment_len,
        reset=manifest.run["data.reset"],
        weights=chosen,
        load=lambda config: load_model(path, config=config, weights=chosen)[:2],
    )


def _of_transformers(path: Path, options: Mapping[str, Any]) -> StoredModel:
    """A directory of transformers, read as `txl import` reads it."""
    config = family_config(options, origin=str(path / CONFIG_NAME))
    tokenizer = directory_tokenizer(path)
    _require_fitting(tokenizer, path, config)
    statuses = {file: file.stat() for file in sorted(path.glob("*.safetensors"))}
    hashes = [_hash_of(file, s.st_size, s.st_mtime_ns) for file, s in statuses.items()]
    return StoredModel(
        path=path,
        digest=sha256_of([asdict(config), *hashes]),
        config=config,
        tokenizer=StoredTokenizer(path, tokenizer.digest) if tokenizer else None,
        tgt_len=FAMILY_READING.tgt_len,
        reset=FAMILY_READING.reset,
        whole_documents=FAMILY_READING.whole_documents,
        load=lambda changed: (read_family(path, changed), tokenizer),
    )


@lru_cache(maxsize=64)  # a start asks several times, and a large model takes seconds
def _hash_of(file: Path, _size: int, _mtime_ns: int) -> str:
    return sha256_file(file)


def _exported(path: Path) -> StoredModel:
    exported, config = _read_config(path)
    has_own = (path / OWN_NAME).exists()
    tokenizer_path = path / (OWN_NAME if has_own else TOKENIZER_NAME)
    tokenizer = load_tokenizer(tokenizer_path) if tokenizer_path.exists() else None
    _require_fitting(tokenizer, tokenizer_path, config)
    return StoredModel(
        path=path,
        digest=sha256_of([asdict(config), exported.weights_sha256]),
        config=config,
        tokenizer=StoredTokenizer(tokenizer_path, tokenizer.digest) if tokenizer else None,
        tgt_len=exported.reading.tgt_len,
        reset=exported.reading.reset,
        whole_documents=exported.reading.whole_documents,
        load=lambda changed: (_weights(path / WEIGHTS_NAME, exported, changed), tokenizer),
    )
