"""`txl data inspect`: the beginnings of documents, decoded from their tokens.

Corpus text is untrusted: control characters are escaped before it is printed.
"""

from dataclasses import dataclass

from data_pipeline.errors import printable
from data_pipeline.shards.manifest import load_manifest, open_tokenizer
from data_pipeline.shards.shard_index import read_index
from data_pipeline.shards.shard_reader import SplitReader, open_split
from data_pipeline.storage.remote_path import DatasetPath
from data_pipeline.tokenizers import Tokenizer

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
        positions = _first_documents(source, documents)
        result += [_excerpt(source, tokenizer, position) for position in positions]
    return result


def _first_documents(source: SplitReader, documents: int) -> list[tuple[int, int, int, str]]:
    """(block, start, stop, id) of the first `documents` documents of a split, fewer if it ends."""
    positions: list[tuple[int, int, int, str]] = []
    block = 0
    for entry in source.entry.shards:
        if len(positions) >= documents:
            break
        index = read_index(source.directory, entry, source.dtype.itemsize)
        document = 0
        for _ in range(entry.blocks):
            starts = source.document_starts(block).tolist()
            stops = [*starts[1:], int(source.block_tokens[block])]
            for start, stop in zip(starts, stops, strict=True):
                positions.append((block, start, stop, index.document_id(document)))
                document += 1
            block += 1
            if len(positions) >= documents:
                break
    return positions[:documents]


def _excerpt(
    source: SplitReader, tokenizer: Tokenizer, position: tuple[int, int, int, str]
) -> Excerpt:
    block, start, stop, document_id = position
    ids = source.read(block, start, min(stop, start + 1 + EXCERPT_TOKENS))
    # errors="ignore": the excerpt may end inside a character.
    text = tokenizer.decode_bytes(ids).decode("utf-8", errors="ignore")
    return Excerpt(source.split, printable(document_id), stop - start, printable(text))
