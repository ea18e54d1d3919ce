"""Train byte-level BPE with GPT-2's pattern: count words, in parts if needed, then learn merges.

The vocabulary is the one that the `tokenizers` library trains on the same texts, ids included. It
depends on the texts alone: not on how they are divided into parts that are counted separately.

The next merge is the pair of adjacent symbols with the largest count, and of equal counts the pair
with the smallest ids: the rule of `tokenizers`. That library cannot start from counts, though: it
reads the text in one process and holds every word as objects (660 MiB at 250 MB of text). Here the
words are one array of symbols with a few words of RAM per byte of a distinct word.

Source: Sennrich et al. 2016, arXiv:1508.07909, algorithm 1.
"""

import contextlib
import heapq
import json
import os
import threading
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from data_pipeline.errors import DataError
from data_pipeline.tokenizers.decoding import BYTE_OF
from data_pipeline.tokenizers.encoders import needs_reference, reason_without_gigatoken
from data_pipeline.tokenizers.interface import text_parts
from data_pipeline.tokenizers.pretrained import (
    PretrainedDescription,
    PretrainedTokenizer,
    require_same_ids,
)

DEFAULT_MIN_FREQ = 2
_PART_CHARS = 2**16
_COUNT_BYTES = 4 * 2**20
"""Bytes of text that gigatoken counts in one call."""
_SEPARATOR = b"\xff"
"""Between two texts. It does not occur in UTF-8; the default of gigatoken is text."""
_BYTE_ORDER = bytes(byte for _, byte in sorted(BYTE_OF.items()))
"""The bytes of the ids 0 to 255, in the order of the characters that files write for them."""
_silence = threading.Lock()


def bpe_of_counts(
    counts: Counter[str], *, vocab_size: int, min_freq: int | None = None
) -> PretrainedTokenizer:
    """Train BPE on words counted by `count_words`. Empties `counts`, which may be large.

    The vocabulary has at most `vocab_size` ids; the last one is end-of-document. It has fewer if
    too few pairs occur `min_freq` times. Raises DataError if there are no words, or if gigatoken
    and `tokenizers` disagree.
    """
    if not counts:
        raise DataError("there is no text to train bpe on. Give documents with text in them.")
    merger = _Merger(counts, min_freq or DEFAULT_MIN_FREQ)
    library = _library_of(merger.run(num_merges=vocab_size - 1 - len(_BYTE_ORDER)))
    description = PretrainedDescription(
        type="bpe",
        end_of_document=library.get_vocab_size(),
        tokenizer=json.loads(library.to_str()),
    )
    tokenizer = PretrainedTokenizer(description)
    require_same_ids(tokenizer)
    return tokenizer


def _library_of(merges: list[tuple[int, int]]) -> tokenizers.Tokenizer:
    tokens = sorted(BYTE_OF)
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
        if not by_gigatoken or needs_reference(part):
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


# --- merges ---------------------------------------------------------------------------------------


_NONE = -1
_MAX_SYMBOLS = 2**20
"""Ids are below it, so a pair is one int64: left * _MAX_SYMBOLS + right."""
_RARE_SHARE = 2**12
"""Initially, a pair is rare if it occurs less than once per this many symbols of the text."""
_RARE_STEP = 32
"""When only rare pairs are left, the limit is divided by this."""
_PARTS = 16
"""All pairs are counted in this many parts, by their left symbols: more parts, less RAM."""


class _Merger:
    """Learns merges of counted words, which are one array of N symbols with a gap after every word.

    A character of `counts` is a byte, as in Latin-1. `counts` is emptied, because it takes a third
    of the RAM of the merges. Ids 0 to 255 are the bytes; the id of the n-th merge is 256 + n.

    `symbol` int32 [N] is _NONE in gaps and where a symbol was merged into the one on its left;
    `left` and `right` int32 [N] are the positions of a symbol's neighbours, and `pair` int64 [N]
    is the pair of a symbol and its right neighbour, _NONE if there is none. `weight` [N] is the
    count of the symbol's word.

    Pairs that occur less than `least` times are not kept: they take most of the RAM, and few
    vocabularies need them. Counts of pairs only fall. When no other pair is left, `least` falls,
    and all pairs are counted again.
    """

    def __init__(self, counts: dict[str, int], min_count: int) -> None:
        id_of = np.full(256, _NONE, np.int32)
        id_of[np.frombuffer(_BYTE_ORDER, np.uint8)] = np.arange(256)
        words = sorted(word for word in counts if len(word) > 1)
        lengths = np.fromiter(map(len, words), np.int64, len(words)) + 1
        weights = np.fromiter((counts[word] for word in words), np.int64, len(words))
        if words and weights.max() < 2**31:
            weights = weights.astype(np.int32)
        raw = np.frombuffer("".join(word + "\0" for word in words).encode("latin-1"), np.uint8)
        self.symbol = id_of[raw]
        self.symbol[np.cumsum(lengths) - 1] = _NONE
        self.weight = np.repeat(weights, lengths)
        positions = np.arange(len(raw), dtype=np.int32)
        self.left, self.right = positions - 1, positions + 1
        self.pair = np.full(len(raw), _NONE, np.int64)
        self.min_count = min_count
        self.least = max(min_count, int(self.weight.sum(dtype=np.int64)) // _RARE_SHARE)
        self.count: dict[int, int] = {}
        self.places: dict[int, array[int]] = {}
        """Positions of the left symbols of a pair; some may have been merged since."""
        self.queue: list[tuple[int, int]] = []
        counts.clear()
        del words, raw, positions
        self._count_all()

    def _count_all(self) -> None:
        """Count and queue the pairs of all symbols."""
        for part in range(_PARTS):
            # Of the lowest byte, which takes a quarter of the RAM.
            places = np.flatnonzero(self.symbol.astype(np.uint8) % _PARTS == part).astype(np.int32)
            places = places[self.symbol[places] >= 0]
            pairs = self._pairs(self.symbol[places], self.symbol[self.right[places]])
            self._add_pairs(places, pairs)

    @staticmethod
    def _pairs(first: np.ndarray, second: np.ndarray) -> np.ndarray:
        """int64: the pairs of these symbols, _NONE where one is missing."""
        pairs = first.astype(np.int64) * _MAX_SYMBOLS + second
        pairs[(first < 0) | (second < 0)] = _NONE
        return pairs

    def _add_pairs(self, places: np.ndarray, pairs: np.ndarray) -> None:
        """Pairs that did not exist before and start at these places: count and queue them."""
        self.pair[places] = pairs
        order = np.argsort(pairs, kind="stable")
        order = order[np.searchsorted(pairs[order], 0) :]
        pairs, places = pairs[order], places[order]
        starts = np.flatnonzero(np.diff(pairs, prepend=_NONE))
        if not len(starts):
            return
        totals = np.add.reduceat(self.weight[places], starts, dtype=np.int64).tolist()
        stops = [*starts[1:].tolist(), len(pairs)]
        for pair, start, stop, total in zip(
            pairs[starts].tolist(), starts.tolist(), stops, totals, strict=True
        ):
            if total >= self.least:
                self._queue(pair, total, array("i", places[start:stop].tobytes()))

    def _queue(self, pair: int, total: int, places: "array[int]") -> None:
        self.count[pair], self.places[pair] = total, places
        heapq.heappush(self.queue, (-total, pair))

    def run(self, num_merges: int) -> list[tuple[int, int]]:
        """The merges in order, as pairs of ids; fewer if no other pair occurs often enough."""
        merges: list[tuple[int, int]] = []
        while len(merges) < num_merges and (self.queue or self._add_rare_pairs()):
            negative, pair = heapq.heappop(self.queue)
            count = self.count[pair]
            if count == -negative:
                merges.append(divmod(pair, _MAX_SYMBOLS))
                self._merge(pair, 255 + len(merges))
            elif count >= self.least:  # it was queued before a merge changed its count
                heapq.heappush(self.queue, (-count, pair))
            else:
                del self.count[pair], self.places[pair]
        return merges

    def _add_rare_pairs(self) -> bool:
        """Lower `least` until the queue has pairs; returns whether it has."""
        while not self.queue and self.least > self.min_count:
            self.least = max(self.min_count, self.least // _RARE_STEP)
            self._count_all()
        return bool(self.queue)

    def _merge(self, pair: int, new: int) -> None:
        """Replace the pair by the symbol `new` in all words."""
        del self.count[pair]
        places = np.sort(np.frombuffer(self.places.pop(pair), np.int32))
        places = places[self.pair[places] == pair]
        if pair // _MAX_SYMBOLS == pair % _MAX_SYMBOLS:
            places = _without_overlaps(places, self.right[places])
        seconds, before = self.right[places], self.left[places]
        after = self.right[seconds]
        exists = self.pair[before] >= 0  # else it is a gap
        # Where two occurrences touch, the pair between them starts at the first one's second.
        exists[1:] &= before[1:] != seconds[:-1]
        before = before[exists]
        self._forget(np.concatenate([before, seconds]))
        self.symbol[places], self.symbol[seconds] = new, _NONE
        self.right[places], self.left[after] = after, places
        self.pair[seconds] = _NONE
        changed = np.concatenate([before, places])
        self._add_pairs(
            changed, self._pairs(self.symbol[changed], self.symbol[self.right[changed]])
        )

    def _forget(self, places: np.ndarray) -> None:
        """Subtract the pairs that start at these places, which are about to change."""
        pairs, weights = self.pair[places].tolist(), self.weight[places].tolist()
        for pair, weight in zip(pairs, weights, strict=True):
            if pair in self.count:
                self.count[pair] -= weight


def _without_overlaps(places: np.ndarray, seconds: np.ndarray) -> np.ndarray:
    """Of the places of a pair of equal symbols, every second one of each run, from its start."""
    if not len(places):
        return places
    continues = np.concatenate([[False], places[1:] == seconds[:-1]])
    numbers = np.arange(len(places))
    start = np.maximum.accumulate(np.where(continues, 0, numbers))
    return places[(numbers - start) % 2 == 0]
