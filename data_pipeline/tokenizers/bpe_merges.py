"""Learn the merges of byte-level BPE from counts of words: those of `tokenizers`, in its order.

The next merge is the pair of adjacent symbols with the largest count, and of equal counts the pair
with the smallest ids. `tokenizers` follows the same rule, so vocabularies are equal to its own. It
cannot start from counts, though: it reads the text in one process and holds every word as objects
(660 MiB at 250 MB of text). Here the words are one array of symbols with a few words of memory per
byte of a distinct word.

Source: Sennrich et al. 2016, arXiv:1508.07909, algorithm 1.
"""

import heapq
from array import array

import numpy as np

from data_pipeline.tokenizers.tiktoken_ranks import BYTE_OF

_NONE = -1
_MAX_SYMBOLS = 2**20
"""Ids are below it, so a pair is one int64: left * _MAX_SYMBOLS + right."""
_RARE_SHARE = 2**12
"""Initially, a pair is rare if it occurs less than once per this many symbols of the text."""
_RARE_STEP = 32
"""When only rare pairs are left, the limit is divided by this."""
_PARTS = 16
"""All pairs are counted in this many parts, by their left symbols: more parts, less memory."""
_FEW = 300
"""Up to this many pairs, a loop takes less time than numpy's sorting."""


def learn_merges(
    counts: dict[str, int], *, num_symbols: int, min_count: int
) -> list[tuple[int, int]]:
    """The merges in order, as pairs of ids. The id of the n-th merge is 256 + n.

    `counts` has words as `bpe.count_words` gives them: a character is a byte, as in Latin-1. It is
    emptied, because it takes a third of the memory of the merges.
    Ids 0 to 255 are the bytes in the order of `byte_order`. Stops at `num_symbols` ids, or before a
    pair that occurs less than `min_count` times.
    """
    return _Merger(counts, min_count).run(num_symbols - 256)


def byte_order() -> bytes:
    """The 256 bytes in the order of their ids: that of the characters that files write for them."""
    return bytes(byte for _, byte in sorted(BYTE_OF.items()))


class _Merger:
    """The words as one array of N symbols, with a gap after every word.

    `symbol` int32 [N] is _NONE in gaps and where a symbol was merged into the one on its left;
    `left` and `right` int32 [N] are the positions of a symbol's neighbours, and `pair` int64 [N]
    is the pair of a symbol and its right neighbour, _NONE if there is none. `weight` [N] is the
    count of the symbol's word.

    Pairs that occur less than `least` times are not kept: they take most of the memory, and few
    vocabularies need them. Counts of pairs only fall. When no other pair is left, `least` falls,
    and all pairs are counted again.
    """

    def __init__(self, counts: dict[str, int], min_count: int) -> None:
        id_of = np.full(256, _NONE, np.int32)
        id_of[np.frombuffer(byte_order(), np.uint8)] = np.arange(256)
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
            # Of the lowest byte, which takes a quarter of the memory.
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
        if len(pairs) <= _FEW:
            self._add_few_pairs(places, pairs)
            return
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

    def _add_few_pairs(self, places: np.ndarray, pairs: np.ndarray) -> None:
        """The same without numpy, whose calls take longer than a few pairs do."""
        found: dict[int, array[int]] = {}
        totals: dict[int, int] = {}
        for pair, place, weight in zip(
            pairs.tolist(), places.tolist(), self.weight[places].tolist(), strict=True
        ):
            if pair in found:
                found[pair].append(place)
                totals[pair] += weight
            elif pair >= 0:
                found[pair], totals[pair] = array("i", (place,)), weight
        for pair, total in totals.items():
            if total >= self.least:
                self._queue(pair, total, found[pair])

    def _queue(self, pair: int, total: int, places: "array[int]") -> None:
        self.count[pair], self.places[pair] = total, places
        heapq.heappush(self.queue, (-total, pair))

    def run(self, num_merges: int) -> list[tuple[int, int]]:
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
        pairs, weights = self.pair[places], self.weight[places]
        if len(pairs) > _FEW:
            unique, inverse = np.unique(pairs, return_inverse=True)
            pairs, weights = unique, np.bincount(inverse, weights).round().astype(np.int64)
        for pair, weight in zip(pairs.tolist(), weights.tolist(), strict=True):
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
