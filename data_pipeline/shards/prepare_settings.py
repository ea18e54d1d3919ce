"""The settings that determine the bytes of a dataset, validated before any input is read."""

from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from data_pipeline.readers import FORMATS
from data_pipeline.storage.strict_model import StrictModel
from data_pipeline.tokenizers.recipes import RecipeName, recipe_of

SPLIT_PATTERN = r"[a-z][a-z0-9_]{0,31}"
SplitName = Annotated[str, Field(pattern=rf"^{SPLIT_PATTERN}$")]
DEFAULT_TRAIN_BYTES = 256 * 2**20
MIN_BPE_VOCAB_SIZE = 258


def _require_known_format(name: str) -> str:
    if name != "auto" and name not in FORMATS:
        raise ValueError(f"supported are auto, {', '.join(FORMATS)}")
    return name


class PrepareSettings(StrictModel):
    """All settings that determine the bytes of a dataset. The manifest contains them."""

    format: Annotated[str, AfterValidator(_require_known_format)] = "auto"
    text_key: str = "text"
    """Key of the text in a JSON line, or column in Parquet."""
    tokenizer: Literal["byte", "char", "word", "bpe", "file"] = "byte"
    """`file`: an existing tokenizer file. The digest in the manifest identifies it."""
    recipe: RecipeName | None = None
    """Conventions of one of the paper's datasets; null adds none."""
    vocab_size: Annotated[int, Field(ge=4, le=2**20)] | None = None
    """Maximum number of ids, including end-of-document; null keeps all symbols of train."""
    min_freq: Annotated[int, Field(ge=1)] | None = None
    """Minimum count of a symbol, or of a pair to merge, to get an id."""
    train_bytes: int = Field(default=DEFAULT_TRAIN_BYTES, ge=1)
    """bpe is trained on this many bytes from the beginning of train."""
    split: dict[SplitName, Annotated[float, Field(gt=0, lt=1)]] = Field(default={})
    """Fraction of the documents per held-out split; the rest is `train`."""
    shuffle: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    """Seed of the document-level shuffle; null keeps the order of the input."""
    dedup: Literal["none", "exact"] = "none"
    """exact: of the documents with the same text, keep the first in input order."""
    shard_bytes: int = Field(default=64 * 2**20, ge=1)
    """Maximum UTF-8 bytes of text per shard. A larger document gets its own shard."""
    block_bytes: int = Field(default=512 * 2**10, ge=512, le=8 * 2**20)
    """Token bytes per block of documents, and per zstd frame."""

    @model_validator(mode="after")
    def _check_tokenizer_options(self) -> Self:
        kind, allowed = self.tokenizer, recipe_of(self.recipe).tokenizers
        is_trained = kind in ("char", "word", "bpe")
        if kind not in allowed:
            raise ValueError(f"recipe: {self.recipe} is for tokenizer {' or '.join(allowed)}")
        if kind == "bpe" and (self.vocab_size or 0) < MIN_BPE_VOCAB_SIZE:
            raise ValueError(
                f"vocab_size: tokenizer bpe needs at least {MIN_BPE_VOCAB_SIZE} (256 bytes, one "
                "merge, end-of-document), for example 32768"
            )
        if not is_trained and self.vocab_size is not None:
            raise ValueError(f"vocab_size: tokenizer {kind} has a fixed vocabulary; omit it")
        if not is_trained and self.min_freq is not None:
            raise ValueError(f"min_freq: tokenizer {kind} is not trained; omit it")
        if kind != "bpe" and self.train_bytes != DEFAULT_TRAIN_BYTES:
            raise ValueError(f"train_bytes: is for tokenizer bpe, not {kind}; omit it")
        return self

    @model_validator(mode="after")
    def _check_splits(self) -> Self:
        if "train" in self.split:
            raise ValueError("split: train gets the remaining documents; omit its fraction")
        if self.split and recipe_of(self.recipe).fixed_split:
            raise ValueError(f"split: recipe {self.recipe} has its own valid and test; omit it")
        if sum(self.split.values()) >= 1:
            raise ValueError(f"split: the sum {sum(self.split.values())} leaves none for train")
        return self
