"""Mixture: several corpora read as one, in shares given by their weights.

Every corpus is read cyclically: its blocks in one fixed order, repeated without end. An epoch of
the mixture takes the next `tokens_per_epoch` tokens of each corpus, be that half a pass or three:

    corpus a   |-- block 4 --|- block 0 -|---- block 2 ----|-- block 4 --|- block 0 -|-- ...
    epochs     |...... epoch 0 ......|...... epoch 1 ......|...... epoch 2 ......|
    parts         block 4, block 0[:k]   block 0[k:], block 2   block 4, block 0[:k]

The parts of all corpora are the blocks of one `TokenSource`. `order.py` shuffles them and
`lanes.py` cuts lanes from them as for a single corpus. A corpus is cut at tokens, not at block
ends, so that

- every epoch has the same number of tokens, which lanes require;
- the shares are exact to one token, even for a corpus that is one giant document;
- after any number of epochs, the read counts of any two tokens of a corpus differ by at most one.

A part may begin inside a document. The age of its tokens counts from the start of the part, because
the tokens before it are elsewhere in the epoch. Decision 9 has the alternatives.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from data_pipeline.errors import ConfigError
from data_pipeline.shards.shard_reader import TokenSource
from data_pipeline.streams.order import Ordering

MAX_PASSES = 1000
"""Most passes over a corpus per epoch. More is probably a typing error, and every pass costs 32
bytes of RAM per block."""


def tokens_per_epoch(tokens: Mapping[str, int], weights: Mapping[str, float]) -> dict[str, int]:
    """Tokens per epoch of each corpus: total * weight / sum(weights), rounded to a token.

    The total is the number of `tokens` of all corpora, so weights equal to `tokens` give every
    corpus exactly one pass. Raises ConfigError for a corpus with no token or too many passes.
    """
    total, sum_weights = sum(tokens.values()), sum(map(Fraction, weights.values()))
    shares, weight_before = {}, Fraction(0)
    for name, num_tokens in tokens.items():
        # Differences of rounded running sums, as fractions: they add up to the total exactly.
        start = total * weight_before // sum_weights
        weight_before += Fraction(weights[name])
        share = shares[name] = int(total * weight_before // sum_weights - start)
        if share == 0:
            raise ConfigError(
                f"data.mixture.{name}.weight={weights[name]} is not one token of an epoch of "
                f"{total:,}; raise it, or remove the corpus"
            )
        if share > MAX_PASSES * num_tokens:
            raise ConfigError(
                f"data.mixture.{name}.weight={weights[name]} would read its {num_tokens:,} tokens "
                f"{share / num_tokens:,.0f} times per epoch, more than {MAX_PASSES:,}; lower it, "
                "or prepare more text for it"
            )
    return shares


class Parts(NamedTuple):
    """Ranges of tokens of a corpus, each inside one block; arrays [num_parts]."""

    block: NDArray[np.int64]
    first: NDArray[np.int64]
    """First token of the part, relative to its block's start."""
    num_tokens: NDArray[np.int64]
    middle: NDArray[np.float64]
    """Position of the part's middle in the corpus's share of the epoch, in [0, 1]."""


class CyclicCorpus:
    """One corpus, read cyclically: each epoch takes the next `tokens_per_epoch` tokens."""

    def __init__(
        self, source: TokenSource, *, tokens_per_epoch: int, ordering: Ordering, seed: int,
        key: int = 0, start: int = 0, first_epoch: int = 0,
    ) -> None:  # fmt: skip
        """`start` is the token of the cyclic order at which `first_epoch` begins.

        If the ordering permutes blocks, their order follows from `seed` and `key`, a number below
        2**64 that identifies the corpus; otherwise it is the corpus order.
        """
        self.source, self.tokens_per_epoch = source, tokens_per_epoch
        self._start, self._first_epoch = start, first_epoch
        self._blocks = ordering.order_of_blocks(seed, key, num_blocks=len(source.block_tokens))
        self._tokens = source.block_tokens[self._blocks]
        self._starts = np.cumsum(self._tokens) - self._tokens

    def parts(self, epoch: int) -> Parts:
        """The parts that an epoch reads, in cyclic order; together `tokens_per_epoch` tokens."""
        num_tokens = int(self._tokens.sum())
        # The only state is the epoch's number: nothing to save, and no random generator.
        read_before = self._start + (epoch - self._first_epoch) * self.tokens_per_epoch
        start = read_before % num_tokens
        stop = start + self.tokens_per_epoch
        passes = -(-stop // num_tokens)
        starts = np.add.outer(num_tokens * np.arange(passes), self._starts).ravel()
        first = np.maximum(starts, start)
        last = np.minimum(starts + np.tile(self._tokens, passes), stop)
        chosen = first < last
        middle = ((first + last) / 2 - start) / self.tokens_per_epoch
        columns = (np.tile(self._blocks, passes), first - starts, last - first, middle)
        return Parts(*(column[chosen] for column in columns))


@dataclass(slots=True, eq=False)
class MixedEpoch:
    """The TokenSource of one epoch. Its blocks are the parts of all corpora, interleaved evenly."""

    corpora: Sequence[CyclicCorpus]
    dtype: np.dtype
    block_tokens: NDArray[np.int64]
    """[num_parts] tokens of every part; the arrays below have the same shape."""
    corpus: NDArray[np.int64]
    """The part's corpus, as its place in `corpora`."""
    corpus_block: NDArray[np.int64]
    """The part's block in its corpus."""
    first: NDArray[np.int64]
    """The part's first token, relative to that block's start."""

    def document_starts(self, block: int) -> NDArray[np.int64]:
        """First tokens of the documents of a part; one cut by the part's beginning starts at 0."""
        source, corpus_block, first = self._locate(block)
        starts = source.document_starts(corpus_block)
        # From the document that contains the part's first token to the last that starts in it.
        low = int(np.searchsorted(starts, first, side="right")) - 1
        high = int(np.searchsorted(starts, first + self.block_tokens[block], side="left"))
        return np.maximum(starts[low:high] - first, 0)

    def read(self, block: int, start: int, stop: int) -> np.ndarray:
        """Tokens [start, stop) of a part. Raises the errors of the corpus's source."""
        if not 0 <= start <= stop <= self.block_tokens[block]:
            raise IndexError(
                f"[{start}, {stop}) is not in part {block} of {self.block_tokens[block]}"
            )
        source, corpus_block, first = self._locate(block)
        return source.read(corpus_block, first + start, first + stop)

    def _locate(self, block: int) -> tuple[TokenSource, int, int]:
        source = self.corpora[int(self.corpus[block])].source
        return source, int(self.corpus_block[block]), int(self.first[block])


class MixedSource:
    """Several corpora with the same dtype, as one TokenSource per epoch."""

    def __init__(self, corpora: Sequence[CyclicCorpus]) -> None:
        dtypes = {corpus.source.dtype for corpus in corpora}
        if len(dtypes) != 1:
            raise ValueError(f"corpora of one mixture must have one dtype, got {dtypes or 'none'}")
        self.corpora, (self.dtype,) = corpora, dtypes

    def epoch(self, epoch: int) -> MixedEpoch:
        """The source of one epoch. Costs one sort of its parts."""
        parts = [corpus.parts(epoch) for corpus in self.corpora]
        corpus = np.repeat(np.arange(len(parts)), [len(part.block) for part in parts])
        block, first, num_tokens, middle = map(np.concatenate, zip(*parts, strict=True))
        # Sorting by the relative position of the middles interleaves the corpora evenly, also when
        # `order.py` does not shuffle.
        order = np.argsort(middle, kind="stable")
        return MixedEpoch(
            self.corpora, self.dtype, num_tokens[order], corpus[order], block[order], first[order]
        )


def source_of_epoch(source: TokenSource | MixedSource, epoch: int) -> TokenSource:
    """The blocks that an epoch reads: those of the corpus, or the mixture's parts for `epoch`."""
    return source.epoch(epoch) if isinstance(source, MixedSource) else source
