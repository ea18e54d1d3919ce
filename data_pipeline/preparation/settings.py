"""What decides the bytes of a dataset, checked as a whole before anything is read."""

from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from data_pipeline.readers import FORMATS
from data_pipeline.storage.strict_model import StrictModel
from data_pipeline.tokenizers.recipes import RecipeName, recipe_of

SPLIT_PATTERN = r"[a-z][a-z0-9_]{0,31}"
SplitName = Annotated[str, Field(pattern=rf"^{SPLIT_PATTERN}$")]
DEFAULT_TRAIN_BYTES = 256 * 2**20
MIN_BPE_VOCAB_SIZE = 258


def _format(name: str) -> str:
    if name != "auto" and name not in FORMATS:
        raise ValueError(f"legal are auto, {', '.join(FORMATS)}")
    return name


class PrepareSettings(StrictModel):
    """Every setting that decides the bytes of a dataset."""

    format: Annotated[str, AfterValidator(_format)] = "auto"
    text_key: str = "text"
    """Key of a JSON line's object that holds the text."""
    tokenizer: Literal["byte", "char", "word", "bpe", "file"] = "byte"
    """`file` is one brought along: the manifest's digest says which."""
    recipe: RecipeName | None = None
    """Conventions of one of the paper's corpora; null is documents as they are."""
    vocab_size: Annotated[int, Field(ge=4, le=2**20)] | None = None
    """Most ids, the end of a document included; null keeps every symbol of the training text."""
    min_freq: Annotated[int, Field(ge=1)] | None = None
    """How often a symbol, or a pair to be merged, must occur to get an id."""
    train_bytes: int = Field(default=DEFAULT_TRAIN_BYTES, ge=1)
    """Bytes of the training text's beginning that bpe is trained on."""
    split: dict[SplitName, Annotated[float, Field(gt=0, lt=1)]] = Field(default={})
    """Fraction of the documents held out per split; the rest is `train`."""
    shuffle: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    """Seed of the document-level shuffle; null keeps the order of the input."""
    dedup: Literal["none", "exact"] = "none"
    """exact: of documents with the same text, the first in input order stays."""
    shard_bytes: int = Field(default=64 * 2**20, ge=1)
    """UTF-8 bytes of text of a shard at most; a larger document is alone in its shard."""
    block_bytes: int = Field(default=512 * 2**10, ge=512, le=8 * 2**20)
    """Raw token bytes of a block of documents, and of a zstd frame."""

    @model_validator(mode="after")
    def _tokenizer_options_go_together(self) -> Self:
        kind, legal = self.tokenizer, recipe_of(self.recipe).tokenizers
        trained = kind in ("char", "word", "bpe")
        if kind not in legal:
            raise ValueError(f"recipe: {self.recipe} is for tokenizer {' or '.join(legal)}")
        if kind == "bpe" and (self.vocab_size or 0) < MIN_BPE_VOCAB_SIZE:
            raise ValueError(
                f"vocab_size: tokenizer bpe needs one of at least {MIN_BPE_VOCAB_SIZE} (256 bytes, "
                "a merge, the end of a document), such as 32768"
            )
        if not trained and self.vocab_size is not None:
            raise ValueError(f"vocab_size: tokenizer {kind} has its own; leave it out")
        if not trained and self.min_freq is not None:
            raise ValueError(f"min_freq: tokenizer {kind} counts nothing; leave it out")
        if kind != "bpe" and self.train_bytes != DEFAULT_TRAIN_BYTES:
            raise ValueError(f"train_bytes: is for tokenizer bpe, not {kind}; leave it out")
        return self

    @model_validator(mode="after")
    def _leaves_train(self) -> Self:
        if "train" in self.split:
            raise ValueError("train is what the other splits leave; do not give it a fraction")
        if self.split and recipe_of(self.recipe).fixed_split:
            raise ValueError(f"recipe {self.recipe} has its own valid and test; leave it out")
        if sum(self.split.values()) >= 1:
            raise ValueError(f"the fractions sum to {sum(self.split.values())}, nothing is left")
        return self
