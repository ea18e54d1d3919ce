"""The export format: a directory with model.safetensors, config.json and, if known, tokenizer.json.

config.json has the ModelConfig, how the model read its text in training, and the sha256 of the
weights. It is written last, so a directory without it is incomplete. Parameters have this project's
names and are fp32.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, TypeAdapter, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from data_pipeline.streams.segments import Reset
from data_pipeline.system.files import (
    StagedDirectory,
    explain_disk_errors,
    sha256_file,
    write_synced,
    write_with,
)
from data_pipeline.tokenizers import Tokenizer, load_tokenizer
from txl_dist.convert.architecture import checked_config, read_json
from txl_dist.convert.tensors import assign_weights, check_tensors, empty_model
from txl_dist.errors import CheckpointError, ConfigError
from txl_dist.model.config import ModelConfig
from txl_dist.model.transformer_xl import TransformerXL

FORMAT, VERSION = "txl-model", 1
CONFIG_NAME, WEIGHTS_NAME, TOKENIZER_NAME = "config.json", "model.safetensors", "tokenizer.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """How a model read its text in training. The defaults are for imported weights: memory that
    continues into the next document, as in the original, and a common segment length.
    """

    tgt_len: Annotated[int, Field(ge=1)] = 128
    reset: Reset = "stream"


DEFAULT_READING = Reading()


@dataclass(frozen=True, kw_only=True, slots=True)
class Description:
    """An exported model without its weights."""

    config: ModelConfig
    reading: Reading
    tokenizer: Tokenizer | None
    weights_sha256: str


def write_exported(
    directory: Path,
    model: TransformerXL,
    tokenizer: Tokenizer | None,
    reading: Reading = DEFAULT_READING,
) -> None:
    """Write a model to a new or empty directory, completely or not at all.

    Raises CheckpointError if a parameter is not finite, ConfigError if the directory is not empty.
    """
    state = model.state_dict()
    weights = check_tensors(state, state, origin="the model to write")
    with StagedDirectory(directory, last=CONFIG_NAME) as staged:
        if names := sorted(entry.name for entry in directory.iterdir()):
            raise ConfigError(
                f"{directory} is not empty (it has {names[0]}); choose another --out, or empty it"
            )
        # save_file rejects tensors that are not contiguous, such as a transposed parameter.
        contiguous = {name: weight.contiguous() for name, weight in weights.items()}
        with explain_disk_errors("writing the model", directory):
            staging = staged.stage()
            write_with(staging / WEIGHTS_NAME, lambda path: save_file(contiguous, path))
            if tokenizer is not None:
                write_synced(staging / TOKENIZER_NAME, tokenizer.to_json().encode())
            config = {
                "format": FORMAT,
                "version": VERSION,
                "weights_sha256": sha256_file(staging / WEIGHTS_NAME),
                "model": asdict(model.config),
                "reading": asdict(reading),
            }
            write_synced(staging / CONFIG_NAME, (json.dumps(config, indent=1) + "\n").encode())
            staged.publish([path.name for path in staging.iterdir()])


def describe_exported(directory: Path) -> Description:
    """Read config.json and tokenizer.json.

    Raises CheckpointError naming the damaged file, ConfigError for an invalid config.
    """
    path = directory / CONFIG_NAME
    content = read_json(path)
    if not is_exported(content):
        raise CheckpointError(
            f"{path} is not that of an exported model. Export a run with txl export; import other "
            f"weights with: txl import {directory} --out PATH"
        )
    if content.get("version") != VERSION:
        raise CheckpointError(
            f"{path} has format version {content.get('version')!r}, this txl reads {VERSION}; "
            "upgrade txl"
        )
    if not isinstance(values := content.get("model"), dict):
        raise CheckpointError(f"{path} has no section model; it is damaged or edited")
    config = checked_config(values, origin=f"{path}, model")
    try:
        reading_json = json.dumps(content.get("reading", {}))
        reading = TypeAdapter(Reading).validate_json(reading_json, strict=True)
    except ValidationError as error:
        raise CheckpointError(f"{path}, reading: {error.errors()[0]['msg']}") from None
    return Description(
        config=config,
        reading=reading,
        tokenizer=_tokenizer(directory / TOKENIZER_NAME, config),
        weights_sha256=str(content.get("weights_sha256")),
    )


def load_exported(
    directory: Path, *, config: ModelConfig | None = None
) -> tuple[TransformerXL, Tokenizer | None]:
    """The model in evaluation mode, on the CPU in fp32, and its tokenizer if there is one.

    `config` may differ from the exported one in fields without weights (mem_len, clamp_len,
    same_length, attention). Raises CheckpointError naming the damaged file, ConfigError for an
    invalid config.
    """
    described = describe_exported(directory)
    path = directory / WEIGHTS_NAME
    # All bytes are hashed first: safetensors does not detect a flipped bit inside a tensor.
    try:
        if (digest := sha256_file(path)) != described.weights_sha256:
            raise CheckpointError(
                f"{path} has sha256 {digest}, {CONFIG_NAME} says {described.weights_sha256}; one "
                "of them is damaged. Export it again"
            )
        weights = load_file(path)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}); export it again") from None
    origin = str(directory / CONFIG_NAME)
    model = empty_model(config or described.config, origin=origin, num_tensors=len(weights))
    checked = check_tensors(weights, model.state_dict(), origin=str(path))
    return assign_weights(model, checked), described.tokenizer


def _tokenizer(path: Path, config: ModelConfig) -> Tokenizer | None:
    if not path.exists():
        return None
    tokenizer = load_tokenizer(path)
    if tokenizer.vocab_size != config.vocab_size:
        raise CheckpointError(
            f"{path} has vocab_size={tokenizer.vocab_size}, {CONFIG_NAME} has "
            f"vocab_size={config.vocab_size}: it is the tokenizer of another model. Replace it, "
            "or export the model again"
        )
    return tokenizer


def is_exported(content: dict[str, Any]) -> bool:
    """Whether a config.json was written by `write_exported`, not by another program."""
    return content.get("format") == FORMAT
