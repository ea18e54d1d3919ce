"""Train the tokenizer of a dataset on its train split, and store it in the staging directory.

bpe trains in the main process on the beginning of train. char and word count symbols per shard in
work units (`work_units.py`); the main process merges the counts. `tokenizers/training.py` builds
the vocabulary.
"""

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from data_pipeline.preparation.document_batch import DocumentBatch
from data_pipeline.preparation.finished_units import FinishedFile, load_finished, record_finished
from data_pipeline.shards.manifest import TOKENIZER_NAME
from data_pipeline.shards.prepare_settings import PrepareSettings
from data_pipeline.storage.atomic_files import sha256_file, write_synced
from data_pipeline.tokenizers import (
    Tokenizer,
    load_tokenizer,
    tokenizer_of_counts,
    train_tokenizer,
)
from data_pipeline.tokenizers.symbol_counts import counts_from_bytes, merge_counts
from data_pipeline.tokenizers.text_parts import MAX_PART_CHARS, text_parts

_UNIT = "tokenizer"


def train_or_reuse(
    staging: Path, key: str, train: Callable[[], Tokenizer]
) -> tuple[Tokenizer, bool]:
    """Return the tokenizer of `train()`, and whether an earlier run had stored it in `staging`.

    `key` is a digest of everything that the tokenizer depends on.
    """
    path = staging / TOKENIZER_NAME
    if load_finished(staging, _UNIT, key) is not None:
        return load_tokenizer(path), True
    tokenizer = train()
    save_tokenizer(tokenizer, staging)
    files = [FinishedFile(TOKENIZER_NAME, path.stat().st_size, sha256_file(path))]
    record_finished(staging, _UNIT, key, result={}, files=files)
    return tokenizer, False


def save_tokenizer(tokenizer: Tokenizer, staging: Path) -> None:
    write_synced(staging / TOKENIZER_NAME, tokenizer.to_json().encode() + b"\n")


def train_on_texts(
    settings: PrepareSettings, shards: Iterable[DocumentBatch], staging: Path
) -> Tokenizer:
    """Train bpe on the first `settings.train_bytes` of the documents in `shards`."""

    def texts() -> Iterator[str]:
        for batch in shards:
            for number in range(len(batch)):
                # In parts, so that memory does not grow with the size of a document. bpe may be
                # cut at spaces without changing its tokens.
                text = batch.read_text(number, staging)
                yield from text_parts(text, max_chars=MAX_PART_CHARS, cuts="space")

    return train_tokenizer(settings, texts)


def train_on_counts(settings: PrepareSettings, paths: Iterable[Path]) -> Tokenizer:
    """Train char or word on the symbol counts in these files."""
    counts = merge_counts(counts_from_bytes(path.read_bytes()) for path in paths)
    return tokenizer_of_counts(settings, counts)
