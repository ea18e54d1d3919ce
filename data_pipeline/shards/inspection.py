"""Inspecting: what a dataset holds, as numbers and as text decoded back from its tokens.

Text comes from a corpus that nobody has read, so control characters are escaped before it is shown.
"""

from dataclasses import dataclass

from data_pipeline.errors import printable
from data_pipeline.shards.manifest import ShardManifest, load_manifest, open_tokenizer
from data_pipeline.shards.shard_index import read_index
from data_pipeline.shards.shard_reader import SplitReader, open_split
from data_pipeline.storage.remote_path import DatasetPath
from data_pipeline.tokenizers import Tokenizer

EXCERPT_TOKENS = 240


@dataclass(frozen=True, slots=True)
class SplitSummary:
    """Totals of one split. `compressed_bytes` are those of its shards, indexes not counted."""

    name: str
    shards: int
    documents: int
    blocks: int
    tokens: int
    text_bytes: int
    compressed_bytes: int

    @property
    def text_bytes_per_compressed_byte(self) -> float:
        return self.text_bytes / self.compressed_bytes


@dataclass(frozen=True, slots=True)
class Excerpt:
    """The beginning of one document."""

    split: str
    document_id: str
    tokens: int
    """Of the whole document, its opening end-of-document token included."""
    text: str


def summarize(manifest: ShardManifest) -> list[SplitSummary]:
    """Totals per split, `train` first."""
    names = sorted(manifest.splits, key=lambda name: (name != "train", name))
    return [
        SplitSummary(
            name=name,
            shards=len(entry.shards),
            documents=entry.documents,
            blocks=entry.blocks,
            tokens=entry.tokens,
            text_bytes=entry.text_bytes,
            compressed_bytes=sum(shard.bytes for shard in entry.shards),
        )
        for name, entry in ((name, manifest.splits[name]) for name in names)
    ]


def excerpts(directory: DatasetPath, *, documents: int) -> list[Excerpt]:
    """The beginnings of the first `documents` documents of every split, safe to print."""
    manifest = load_manifest(directory)
    tokenizer = open_tokenizer(directory, manifest)
    found = []
    for summary in summarize(manifest):
        source = open_split(directory, summary.name, manifest=manifest, cache_frames=1)
        wanted = min(documents, summary.documents)
        found += [_excerpt(source, tokenizer, place) for place in _places(source, wanted)]
    return found


def _places(source: SplitReader, documents: int) -> list[tuple[int, int, int, str]]:
    """(block, start, stop, id) of the first documents of a split."""
    places: list[tuple[int, int, int, str]] = []
    block = 0
    for entry in source.entry.shards:
        if len(places) >= documents:
            break
        index = read_index(source.directory, entry, source.dtype.itemsize)
        document = 0
        for _ in range(entry.blocks):
            starts = source.document_starts(block).tolist()
            stops = [*starts[1:], int(source.block_tokens[block])]
            for start, stop in zip(starts, stops, strict=True):
                places.append((block, start, stop, index.document_id(document)))
                document += 1
            block += 1
            if len(places) >= documents:
                break
    return places[:documents]


def _excerpt(
    source: SplitReader, tokenizer: Tokenizer, place: tuple[int, int, int, str]
) -> Excerpt:
    block, start, stop, document_id = place
    ids = source.read(block, start, min(stop, start + 1 + EXCERPT_TOKENS))
    # An excerpt may end inside a character; the document itself does not.
    text = tokenizer.decode_bytes(ids).decode("utf-8", errors="ignore")
    return Excerpt(source.split, printable(document_id), stop - start, printable(text))
