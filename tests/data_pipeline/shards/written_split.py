"""Shards written to a directory, and documents read back, for the tests of this folder."""

from pathlib import Path

import numpy as np

from data_pipeline.shards.manifest import (
    NO_TEXT,
    InputSummary,
    PrepareSettings,
    ShardEntry,
    ShardManifest,
    SplitEntry,
)
from data_pipeline.shards.shard_index import ShardIndex, checked_index
from data_pipeline.shards.shard_reader import SplitReader
from data_pipeline.shards.shard_writer import ShardWriter
from data_pipeline.tokenizers import ByteTokenizer, token_dtype


def write_split(
    directory: Path,
    documents: list[np.ndarray],
    *,
    vocab_size: int = 257,
    block_bytes: int = 1024,
    shard_bytes: int = 5000,
    num_chunks: int = 1,
) -> ShardManifest:
    entries: list[ShardEntry] = []
    waiting = list(enumerate(documents))
    while waiting:
        writer = ShardWriter(
            directory,
            "train",
            len(entries),
            dtype=token_dtype(vocab_size),
            vocab_size=vocab_size,
            block_bytes=block_bytes,
        )
        size = 0
        while waiting and not size >= shard_bytes:
            number, tokens = waiting.pop(0)
            chunks = np.array_split(tokens, num_chunks)
            writer.add(f"d/{number}", chunks, text_bytes=len(tokens) - 1)
            size += len(tokens)
        entries.append(writer.close(NO_TEXT))
    summary = InputSummary(digest="0" * 64, files=1, documents=1, empty=0, rejected=0, duplicates=0)
    return ShardManifest(
        tokenizer_digest=ByteTokenizer().digest,
        vocab_size=vocab_size,
        end_of_document=256,
        dtype="uint16" if vocab_size <= 2**16 else "uint32",
        settings=PrepareSettings(),
        input=summary,
        splits={"train": SplitEntry.of(entries)},
    )


def read_index(directory: Path, shard: ShardEntry) -> ShardIndex:
    data = (directory / shard.index_name).read_bytes()
    return checked_index(data, directory, shard, itemsize=2)[0]


def documents_of(source: SplitReader) -> list[list[int]]:
    """Every document of a split, read as a whole block and cut at its starts."""
    documents: list[list[int]] = []
    for block, count in enumerate(source.block_tokens.tolist()):
        tokens = source.read(block, 0, count)
        documents += [part.tolist() for part in np.split(tokens, source.document_starts(block)[1:])]
    return documents


def some_documents(lengths: list[int], vocab_size: int = 257) -> list[np.ndarray]:
    random = np.random.default_rng(5)
    return [np.array([256, *random.integers(0, 256, n)], token_dtype(vocab_size)) for n in lengths]
