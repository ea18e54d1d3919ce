"""Shard assignment: which documents go into which shard of which split, and in which order.

One process decides this for the whole input, from arrays without text. The result depends on input
and settings only, so any number of workers can then write the shards independently.
"""

from collections.abc import Callable

import numpy as np

from data_pipeline.preparation.deduplicate import first_of_each_text
from data_pipeline.preparation.input_index import InputIndex
from data_pipeline.preparation.splits import hash64, split_of_documents
from data_pipeline.shards.prepare_settings import PrepareSettings


def assign_shards(
    index: InputIndex, settings: PrepareSettings, note: Callable[[str], None]
) -> dict[str, list[np.ndarray]]:
    """Split -> its shards; a shard is the numbers of its documents, in their final order."""
    numbers = first_of_each_text(index) if settings.dedup == "exact" else np.arange(len(index))
    orders = _order_splits(index, numbers, settings, note)
    return {
        name: _cut_into_shards(order, index.text_bytes[order], settings.shard_bytes)
        for name, order in orders.items()
    }


def _order_splits(
    index: InputIndex, numbers: np.ndarray, settings: PrepareSettings, note: Callable[[str], None]
) -> dict[str, np.ndarray]:
    """Split -> the numbers of its documents in their final order. `numbers` are the candidates."""
    names, split_of = split_of_documents(index, numbers, settings, note)
    order = numbers
    if settings.shuffle is not None:
        # Keys of document numbers, not of ranks among `numbers`: deduplication keeps the order.
        seed = settings.shuffle.to_bytes(8, "little")
        keys = (hash64(b"txl-shuffle", seed + int(n).to_bytes(8, "little")) for n in numbers)
        shuffled = np.argsort(np.fromiter(keys, np.uint64, len(numbers)), kind="stable")
        order, split_of = numbers[shuffled], split_of[shuffled]
    return {name: order[split_of == number] for number, name in enumerate(names)}


def _cut_into_shards(
    order: np.ndarray, text_bytes: np.ndarray, shard_bytes: int
) -> list[np.ndarray]:
    """Greedy: consecutive documents with at most `shard_bytes` of text, or one larger document."""
    ends = np.cumsum(text_bytes)
    shards, first = [], 0
    while first < len(order):
        before = int(ends[first]) - int(text_bytes[first])
        # A uint64 limit: with a Python int, NumPy compares `ends` as float64, exact below 2**53.
        limit = np.uint64(before + shard_bytes)
        stop = max(int(np.searchsorted(ends, limit, side="right")), first + 1)
        shards.append(order[first:stop])
        first = stop
    return shards
