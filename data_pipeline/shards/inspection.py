"""`txl data inspect`: the beginnings of documents, decoded from their tokens.

Corpus text is untrusted: control characters are escaped before it is printed.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from data_pipeline.errors import printable
from data_pipeline.shards.manifest import load_manifest, open_tokenizer
from data_pipeline.shards.shard_index import read_index
from data_pipeline.shards.shard_reader import SplitReader, open_split
from data_pipeline.system.remote_path import DatasetPath

EXCERPT_TOKENS = 240


@dataclass(frozen=True, slots=True)
class Excerpt:
    """The beginning of one document."""

    split: str
    document_id: str
    tokens: int
    """Tokens of the whole document, including its first, the end-of-document token."""
    text: str


def excerpts(directory: DatasetPath, *, documents: int) -> list[Excerpt]:
    """The beginnings of the first `documents` documents of every split, safe to print."""
    manifest = load_manifest(directory)
    tokenizer = open_tokenizer(directory, manifest)
    result = []
    for split, _ in manifest.train_first():
        source = open_split(directory, split, manifest=manifest, cache_frames=1)
        for block, start, stop, document_id in itertools.islice(_documents(source), documents):
            ids = source.read(block, start, min(stop, start + 1 + EXCERPT_TOKENS))
            # errors="ignore": the excerpt may end inside a character.
            text = tokenizer.decode_bytes(ids).decode("utf-8", errors="ignore")
            result.append(Excerpt(split, printable(document_id), stop - start, printable(text)))
    return result


def _documents(source: SplitReader) -> Iterator[tuple[int, int, int, str]]:
    """(block, start, stop, id) of every document of a split, read as far as it is iterated."""
    blocks = itertools.count()
    for entry in source.entry.shards:
        index = read_index(source.directory, entry, source.dtype.itemsize)
        ids = map(index.document_id, itertools.count())
        for block in itertools.islice(blocks, entry.blocks):
            starts = source.document_starts(block).tolist()
            stops = [*starts[1:], int(source.block_tokens[block])]
            for start, stop in zip(starts, stops, strict=True):
                yield block, start, stop, next(ids)
