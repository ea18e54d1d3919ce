"""The manifest of a prepared dataset: settings, tokenizer, and size and sha256 of every shard.

`manifest.json` is strict, versioned and contains the digest of its content, so an edit or a
flipped bit is detected before any shard is opened. Shard names must follow from split and number,
so a manifest cannot name a file outside its directory.
"""

from collections.abc import Iterator
from itertools import chain
from typing import Annotated, Any, Literal, Self

import numpy as np
from pydantic import AfterValidator, Field, model_validator

from data_pipeline.errors import DataError, UnreadableError
from data_pipeline.readers import IdRules, format_names
from data_pipeline.readers.split_names import SPLIT_PATTERN, TRAIN
from data_pipeline.shards import MANIFEST_NAME, no_dataset_error
from data_pipeline.system.path_kind import PathKind, kind_of
from data_pipeline.system.remote_path import DatasetPath, dataset_path
from data_pipeline.system.sources import is_read_failure
from data_pipeline.system.strict import StrictModel, load_manifest_file, manifest_bytes
from data_pipeline.system.strict_json import sha256_of
from data_pipeline.tokenizers import Tokenizer, load_tokenizer
from data_pipeline.tokenizers.training import (
    DEFAULT_TRAIN_BYTES,
    NOT_IF_UNSET,
    RECIPES,
    OptionalId,
    TokenizerSettings,
    needs_training,
    recipe_of,
)

TOKENIZER_NAME = "tokenizer.json"
VERSION = 2
SHARD_SUFFIX, INDEX_SUFFIX = ".tar.zst", ".index.safetensors"

Count = Annotated[int, Field(ge=0, lt=2**63)]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
SplitName = Annotated[str, Field(pattern=rf"^{SPLIT_PATTERN}$")]
MIN_VOCAB_SIZE, MIN_BPE_VOCAB_SIZE = 4, 258
IdType = Literal["uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"]
SplitBy = Literal["document", "file", "position"]
Rules = Iterator[tuple[bool, str]]
"""Whether each rule holds, and what is wrong if it does not."""


def shard_name(split: str, number: int) -> str:
    return f"{split}-{number:06d}{SHARD_SUFFIX}"


class TextCounts(StrictModel):
    """Counts of a text that do not depend on a tokenizer: denominators of bits per character and
    word perplexity.

    A word is what whitespace separates (`str.split`); a line end is the character "\\n", which word
    models predict as `<eos>`. The text is counted as it is tokenized: nothing is detokenized, so
    WikiText's ` @-@ ` is a word.
    """

    characters: Count
    """Unicode code points."""
    words: Count
    """Runs of characters without whitespace."""
    line_ends: Count
    """Characters "\\n"."""

    def __add__(self, other: "TextCounts") -> "TextCounts":
        return TextCounts(**{name: count + getattr(other, name) for name, count in self})

    def __sub__(self, other: "TextCounts") -> "TextCounts":
        return TextCounts(**{name: count - getattr(other, name) for name, count in self})


NO_TEXT = TextCounts(characters=0, words=0, line_ends=0)


class InputSummary(StrictModel):
    """What `txl prepare` read: counts and a digest of the input."""

    digest: Sha256
    """sha256 over every document's id and text sha256, in input order, and every reject."""
    files: Count
    """Input files."""
    documents: Count
    """Documents with text, duplicates included."""
    empty: Count
    """Documents without text: skipped."""
    rejected: Count
    """Records that could not be read: listed in rejects.jsonl."""
    duplicates: Count
    """Documents skipped because another one has the same text."""


class ShardEntry(StrictModel):
    """One shard and its sidecar index."""

    name: str
    """File name of the shard; that of its index follows from it."""
    bytes: Count
    """Size of the shard."""
    sha256: Sha256
    """sha256 of the shard."""
    raw_bytes: Count
    """Size of the uncompressed tar stream."""
    raw_sha256: Sha256
    """sha256 of the uncompressed tar stream."""
    index_bytes: Count
    """Size of the index."""
    index_sha256: Sha256
    """sha256 of the index."""
    documents: Count
    """Documents in it."""
    blocks: Count
    """Groups of whole documents, which are shuffled as one."""
    tokens: Count
    """Token ids, ends of documents included."""
    text_bytes: Count
    """UTF-8 bytes of the documents' text."""
    text_counts: TextCounts
    """Characters, words and line ends of the text."""

    def __str__(self) -> str:
        return self.name

    @property
    def index_name(self) -> str:
        return self.name.removesuffix(SHARD_SUFFIX) + INDEX_SUFFIX

    @property
    def files(self) -> dict[str, tuple[int, str]]:
        """(bytes, sha256) of the shard and of its index, by file name."""
        return {
            self.name: (self.bytes, self.sha256),
            self.index_name: (self.index_bytes, self.index_sha256),
        }


class SplitEntry(StrictModel):
    """The shards of one split in corpus order, and their totals."""

    shards: Annotated[tuple[ShardEntry, ...], Field(min_length=1)]
    """In corpus order."""
    documents: Count
    """Sum over the shards, as are the following."""
    blocks: Count
    tokens: Count
    text_bytes: Count
    text_counts: TextCounts

    @property
    def compressed_bytes(self) -> int:
        """Bytes of the shards without their indexes."""
        return sum(shard.bytes for shard in self.shards)

    @property
    def text_bytes_per_compressed_byte(self) -> float:
        return self.text_bytes / self.compressed_bytes

    @classmethod
    def of(cls, shards: list[ShardEntry]) -> Self:
        # The totals could be computed; they are stored for people and scripts that read the JSON.
        names = ("documents", "blocks", "tokens", "text_bytes")
        totals: dict[str, Any] = {
            name: sum(getattr(shard, name) for shard in shards) for name in names
        }
        return cls(
            shards=tuple(shards),
            text_counts=sum((shard.text_counts for shard in shards), NO_TEXT),
            **totals,
        )


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
    """exact: of the documents with the same text, keep the first in input order; if the input has
    its own splits, remove from train what a held-out split has, too, and nothing from those."""
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


class DatasetHeader(StrictModel):
    """Everything in a manifest except its list of shards."""

    format: Literal["txl-shards"] = "txl-shards"
    version: Literal[2] = 2
    """Of the format. Other versions are refused."""
    tokenizer_digest: Sha256
    """sha256 of the content of tokenizer.json."""
    vocab_size: Annotated[int, Field(ge=1, le=2**32)]
    """Number of token ids."""
    end_of_document: Count
    """The token id that begins every document."""
    dtype: Literal["uint16", "uint32"]
    """In which the shards store token ids: uint16 up to 65,536 ids."""
    settings: PrepareSettings
    """Options of `txl prepare`, by name."""
    input: InputSummary
    """What was read."""


class IndexHeader(StrictModel):
    """The dataset's description in every index, and how many shards each split has."""

    dataset: DatasetHeader
    shards: dict[SplitName, Annotated[int, Field(ge=1)]]


class ShardManifest(DatasetHeader):
    """A complete dataset. Runs and checkpoints identify it by `digest`."""

    splits: Annotated[dict[SplitName, SplitEntry], Field(min_length=1)]
    """By name."""

    @model_validator(mode="after")
    def _names_follow_from_numbers(self) -> Self:
        for split, entry in self.splits.items():
            for number, shard in enumerate(entry.shards):
                if shard.name != shard_name(split, number):
                    raise ValueError(f"shard {shard.name!r} must be {shard_name(split, number)!r}")
        return self

    @property
    def has_text(self) -> bool:
        """False for a dataset of token ids, whose `text_bytes` are those of decimal numbers."""
        return self.settings.tokenizer != "ids"

    # Not a field: it covers all fields, and `manifest_bytes` adds it to the file.
    @property
    def digest(self) -> str:
        """Hex sha256 of the canonical JSON of the content."""
        return sha256_of(self.model_dump(mode="json"))

    def to_bytes(self, *, tools: dict[str, str] | None = None) -> bytes:
        """The content of `manifest.json`; see `manifest_bytes` for `tools`."""
        return manifest_bytes(self.model_dump(mode="json"), tools=tools)

    def split(self, name: str, directory: DatasetPath) -> SplitEntry:
        """The entry of a split. Raises DataError listing the existing ones."""
        if name not in self.splits:
            raise DataError(
                f"{directory} has no split {name!r}; it has {', '.join(sorted(self.splits))}. "
                "Use one of them, or prepare again with --split."
            )
        return self.splits[name]

    def train_first(self) -> list[tuple[str, SplitEntry]]:
        """The splits by name, `train` first."""
        return sorted(self.splits.items(), key=lambda item: (item[0] != "train", item[0]))

    @property
    def shards(self) -> list[ShardEntry]:
        """The shards of all splits, in the manifest's order."""
        return [shard for entry in self.splits.values() for shard in entry.shards]

    def file_names(self) -> list[str]:
        """Every file of the dataset, in a fixed order."""
        files = sorted(name for shard in self.shards for name in shard.files)
        return [MANIFEST_NAME, TOKENIZER_NAME, *files]


def load_manifest(directory: str | DatasetPath) -> ShardManifest:
    """The checked manifest of a dataset directory or URL. Raises DataError with the cause."""
    path = dataset_path(directory) / MANIFEST_NAME
    try:
        return load_manifest_file(path, ShardManifest)
    except (FileNotFoundError, NotADirectoryError):
        raise no_dataset_error(path.parent) from None
    except OSError as error:
        kind = UnreadableError if is_read_failure(error) else DataError
        raise kind(f"{path} cannot be read: {error.strerror}.") from error
    except ValueError as error:
        if kind_of(path.parent) is PathKind.CHECKPOINT:
            raise no_dataset_error(path.parent) from None
        raise DataError(
            f"{path} {error}. It was edited or damaged, or belongs to another program or another "
            "version of txl. Restore it, upgrade txl, or make the dataset again in another "
            "directory: txl prepare INPUT --out DIR"
        ) from error


def open_tokenizer(
    directory: str | DatasetPath, manifest: ShardManifest | None = None
) -> Tokenizer:
    """The dataset's tokenizer. `manifest` is loaded if None.

    Raises DataError if the shards were made with another one.
    """
    manifest = manifest or load_manifest(directory)
    path = dataset_path(directory) / TOKENIZER_NAME
    tokenizer = load_tokenizer(path)
    if tokenizer.digest != manifest.tokenizer_digest:
        raise DataError(
            f"{path} has digest {tokenizer.digest}, the manifest expects "
            f"{manifest.tokenizer_digest}. The tokenizer of another dataset was copied here; "
            "restore the right one or prepare the corpus again."
        )
    return tokenizer
