"""The format to hand a model on in: model.safetensors, config.json and, if known, tokenizer.json.

config.json is our ModelConfig, how the model read its text, and the hash of the weights that belong
to it; written last, so a directory without it is no model. Parameters have this project's names and
are fp32.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, TypeAdapter, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from data_pipeline.storage.atomic_files import (
    explain_disk_errors,
    sha256_file,
    write_synced,
    write_with,
)
from data_pipeline.storage.staged_directory import StagedDirectory
from data_pipeline.streams.segments import Reset
from data_pipeline.tokenizers import Tokenizer, load_tokenizer
from txl_dist.convert.architecture import checked_config, read_json
from txl_dist.convert.tensors import check_tensors, empty_model, fill
from txl_dist.errors import CheckpointError, ConfigError
from txl_dist.model.config import ModelConfig
from txl_dist.model.transformer_xl import TransformerXL

FORMAT, VERSION = "txl-model", 1
CONFIG_NAME, WEIGHTS_NAME, TOKENIZER_NAME = "config.json", "model.safetensors", "tokenizer.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """How a model read its text in training. The defaults are for weights from elsewhere: memory
    that runs on into the next document, as theirs does, and a segment length of ours.
    """

    tgt_len: Annotated[int, Field(ge=1)] = 128
    reset: Reset = "stream"


UNKNOWN_READING = Reading()


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
    reading: Reading = UNKNOWN_READING,
) -> None:
    """Write a model to a directory that is new or empty; it is there whole or not at all.

    Raises CheckpointError if a parameter is not finite, ConfigError if something is there already.
    """
    state = model.state_dict()
    weights = check_tensors(state, state, where="the model to write")
    with StagedDirectory(directory, last=CONFIG_NAME) as staged:
        if there := sorted(entry.name for entry in directory.iterdir()):
            raise ConfigError(
                f"{directory} is not empty (it holds {there[0]}); choose another --out, or "
                "remove what is there"
            )
        contiguous = {name: weight.contiguous() for name, weight in weights.items()}
        with explain_disk_errors("writing the model", directory):
            aside = staged.stage()
            write_with(aside / WEIGHTS_NAME, lambda path: save_file(contiguous, path))
            if tokenizer is not None:
                write_synced(aside / TOKENIZER_NAME, tokenizer.to_json().encode())
            config = {
                "format": FORMAT,
                "version": VERSION,
                "weights_sha256": sha256_file(aside / WEIGHTS_NAME),
                "model": asdict(model.config),
                "reading": asdict(reading),
            }
            write_synced(aside / CONFIG_NAME, (json.dumps(config, indent=1) + "\n").encode())
            staged.publish([path.name for path in aside.iterdir()])


def describe_exported(directory: Path) -> Description:
    """What config.json and tokenizer.json say.

    Raises CheckpointError naming what is damaged, ConfigError for an impossible config.
    """
    where = directory / CONFIG_NAME
    described = read_json(where)
    if not is_exported(described):
        raise CheckpointError(
            f"{where} describes no exported model. Make one of a run with txl export, of weights "
            f"from elsewhere with txl import: txl import {directory} --out PATH"
        )
    if described.get("version") != VERSION:
        raise CheckpointError(
            f"{where} has format version {described.get('version')!r}, this txl reads {VERSION}; "
            "upgrade txl"
        )
    if not isinstance(values := described.get("model"), dict):
        raise CheckpointError(f"{where} has no section model; it is damaged or edited")
    config = checked_config(values, where=f"{where}, model")
    try:
        given = json.dumps(described.get("reading", {}))
        reading = TypeAdapter(Reading).validate_json(given, strict=True)
    except ValidationError as error:
        raise CheckpointError(f"{where}, reading: {error.errors()[0]['msg']}") from None
    return Description(
        config=config,
        reading=reading,
        tokenizer=_tokenizer(directory / TOKENIZER_NAME, config),
        weights_sha256=str(described.get("weights_sha256")),
    )


def load_exported(
    directory: Path, *, config: ModelConfig | None = None
) -> tuple[TransformerXL, Tokenizer | None]:
    """The model, on the CPU in fp32, and its tokenizer if there is one.

    `config` may differ from the exported one in what carries no weights (mem_len, clamp_len,
    same_length, attention). Raises CheckpointError naming what is damaged, ConfigError for an
    impossible config.
    """
    described = describe_exported(directory)
    path = directory / WEIGHTS_NAME
    try:
        if (digest := sha256_file(path)) != described.weights_sha256:
            raise CheckpointError(
                f"{path} has sha256 {digest}, {CONFIG_NAME} says {described.weights_sha256}; one "
                "of them is damaged. Export it again"
            )
        given = load_file(path)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}); export it again") from None
    where = str(directory / CONFIG_NAME)
    model = empty_model(config or described.config, where=where, num_tensors=len(given))
    model = fill(model, check_tensors(given, model.state_dict(), where=str(path)))
    return model, described.tokenizer


def _tokenizer(path: Path, config: ModelConfig) -> Tokenizer | None:
    if not path.exists():
        return None
    tokenizer = load_tokenizer(path)
    if tokenizer.vocab_size != config.vocab_size:
        raise CheckpointError(
            f"{path} has vocab_size={tokenizer.vocab_size}, {CONFIG_NAME} beside it says "
            f"vocab_size={config.vocab_size}: it is another model's tokenizer. Put the right one "
            "there, or export the model again"
        )
    return tokenizer


def is_exported(described: dict[str, Any]) -> bool:
    """Whether a config.json is of this format, rather than a stranger's."""
    return described.get("format") == FORMAT
