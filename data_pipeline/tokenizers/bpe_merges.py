"""Learn the merges of byte-level BPE from counts of words: those of `tokenizers`, in its order.

The next merge is the pair of adjacent symbols with the largest count, and of equal counts the pair
with the smallest ids. `tokenizers` follows the same rule, so vocabularies are equal to its own. It
cannot start from counts, though: it reads the text in one process and holds every word as objects
(660 MiB at 250 MB of text). Here the words are one array of symbols with a few words of memory per
byte of a distinct word.

Source: Sennrich et al. 2016, arXiv:1508.07909, algorithm 1.
"""

import heapq
from collections.abc import Mapping

import numpy as np

from data_pipeline.tokenizers.tiktoken_ranks import BYTE_OF

_NONE = -1
_MAX_SYMBOLS = 2**20
"""Ids are below it, so a pair is one int64: left * _MAX_SYMBOLS + right."""


def learn_merges(
    counts: Mapping[bytes, int], *, num_symbols: int, min_count: int
) -> list[tuple[int, int]]:
    """The merges in order, as pairs of ids. The id of the n-th merge is 256 + n.

    Ids 0 to 255 are the bytes in the order of `byte_order`. Stops at `num_symbols` ids, or before a
    pair that occurs less than `min_count` times.
    """
    return _Merger(counts).run(num_symbols - 256, min_count)


def byte_order() -> bytes:
    """The 256 bytes in the order of their ids: that of the characters that files write for them."""
    return bytes(byte for _, byte in sorted(BYTE_OF.items()))


class _Merger:
    """The words as one array of N symbols, with a gap after every word.

    `symbol` int32 [N] is _NONE in gaps and where a symbol was merged into the one on its left;
    `left` and `right` int32 [N] are the positions of a symbol's neighbours. `weight` int64 [N] is
    the count of the symbol's word, 0 in gaps.
    """

    def __init__(self, counts: Mapping[bytes, int]) -> None:
        id_of = np.empty(256, np.int32)
        id_of[np.frombuffer(byte_order(), np.uint8)] = np.arange(256)
        words = sorted(word for word in counts if len(word) > 1)
        lengths = np.fromiter(map(len, words), np.int64, len(words)) + 1
        raw = np.frombuffer(b"".join(word + b"\0" for word in words), np.uint8)
        self.symbol = id_of[raw]
        self.symbol[np.cumsum(lengths) - 1] = _NONE
        self.weight = np.repeat(
            np.fromiter((counts[word] for word in words), np.int64, len(words)), lengths
        )
        positions = np.arange(len(raw), dtype=np.int32)
        self.left, self.right = positions - 1, positions + 1
        self.count: dict[int, int] = {}
        self.places: dict[int, list[np.ndarray]] = {}
        """Positions of the left symbols of a pair; some may have been merged since."""
        self.queue: list[tuple[int, int]] = []
        self._add_pairs(np.flatnonzero(self._pairs_at(positions[:-1]) >= 0).astype(np.int32))

    def _pairs_at(self, places: np.ndarray) -> np.ndarray:
        """int64: the pair that starts at each place, negative if there is none."""
        first = self.symbol[places].astype(np.int64)
        second = self.symbol[self.right[places]].astype(np.int64)
        return np.where((first < 0) | (second < 0), _NONE, first * _MAX_SYMBOLS + second)

    def _add_pairs(self, places: np.ndarray) -> None:
        """Count the pairs that start at these places, and queue them."""
        pairs = self._pairs_at(places)
        order = np.argsort(pairs, kind="stable")
        pairs, places = pairs[order], places[order]
        starts = np.flatnonzero(np.diff(pairs, prepend=-2))
        if not len(starts):
            return
        sums = np.add.reduceat(self.weight[places], starts)
        stops = [*starts[1:].tolist(), len(pairs)]
        for pair, start, stop, total in zip(
            pairs[starts].tolist(), starts.tolist(), stops, sums.tolist(), strict=True
        ):
            self.count[pair] = self.count.get(pair, 0) + total
            self.places.setdefault(pair, []).append(places[start:stop].copy())
            heapq.heappush(self.queue, (-self.count[pair], pair))

    def run(self, num_merges: int, min_count: int) -> list[tuple[int, int]]:
        merges: list[tuple[int, int]] = []
        while len(merges) < num_merges and self.queue:
            negative, pair = heapq.heappop(self.queue)
            count = self.count.get(pair, 0)
            if count != -negative:  # it was queued before a merge changed its count
                if count > 0 and pair in self.places:
                    heapq.heappush(self.queue, (-count, pair))
                continue
            if count < min_count:
                break
            merges.append(divmod(pair, _MAX_SYMBOLS))
            self._merge(pair, 255 + len(merges))
        return merges

    def _merge(self, pair: int, new: int) -> None:
        """Replace the pair by the symbol `new` in all words."""
        self.count.pop(pair)
        places = np.sort(np.concatenate(self.places.pop(pair)))
        places = places[self._pairs_at(places) == pair]
        if pair // _MAX_SYMBOLS == pair % _MAX_SYMBOLS:
            places = _without_overlaps(places, self.right[places])
        seconds = self.right[places]
        self._forget(np.unique(np.concatenate([self.left[places], seconds])), pair)
        after = self.right[seconds]
        self.symbol[places], self.symbol[seconds] = new, _NONE
        self.right[places], self.left[after] = after, places
        before = self.left[places]
        changed = np.unique(np.concatenate([before[before >= 0], places]))
        self._add_pairs(changed[self._pairs_at(changed) >= 0])

    def _forget(self, places: np.ndarray, merged: int) -> None:
        """Subtract the pairs that start at these places, which are about to change."""
        places = places[places >= 0]
        pairs = self._pairs_at(places)
        exists = (pairs >= 0) & (pairs != merged)
        unique, inverse = np.unique(pairs[exists], return_inverse=True)
        sums = np.bincount(inverse, weights=self.weight[places[exists]], minlength=len(unique))
        for pair, total in zip(unique.tolist(), sums.tolist(), strict=True):
            self.count[pair] -= round(total)


def _without_overlaps(places: np.ndarray, seconds: np.ndarray) -> np.ndarray:
    """Of the places of a pair of equal symbols, every second one of each run, from its start."""
    if not len(places):
        return places
    continues = np.concatenate([[False], places[1:] == seconds[:-1]])
    numbers = np.arange(len(places))
    start = np.maximum.accumulate(np.where(continues, 0, numbers))
    return places[(numbers - start) % 2 == 0]
