"""Train the tokenizer of a dataset on its train split, and store it in the staging directory.

Work units count the symbols of each shard (`work_units.py`): characters, words, or for bpe the
words at the beginning of train. The main process adds the counts, and `tokenizers/training.py`
builds the vocabulary.
"""

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from data_pipeline.preparation.document_batch import DocumentBatch
from data_pipeline.preparation.finished_units import FinishedFile, load_finished, record_finished
from data_pipeline.preparation.work_units import CountUnit
from data_pipeline.shards.manifest import TOKENIZER_NAME
from data_pipeline.shards.prepare_settings import PrepareSettings
from data_pipeline.system.files import sha256_file, write_synced
from data_pipeline.tokenizers import Tokenizer, load_tokenizer, tokenizer_of_counts
from data_pipeline.tokenizers.training import counts_from_bytes, merge_counts

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


def count_units(settings: PrepareSettings, shards: Iterable[DocumentBatch]) -> Iterator[CountUnit]:
    """The units that count the symbols of the train split. bpe counts `train_bytes` of it."""
    bytes_left = settings.train_bytes
    for number, batch in enumerate(shards):
        context = settings
        if settings.tokenizer == "bpe":
            if bytes_left <= 0:
                return
            context = settings.model_copy(update={"train_bytes": bytes_left})
            bytes_left -= batch.size
        yield CountUnit("train", number, context.model_dump_json(), batch)


def train_on_counts(settings: PrepareSettings, paths: Iterable[Path]) -> Tokenizer:
    """Train char, word or bpe on the symbol counts in these files."""
    counts = merge_counts(counts_from_bytes(path.read_bytes()) for path in paths)
    return tokenizer_of_counts(settings, counts)
