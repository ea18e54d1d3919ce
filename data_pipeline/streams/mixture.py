"""Mixture: several corpora read as one, each by its share, block by block in the one order.

Every corpus is a tape without an end: its blocks in a fixed order, again and again. An epoch of the
mixture takes the next `tokens_per_epoch` of each tape, whatever they are: half a pass, or three:

    corpus a   |-- block 4 --|- block 0 -|---- block 2 ----|-- block 4 --|- block 0 -|-- ...
    epochs     |...... epoch 0 ......|...... epoch 1 ......|...... epoch 2 ......|
    parts         block 4, block 0[:k]   block 0[k:], block 2   block 4, block 0[:k]

The parts of all tapes are the blocks of one `TokenSource`, which `order.py` orders and `lanes.py`
cuts like any other. Tapes are cut at tokens, not at blocks. So every epoch has the same number of
tokens, which lanes need; shares hold to a token, even for a corpus that is one giant document; and
however many epochs are read, no token was read twice more often than another of its corpus.

A part may begin inside a document. Its age counts from there: the tokens before are elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from data_pipeline.errors import ConfigError
from data_pipeline.streams.order import Shuffle, hash_ids

if TYPE_CHECKING:
    from data_pipeline.shards.shard_reader import TokenSource

MAX_PASSES = 1000
"""Times a corpus may be read in one epoch; more is a misprint, and would fill the memory."""


def tokens_per_epoch(tokens: Mapping[str, int], weights: Mapping[str, float]) -> dict[str, int]:
    """Tokens of each corpus in an epoch as long as all corpora together, in shares of the weights.

    Within a token of weight / sum of weights, and exact if the weights are the corpora's `tokens`.
    Raises ConfigError for a corpus that would get nothing, or be read absurdly often.
    """
    total, all_weights = sum(tokens.values()), sum(map(Fraction, weights.values()))
    found, weight_before = {}, Fraction(0)
    for name, num_tokens in tokens.items():
        start = total * weight_before // all_weights
        weight_before += Fraction(weights[name])
        found[name] = int(total * weight_before // all_weights - start)
        if found[name] == 0:
            raise ConfigError(
                f"data.mixture.{name}.weight={weights[name]} is not one token of an epoch of "
                f"{total:,}; raise it, or leave the corpus out"
            )
        if found[name] > MAX_PASSES * num_tokens:
            raise ConfigError(
                f"data.mixture.{name}.weight={weights[name]} would read its {num_tokens:,} tokens "
                f"{found[name] / num_tokens:,.0f} times an epoch, more than {MAX_PASSES:,}; lower "
                "it, or prepare more text for it"
            )
    return found


class Parts(NamedTuple):
    """Runs of neighbouring tokens of a corpus, each inside one block; arrays [num_parts]."""

    block: NDArray[np.int64]
    first: NDArray[np.int64]
    """The first token's place in its block."""
    num_tokens: NDArray[np.int64]
    middle: NDArray[np.float64]
    """Share of the epoch's tokens of the corpus before the part's middle."""


class CorpusTape:
    """One corpus as a tape without an end, of which each epoch takes the next tokens."""

    def __init__(
        self, source: TokenSource, *, tokens_per_epoch: int, shuffle: Shuffle, seed: int,
        key: int = 0, start: int = 0, first_epoch: int = 0,
    ) -> None:  # fmt: skip
        """`start` is where on the tape `first_epoch` begins.

        The tape's order of blocks follows from `seed` and `key`, a number below 2**64 that stays
        with the corpus; under `shuffle: none` it is the corpus order.
        """
        self.source, self.tokens_per_epoch = source, tokens_per_epoch
        self._start, self._first_epoch = start, first_epoch
        num_blocks = len(source.block_tokens)
        self._blocks = np.arange(num_blocks)
        if shuffle == "blocks":
            self._blocks = np.argsort(hash_ids(seed, key, num_ids=num_blocks))
        self._tokens = source.block_tokens[self._blocks]
        self._starts = np.cumsum(self._tokens) - self._tokens

    def parts(self, epoch: int) -> Parts:
        """What an epoch reads of the corpus, in tape order; together `tokens_per_epoch`."""
        num_tokens = int(self._tokens.sum())
        read_before = self._start + (epoch - self._first_epoch) * self.tokens_per_epoch
        start = read_before % num_tokens
        stop = start + self.tokens_per_epoch
        passes = -(-stop // num_tokens)
        starts = np.add.outer(num_tokens * np.arange(passes), self._starts).ravel()
        first = np.maximum(starts, start)
        last = np.minimum(starts + np.tile(self._tokens, passes), stop)
        chosen = first < last
        middle = ((first + last) / 2 - start) / self.tokens_per_epoch
        block = np.tile(self._blocks, passes)
        return Parts(*(each[chosen] for each in (block, first - starts, last - first, middle)))


@dataclass(slots=True, eq=False)
class MixedEpoch:
    """The TokenSource of one epoch: its blocks are the parts of all tapes, evenly interleaved."""

    tapes: Sequence[CorpusTape]
    dtype: np.dtype
    block_tokens: NDArray[np.int64]
    """[num_parts], as all arrays here."""
    corpus: NDArray[np.int64]
    """Which tape a part is of."""
    corpus_block: NDArray[np.int64]
    first: NDArray[np.int64]
    """Where in its corpus's block a part begins."""

    def document_starts(self, block: int) -> NDArray[np.int64]:
        """Of the documents of a part, cut where the part is; rising from 0."""
        source, corpus_block, first = self._place(block)
        starts = source.document_starts(corpus_block)
        low = np.searchsorted(starts, first, side="right") - 1
        high = np.searchsorted(starts, first + self.block_tokens[block], side="left")
        return np.maximum(starts[low:high] - first, 0)

    def read(self, block: int, start: int, stop: int) -> np.ndarray:
        """Tokens [start, stop) of a part. Raises what the corpus's source raises."""
        if not 0 <= start <= stop <= self.block_tokens[block]:
            raise IndexError(f"[{start}, {stop}) leaves part {block} of {self.block_tokens[block]}")
        source, corpus_block, first = self._place(block)
        return source.read(corpus_block, first + start, first + stop)

    def _place(self, block: int) -> tuple[TokenSource, int, int]:
        source = self.tapes[int(self.corpus[block])].source
        return source, int(self.corpus_block[block]), int(self.first[block])


class MixedSource:
    """Several corpora of the same tokens, as one TokenSource for every epoch."""

    def __init__(self, tapes: Sequence[CorpusTape]) -> None:
        dtypes = {tape.source.dtype for tape in tapes}
        if len(dtypes) != 1:
            raise ValueError(f"corpora of one mixture have one dtype, not {dtypes or 'none'}")
        self.tapes, (self.dtype,) = tapes, dtypes

    def epoch(self, epoch: int) -> MixedEpoch:
        """The source of one epoch; costs one sort of its parts."""
        parts = [tape.parts(epoch) for tape in self.tapes]
        corpus = np.repeat(np.arange(len(parts)), [len(part.block) for part in parts])
        block, first, num_tokens, middle = map(np.concatenate, zip(*parts, strict=True))
        evenly = np.argsort(middle, kind="stable")
        return MixedEpoch(
            self.tapes, self.dtype, num_tokens[evenly], corpus[evenly], block[evenly], first[evenly]
        )


def source_of_epoch(source: TokenSource | MixedSource, epoch: int) -> TokenSource:
    """What an epoch reads: the same blocks in every epoch, or the mixture's parts for this one."""
    return source.epoch(epoch) if isinstance(source, MixedSource) else source
