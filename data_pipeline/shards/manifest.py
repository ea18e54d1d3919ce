"""The manifest of a prepared dataset: settings, tokenizer, and size and sha256 of every shard.

`manifest.json` is strict, versioned and contains the digest of its content, so an edit or a
flipped bit is detected before any shard is opened. Shard names must follow from split and number,
so a manifest cannot name a file outside its directory.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, Any, Literal, Self

import numpy as np
from pydantic import Field, model_validator

from data_pipeline.errors import DataError, UnreadableError
from data_pipeline.shards import MANIFEST_NAME, missing_manifest_error
from data_pipeline.shards.prepare_settings import PrepareSettings, SplitName
from data_pipeline.system.remote_path import DatasetPath, dataset_path
from data_pipeline.system.sources import is_read_failure
from data_pipeline.system.strict import StrictModel, load_manifest_file, manifest_bytes
from data_pipeline.system.strict_json import sha256_of
from data_pipeline.tokenizers import Tokenizer, load_tokenizer

TOKENIZER_NAME = "tokenizer.json"
REJECTS_NAME = "rejects.jsonl"
VERSION = 2
SHARD_SUFFIX, INDEX_SUFFIX = ".tar.zst", ".index.safetensors"

Count = Annotated[int, Field(ge=0, lt=2**63)]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


def shard_name(split: str, number: int) -> str:
    return f"{split}-{number:06d}{SHARD_SUFFIX}"


def index_name(shard: str) -> str:
    return shard.removesuffix(SHARD_SUFFIX) + INDEX_SUFFIX


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
        return self._combine(other, 1)

    def __sub__(self, other: "TextCounts") -> "TextCounts":
        return self._combine(other, -1)

    def _combine(self, other: "TextCounts", sign: int) -> "TextCounts":
        names = type(self).model_fields
        return TextCounts(**{n: getattr(self, n) + sign * getattr(other, n) for n in names})


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
    """Documents skipped because an earlier one has the same text."""


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
        return index_name(self.name)

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
        text_counts = sum((shard.text_counts for shard in shards), NO_TEXT)
        return cls(shards=tuple(shards), text_counts=text_counts, **totals)


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
    """The token id that ends every document."""
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

    @property
    def shard_files(self) -> dict[str, tuple[int, str]]:
        """(bytes, sha256) of every shard and index of the dataset, by file name."""
        return {name: facts for shard in self.shards for name, facts in shard.files.items()}

    def file_names(self) -> list[str]:
        """Every file of the dataset, in a fixed order."""
        return [MANIFEST_NAME, TOKENIZER_NAME, *sorted(self.shard_files)]


def load_manifest(directory: str | DatasetPath) -> ShardManifest:
    """The checked manifest of a dataset directory or URL. Raises DataError with the cause."""
    path = dataset_path(directory) / MANIFEST_NAME
    try:
        return load_manifest_file(path, ShardManifest)
    except FileNotFoundError:
        raise missing_manifest_error(path.parent) from None
    except OSError as error:
        kind = UnreadableError if is_read_failure(error) else DataError
        raise kind(f"{path} cannot be read: {error.strerror}.") from error
    except ValueError as error:
        raise DataError(
            f"{path} {error}. It was edited or damaged, or belongs to another program or another "
            f"version of txl. Restore it, upgrade txl, or remove {path.parent} and run txl prepare "
            f"INPUT --out {path.parent}"
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


# --- counting a text ------------------------------------------------------------------------------

_ASCII = bytes(range(128))
_OTHER_SPACES = [chr(code).encode() for code in range(128, 0x3001) if chr(code).isspace()]
_IN_WORD = bytes(code >= 128 or not chr(code).isspace() for code in range(256))
"""By byte of UTF-8: 0 for the whitespace of ASCII, else 1."""


class TextCounter:
    """Counts documents while their fragments pass through `document`."""

    def __init__(self) -> None:
        self._characters = self._words = self._line_ends = 0

    @property
    def counts(self) -> TextCounts:
        return TextCounts(characters=self._characters, words=self._words, line_ends=self._line_ends)

    def add(self, documents: Sequence[str]) -> None:
        """Count whole documents."""
        self._characters += sum(map(len, documents))
        self._line_ends += sum(text.count("\n") for text in documents)
        # No word continues in another document. Texts in ASCII are counted apart, which is faster.
        self._words += _num_words("\n".join(filter(str.isascii, documents)))
        self._words += _num_words("\n".join(text for text in documents if not text.isascii()))

    def document(self, fragments: Iterable[str]) -> Iterator[str]:
        """Yield the fragments of one document, which may be cut anywhere, also in a word."""
        in_word = False
        for fragment in fragments:
            if fragment:
                self._characters += len(fragment)
                self._line_ends += fragment.count("\n")
                continues = in_word and not fragment[0].isspace()
                self._words += _num_words(fragment) - continues
                in_word = not fragment[-1].isspace()
            yield fragment


def count_text(text: str) -> TextCounts:
    """The counts of one document."""
    counter = TextCounter()
    counter.add([text])
    return counter.counts


def _num_words(text: str) -> int:
    """len(text.split()), several times as fast, because no list of words is made."""
    encoded = text.encode()
    if not text.isascii():
        others = encoded.translate(None, _ASCII)  # of most texts little, so the search is fast
        if any(space in others for space in _OTHER_SPACES):
            return len(text.split())
    in_word = np.frombuffer(b"\0" + encoded.translate(_IN_WORD), np.uint8)
    return int(np.count_nonzero(in_word[1:] > in_word[:-1]))
