"""The settings that determine the bytes of a dataset, validated before any input is read."""

from collections.abc import Iterator
from itertools import chain
from typing import Annotated, Any, Literal, Self

import numpy as np
from pydantic import AfterValidator, Field, model_validator

from data_pipeline.readers import IdRules, format_names
from data_pipeline.readers.split_names import SPLIT_PATTERN, TRAIN
from data_pipeline.tokenizers.training import (
    DEFAULT_TRAIN_BYTES,
    NOT_IF_UNSET,
    RECIPES,
    OptionalId,
    TokenizerSettings,
    needs_training,
    recipe_of,
)

SplitName = Annotated[str, Field(pattern=rf"^{SPLIT_PATTERN}$")]
MIN_VOCAB_SIZE, MIN_BPE_VOCAB_SIZE = 4, 258
IdType = Literal["uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"]


SplitBy = Literal["document", "file", "position"]
Rules = Iterator[tuple[bool, str]]
"""Whether each rule holds, and what is wrong if it does not."""


def _require_known_format(name: str) -> str:
    if name != "auto" and name not in format_names():
        raise ValueError(f"supported are auto, {', '.join(format_names())}")
    return name


class PrepareSettings(TokenizerSettings):
    """All settings that determine the bytes of a dataset. The manifest contains them."""

    format: Annotated[str, AfterValidator(_require_known_format)] = "auto"
    text_key: str = "text"
    """Key of the text in a JSON line, or column in Parquet; "ids" by default if format is ids."""
    padding: OptionalId = None
    """Format ids: the id that fills up documents of different lengths, dropped at both ends."""
    dtype: Annotated[IdType | None, NOT_IF_UNSET] = None
    """Format ids: the type of the integers in raw .bin files, little-endian."""
    split: dict[SplitName, Annotated[float, Field(gt=0, lt=1)]] = Field(default={})
    """Fraction of the documents per held-out split; the rest is `train`. Empty: the splits that the
    input gives, all in train if it gives none."""
    merge_splits: Annotated[bool, NOT_IF_UNSET] = False
    """Ignore the splits that the names of the input files give."""
    split_by: Annotated[SplitBy | None, NOT_IF_UNSET] = None
    """What `split` keeps together: a document, or the documents of a file. position: cut the only
    document, the held-out splits at its end. null: as `preparation/splits.py` says."""
    shuffle: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    """Seed of the document-level shuffle; null keeps the order of the input."""
    dedup: Literal["none", "exact"] = "none"
    """exact: of the documents with the same text, keep the first in input order."""
    shard_bytes: int = Field(default=64 * 2**20, ge=1)
    """Maximum UTF-8 bytes of text per shard. A larger document gets its own shard."""
    block_bytes: int = Field(default=512 * 2**10, ge=512, le=8 * 2**20)
    """Token bytes per block of documents, and per zstd frame."""

    @model_validator(mode="before")
    @classmethod
    def _defaults_of_format_and_recipe(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        if values.get("format") == "ids":
            return {"text_key": "ids", "tokenizer": "ids", **values}
        if (name := values.get("recipe")) not in (*RECIPES,):
            return values
        recipe = recipe_of(name)
        return {"tokenizer": recipe.tokenizers[0], "min_freq": recipe.min_freq, **values}

    @property
    def id_rules(self) -> IdRules | None:
        """The rules that token ids of the input must meet; None for an input of text."""
        if self.format != "ids":
            return None
        assert self.vocab_size is not None
        assert self.end_of_document is not None
        dtype = np.dtype(self.dtype).newbyteorder("<").str if self.dtype else ""
        return IdRules(self.vocab_size, self.end_of_document, dtype, self.padding)

    @model_validator(mode="after")
    def _options_agree(self) -> Self:
        id_rules = self._rules_of_ids() if self.format == "ids" else self._rules_of_text()
        for holds, problem in chain(id_rules, self._rules_of_tokenizers(), self._rules_of_splits()):
            if not holds:
                raise ValueError(problem)
        return self

    def _rules_of_text(self) -> Rules:
        for name in ("end_of_document", "padding", "dtype"):
            yield getattr(self, name) is None, f"{name}: is for format ids; omit it"
        yield self.tokenizer != "ids", "tokenizer: ids needs format ids"

    def _rules_of_ids(self) -> Rules:
        size, end, padding = self.vocab_size or 0, self.end_of_document, self.padding
        yield (
            self.tokenizer == "ids",
            "tokenizer: format ids has token ids, so it takes only the tokenizer.json of a "
            "vocabulary of ids; omit it",
        )
        yield size > 0, "vocab_size: format ids needs the number of ids of the vocabulary"
        yield (
            end is not None,
            "end_of_document: format ids needs the id that marks the beginning of a document. If "
            f"the vocabulary has none, add one: the id {size} and vocab-size {size + 1}",
        )
        yield (
            (end or 0) < size,
            f"end_of_document: is not in the vocabulary of {size} ids. To add it, give vocab-size "
            f"{(end or 0) + 1}",
        )
        yield (padding or 0) < size, f"padding: is not in the vocabulary of {size} ids"

    def _rules_of_tokenizers(self) -> Rules:
        kind, size, allowed = self.tokenizer, self.vocab_size, recipe_of(self.recipe).tokenizers
        yield kind in allowed, f"recipe: {self.recipe} is for tokenizer {' or '.join(allowed)}"
        yield (
            kind != "bpe" or (size or 0) >= MIN_BPE_VOCAB_SIZE,
            f"vocab_size: tokenizer bpe needs at least {MIN_BPE_VOCAB_SIZE} (256 bytes, one merge, "
            "end-of-document), for example 32768",
        )
        yield (
            kind == "ids" or size is None or size >= MIN_VOCAB_SIZE,
            f"vocab_size: must be at least {MIN_VOCAB_SIZE}",
        )
        yield (
            needs_training(self) or kind == "ids" or size is None,
            f"vocab_size: tokenizer {kind} has a fixed vocabulary; omit it",
        )
        yield (
            needs_training(self) or self.min_freq is None,
            f"min_freq: tokenizer {kind} is not trained; omit it",
        )
        yield (
            kind == "bpe" or self.train_bytes == DEFAULT_TRAIN_BYTES,
            f"train_bytes: is for tokenizer bpe, not {kind}; omit it",
        )

    def _rules_of_splits(self) -> Rules:
        total = sum(self.split.values())
        yield (
            TRAIN not in self.split,
            "split: train gets the other documents; omit its fraction",
        )
        yield (
            not (self.split and recipe_of(self.recipe).fixed_split),
            f"split: recipe {self.recipe} has its own valid and test; omit it",
        )
        yield total < 1, f"split: the sum {total} leaves none for train"
        yield (
            self.split_by is None or bool(self.split),
            "split_by: is for --split NAME=FRACTION; give that or omit it",
        )
