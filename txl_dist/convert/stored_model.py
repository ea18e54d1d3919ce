"""A stored model in either format: a checkpoint, or a directory of `txl export` or `txl import`.

Used by evaluation (`txl_dist/evaluation`, `txl eval`) and generation (`txl generate`). They check
their options against the description before the weights are loaded.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import get_args

from data_pipeline.shards.manifest import ShardManifest
from data_pipeline.streams.segments import Reset
from data_pipeline.system.remote_path import DatasetPath
from data_pipeline.system.strict_json import sha256_of
from data_pipeline.tokenizers import Tokenizer
from data_pipeline.tokenizers.comparison import StoredTokenizer, differences
from txl_dist.checkpoint.directory import resolve_checkpoint
from txl_dist.checkpoint.manifest import (
    MANIFEST_NAME,
    TOKENIZER_NAME,
    load_checkpoint_manifest,
)
from txl_dist.checkpoint.reader import Weights, chosen_weights, load_model
from txl_dist.convert.single_file import CONFIG_NAME, describe_exported, load_exported
from txl_dist.errors import CheckpointError, ConfigError, DataError
from txl_dist.model.config import ModelConfig
from txl_dist.model.transformer_xl import TransformerXL

Load = Callable[[ModelConfig], tuple[TransformerXL, Tokenizer | None]]


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
    """`tgt_len` and `reset` as in training."""
    weights: Weights = "last"
    """Which weights of a checkpoint: the average over steps, or those of the last step."""
    load: Load
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
            raise CheckpointError(
                f"{path} is an exported model with one set of weights; leave the option out"
            )
        return _exported(path)
    return _checkpoint(resolve_checkpoint(path), weights)


def _exported(path: Path) -> StoredModel:
    described = describe_exported(path)
    return StoredModel(
        path=path,
        digest=sha256_of([asdict(described.config), described.weights_sha256]),
        config=described.config,
        tokenizer=StoredTokenizer(path / TOKENIZER_NAME, described.tokenizer.digest)
        if described.tokenizer
        else None,
        tgt_len=described.reading.tgt_len,
        reset=described.reading.reset,
        load=lambda config: load_exported(path, config=config),
    )


def _checkpoint(path: Path, weights: Weights) -> StoredModel:
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
        tgt_len=manifest.run["data.tgt_len"],
        reset=manifest.run["data.reset"],
        weights=chosen,
        load=lambda config: load_model(path, config=config, weights=chosen)[:2],
    )
