"""The manifest: what a prepared dataset holds, and the only list that training trusts.

`manifest.json` is strict, versioned and carries the digest of its own content, so an edit or a
flipped bit in it is noticed before any shard is opened. Shard names are not free text: they follow
from split and number, so a manifest cannot point outside its directory.
"""

import re
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from data_pipeline.errors import DataError
from data_pipeline.preparation.settings import SPLIT_PATTERN, PrepareSettings, SplitName
from data_pipeline.storage import strict_json
from data_pipeline.storage.manifest_file import (
    WrongFormatError,
    load_manifest_file,
    manifest_bytes,
)
from data_pipeline.storage.remote_path import DatasetPath, RemotePath, dataset_path
from data_pipeline.storage.strict_model import StrictModel
from data_pipeline.tokenizers import Tokenizer, load_tokenizer, token_dtype

MANIFEST_NAME = "manifest.json"
TOKENIZER_NAME = "tokenizer.json"
REJECTS_NAME = "rejects.jsonl"
FORMAT = "txl-shards"
VERSION = 2
SHARD_SUFFIX, INDEX_SUFFIX = ".tar.zst", ".index.safetensors"
MAX_MANIFEST_BYTES = 256 * 2**20

Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Count = Annotated[int, Field(ge=0, lt=2**63)]


def shard_name(split: str, number: int) -> str:
    return f"{split}-{number:06d}{SHARD_SUFFIX}"


class InputSummary(StrictModel):
    """The corpus as it was read."""

    digest: Sha256
    """Over every document's id and the sha256 of its text, in input order, and every reject."""
    files: Count
    documents: Count
    """With text, duplicates included."""
    empty: Count
    """Documents without text: skipped."""
    rejected: Count
    """Records that could not be read: listed in rejects.jsonl."""
    duplicates: Count
    """Documents left out because an earlier one has the same text."""


class ShardEntry(StrictModel):
    """One shard and its sidecar index."""

    name: str
    bytes: Count
    sha256: Sha256
    raw_bytes: Count
    raw_sha256: Sha256
    """Of the tar stream inside."""
    index_bytes: Count
    index_sha256: Sha256
    documents: Count
    blocks: Count
    tokens: Count
    text_bytes: Count
    """UTF-8 bytes of the documents' text."""

    @property
    def index_name(self) -> str:
        return self.name.removesuffix(SHARD_SUFFIX) + INDEX_SUFFIX


class SplitEntry(StrictModel):
    """The shards of one split in corpus order, and their totals."""

    shards: Annotated[tuple[ShardEntry, ...], Field(min_length=1)]
    documents: Count
    blocks: Count
    tokens: Count
    text_bytes: Count

    @classmethod
    def of(cls, shards: list[ShardEntry]) -> Self:
        return cls(shards=tuple(shards), **_totals(shards))

    @model_validator(mode="after")
    def _totals_agree(self) -> Self:
        for name, total in _totals(self.shards).items():
            if getattr(self, name) != total:
                raise ValueError(f"{name}={getattr(self, name)}, but its shards sum to {total}")
        return self


def _totals(shards: list[ShardEntry] | tuple[ShardEntry, ...]) -> dict[str, int]:
    names = ("documents", "blocks", "tokens", "text_bytes")
    return {name: sum(getattr(shard, name) for shard in shards) for name in names}


class DatasetHeader(StrictModel):
    """All of a manifest but its list of shards."""

    format: Literal["txl-shards"] = "txl-shards"
    version: Literal[2] = 2
    tokenizer_digest: Sha256
    vocab_size: Annotated[int, Field(ge=1, le=2**32)]
    end_of_document: Count
    dtype: Literal["uint16", "uint32"]
    settings: PrepareSettings
    input: InputSummary


class IndexHeader(StrictModel):
    """What every index knows of its dataset, so that the shards can replace a lost manifest."""

    dataset: DatasetHeader
    shards: dict[SplitName, Annotated[int, Field(ge=1)]]
    """How many each split has."""


class ShardManifest(DatasetHeader):
    """A complete dataset. `digest` is what runs and checkpoints remember it by."""

    splits: Annotated[dict[SplitName, SplitEntry], Field(min_length=1)]

    @model_validator(mode="after")
    def _names_and_ids_agree(self) -> Self:
        for split, entry in self.splits.items():
            for number, shard in enumerate(entry.shards):
                if shard.name != shard_name(split, number):
                    raise ValueError(f"shard {shard.name!r} must be {shard_name(split, number)!r}")
        if self.dtype != token_dtype(self.vocab_size).name:
            raise ValueError(f"dtype={self.dtype} does not fit vocab_size={self.vocab_size}")
        if self.end_of_document >= self.vocab_size:
            raise ValueError(f"end_of_document={self.end_of_document} is outside the vocabulary")
        return self

    @property
    def digest(self) -> str:
        """Hex sha256 of the canonical content."""
        return strict_json.sha256_of(self.model_dump(mode="json"))

    def to_bytes(self) -> bytes:
        """The content of `manifest.json`."""
        return manifest_bytes(self.model_dump(mode="json"))

    def split(self, name: str, directory: DatasetPath) -> SplitEntry:
        """The entry of a split, or DataError with the ones there are."""
        if name not in self.splits:
            raise DataError(
                f"{directory} has no split {name!r}; it has {', '.join(sorted(self.splits))}. "
                "Use one of them, or prepare again with --split."
            )
        return self.splits[name]

    def file_names(self) -> list[str]:
        """Every file of the dataset, in a fixed order."""
        shards = [shard for entry in self.splits.values() for shard in entry.shards]
        names = [name for shard in shards for name in (shard.name, shard.index_name)]
        return [MANIFEST_NAME, TOKENIZER_NAME, *sorted(names)]


def load_manifest(directory: str | DatasetPath) -> ShardManifest:
    """The checked manifest of a dataset directory or URL; DataError says what is wrong."""
    path = dataset_path(directory) / MANIFEST_NAME
    try:
        return load_manifest_file(path, ShardManifest)
    except FileNotFoundError:
        cause = "there is no such directory" if not path.parent.is_dir() else "it has no manifest"
        remote = isinstance(path, RemotePath)
        out = f"DIR, then txl data push DIR {path.parent}" if remote else path.parent
        raise DataError(
            f"{path}: {cause}, so no complete dataset is here (an interrupted prepare leaves none)."
            f" Create it: txl prepare INPUT --out {out}. If its shards are there: txl data rebuild "
            f"{directory}"
        ) from None
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}.") from error
    except WrongFormatError as error:
        raise DataError(
            f"{path} {error}. It belongs to another program or to another version of txl. Give a "
            "directory that txl prepare wrote, upgrade txl, or prepare the corpus again elsewhere."
        ) from error
    except ValueError as error:
        raise DataError(f"{path} {error}. {_again(path.parent)}") from error


def _again(directory: DatasetPath) -> str:
    return (
        f"It was edited or damaged; restore it, make it again with txl data rebuild {directory}, "
        f"or remove {directory} and run txl prepare INPUT --out {directory}"
    )


def open_tokenizer(
    directory: str | DatasetPath, manifest: ShardManifest | None = None
) -> Tokenizer:
    """The dataset's tokenizer, or DataError when it is not the one the shards were made with."""
    manifest = manifest or load_manifest(directory)
    path = dataset_path(directory) / TOKENIZER_NAME
    tokenizer = load_tokenizer(path)
    if tokenizer.digest != manifest.tokenizer_digest:
        raise DataError(
            f"{path} has digest {tokenizer.digest}, the manifest expects "
            f"{manifest.tokenizer_digest}. The tokenizer of another dataset was copied here; "
            f"restore the right one or prepare again."
        )
    found = (tokenizer.vocab_size, tokenizer.end_of_document)
    if found != (manifest.vocab_size, manifest.end_of_document):
        raise DataError(
            f"{path}: vocab_size and end_of_document are {found}, the manifest says "
            f"{(manifest.vocab_size, manifest.end_of_document)}. {_again(path.parent)}"
        )
    return tokenizer


def is_dataset_file(name: str) -> bool:
    """Whether `name` is one that `txl prepare` gives to files in a dataset directory."""
    shard = rf"{SPLIT_PATTERN}-\d{{6}}({re.escape(SHARD_SUFFIX)}|{re.escape(INDEX_SUFFIX)})"
    return name in (MANIFEST_NAME, TOKENIZER_NAME, REJECTS_NAME) or bool(re.fullmatch(shard, name))
