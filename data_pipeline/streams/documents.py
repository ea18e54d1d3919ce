"""Which documents a lane reads at given positions: for messages about the data of a step.

Reads indexes only, no tokens. `segments.py` reads the tokens of the same positions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from data_pipeline.streams.lanes import LanePlan
from data_pipeline.streams.mixture import MixedEpoch, MixedSource, source_of_epoch
from data_pipeline.streams.order import EpochOrder, Shuffle

if TYPE_CHECKING:
    from data_pipeline.shards.shard_reader import TokenSource


class LaneDocument(NamedTuple):
    """A document with tokens in a range of lane positions."""

    lane: int
    epoch: int
    corpus: int
    """The document's corpus, as its place in the mixture; 0 without a mixture."""
    id: str
    position: int
    """First lane position of the range at which a token of the document is."""
    num_tokens: int
    """Tokens of the document in the range."""


def documents_of_lanes(
    source: TokenSource | MixedSource,
    plan: LanePlan,
    *,
    lanes: Sequence[int],
    start: int,
    stop: int,
    shuffle: Shuffle,
    seed: int,
) -> list[LaneDocument]:
    """The documents of lane positions [start, stop) of these lanes, by position, then by lane."""
    documents = []
    position = start
    for part in plan.epoch_ranges(start, stop):
        tokens = source_of_epoch(source, part.epoch)
        order = EpochOrder.of(tokens.block_tokens, seed=seed, epoch=part.epoch, shuffle=shuffle)
        for lane in lanes:
            first_position = position
            for _, first, last, _ in plan.token_ranges(lane, part):
                documents += [
                    LaneDocument(
                        lane, part.epoch, corpus, id_, first_position + begin - first, end - begin
                    )
                    for corpus, id_, begin, end in _documents(tokens, order, first, last)
                ]
                first_position += last - first
        position += part.stop - part.start
    return documents


def _documents(
    source: TokenSource, order: EpochOrder, start: int, stop: int
) -> Iterator[tuple[int, str, int, int]]:
    """(corpus, id, first token, end) of each document in tokens [start, stop) of the order."""
    while start < stop:
        block, block_start = order.locate(start)
        num_tokens = int(source.block_tokens[block])
        starts = source.document_starts(block)
        documents = order.document_order(block, len(starts))
        if documents is None:
            documents = np.arange(len(starts))
        ids = source.document_ids(block)
        corpus = int(source.corpus[block]) if isinstance(source, MixedEpoch) else 0
        ends = block_start + np.cumsum(np.diff([*starts, num_tokens])[documents])
        block_stop = min(stop, block_start + num_tokens)
        for place in range(int(np.searchsorted(ends, start, side="right")), len(documents)):
            end = min(int(ends[place]), block_stop)
            yield corpus, ids[documents[place]], start, end
            start = end
            if start == block_stop:
                break
