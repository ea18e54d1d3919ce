"""Train byte-level BPE with GPT-2's pattern: count words, in parts if needed, then learn merges.

The vocabulary is the one that the `tokenizers` library trains on the same texts, ids included. It
depends on the texts alone: not on how they are divided into parts that are counted separately.
"""

import contextlib
import json
import os
import threading
from collections import Counter
from collections.abc import Iterable, Iterator

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from data_pipeline.errors import DataError
from data_pipeline.tokenizers.bpe_merges import byte_order, learn_merges
from data_pipeline.tokenizers.gigatoken_encoder import needs_reference, reason_without_gigatoken
from data_pipeline.tokenizers.pretrained import (
    PretrainedDescription,
    PretrainedTokenizer,
    require_same_ids,
)
from data_pipeline.tokenizers.text_parts import text_parts
from data_pipeline.tokenizers.tiktoken_ranks import BYTE_OF

DEFAULT_MIN_FREQ = 2
_PART_CHARS = 2**16
_COUNT_BYTES = 4 * 2**20
"""Bytes of text that gigatoken counts in one call."""
_SEPARATOR = b"\xff"
"""Between two texts. It does not occur in UTF-8; the default of gigatoken is text."""
_CHARACTER_OF = {byte: character for character, byte in BYTE_OF.items()}
_silence = threading.Lock()


def train_bpe(
    texts: Iterable[str], *, vocab_size: int, min_freq: int | None = None, max_bytes: int
) -> PretrainedTokenizer:
    """Train BPE on the first `max_bytes` UTF-8 bytes of `texts`; see `bpe_of_counts`."""
    counts = count_words(texts, max_bytes=max_bytes)
    return bpe_of_counts(counts, vocab_size=vocab_size, min_freq=min_freq)


def bpe_of_counts(
    counts: Counter[str], *, vocab_size: int, min_freq: int | None = None
) -> PretrainedTokenizer:
    """Train BPE on words counted by `count_words`. Empties `counts`, which may be large.

    The vocabulary has at most `vocab_size` ids; the last one is end-of-document. It has fewer if
    too few pairs occur `min_freq` times. Raises DataError if there are no words, or if the encoder
    and `tokenizers` disagree.
    """
    if not counts:
        raise DataError("there is no text to train bpe on. Give documents with text in them.")
    library = _library_of(
        learn_merges(counts, num_symbols=vocab_size - 1, min_count=min_freq or DEFAULT_MIN_FREQ)
    )
    description = PretrainedDescription(
        type="bpe",
        end_of_document=library.get_vocab_size(),
        tokenizer=json.loads(library.to_str()),
    )
    try:
        tokenizer = PretrainedTokenizer(description)
    except ValueError as error:  # a long run of one character trains a token that is too long
        raise DataError(
            f"bpe trained on this text cannot be used: {error}. Remove long runs of the same "
            "characters from the text, or choose a smaller --vocab-size."
        ) from error
    require_same_ids(tokenizer, [])
    return tokenizer


def _library_of(merges: list[tuple[int, int]]) -> tokenizers.Tokenizer:
    tokens = [_CHARACTER_OF[byte] for byte in byte_order()]
    pairs = []
    for left, right in merges:
        pairs.append((tokens[left], tokens[right]))
        tokens.append(tokens[left] + tokens[right])
    vocab = {token: id_ for id_, token in enumerate(tokens)}
    library = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=pairs))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    return library


def count_words(texts: Iterable[str], *, max_bytes: int) -> Counter[str]:
    """How often GPT-2's pattern matches each word in the first `max_bytes` UTF-8 bytes of `texts`.

    A word is its bytes as Latin-1. `texts` may be parts of texts, cut where BPE allows. Counts of
    several parts may be added.
    """
    counts: Counter[str] = Counter()
    batch: list[bytes] = []
    batch_bytes = 0
    by_gigatoken = not reason_without_gigatoken()
    for part in _first_bytes(texts, max_bytes):
        if not by_gigatoken or needs_reference([part]):
            split = pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str(part)
            words = (bytes(map(BYTE_OF.__getitem__, word)) for word, _ in split)
            counts.update(word.decode("latin-1") for word in words)
            continue
        batch.append(part.encode("utf-8"))
        batch_bytes += len(batch[-1])
        if batch_bytes >= _COUNT_BYTES:
            _count_with_gigatoken(batch, counts)
            batch, batch_bytes = [], 0
    if batch:
        _count_with_gigatoken(batch, counts)
    return counts


def _count_with_gigatoken(batch: list[bytes], counts: Counter[str]) -> None:
    from gigatoken.gigatoken_rs import pretokenized_counts

    with _without_stderr():
        words = pretokenized_counts(_SEPARATOR.join(batch), _SEPARATOR)
    for word, count in words:
        counts[word.decode("latin-1")] += count


@contextlib.contextmanager
def _without_stderr() -> Iterator[None]:
    """Discard what native code writes to standard error: gigatoken reports its progress there."""
    with _silence, open(os.devnull, "wb") as nowhere:  # noqa: PTH123
        saved = os.dup(2)
        os.dup2(nowhere.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(saved, 2)
            os.close(saved)


def _first_bytes(texts: Iterable[str], max_bytes: int) -> Iterator[str]:
    """The first `max_bytes` UTF-8 bytes of `texts`, in parts that can be split separately."""
    bytes_left = max_bytes
    for text in texts:
        for part in text_parts([text], max_chars=_PART_CHARS):
            encoded = part.encode("utf-8")
            if len(encoded) > bytes_left:
                if beginning := encoded[:bytes_left].decode("utf-8", errors="ignore"):
                    yield beginning
                return
            bytes_left -= len(encoded)
            yield part
