"""Shard assignment: which documents go into which shard of which split, and in which order.

One process decides this for the whole input, from arrays without text. The result depends on input
and settings only, so any number of workers can then write the shards independently.

Splits and shuffles use a fixed 64-bit hash (BLAKE2b) instead of a library's random generator,
because a generator's stream may change between versions of the library.
"""

import hashlib
import itertools

import numpy as np

from data_pipeline.errors import DataError
from data_pipeline.preparation.deduplicate import first_of_each_text
from data_pipeline.preparation.input_index import InputIndex
from data_pipeline.shards.prepare_settings import PrepareSettings


def assign_shards(index: InputIndex, settings: PrepareSettings) -> dict[str, list[np.ndarray]]:
    """Split -> its shards; a shard is the numbers of its documents, in their final order."""
    numbers = first_of_each_text(index) if settings.dedup == "exact" else np.arange(len(index))
    orders = _order_splits(index, numbers, settings)
    return {
        name: _cut_into_shards(order, index.text_bytes[order], settings.shard_bytes)
        for name, order in orders.items()
    }


def _order_splits(
    index: InputIndex, numbers: np.ndarray, settings: PrepareSettings
) -> dict[str, np.ndarray]:
    """Split -> the numbers of its documents in their final order. `numbers` are the candidates.

    The split of a document depends on its id alone, so it does not change when documents are added
    to the input. An empty split takes the document with the smallest hash from the largest split.
    """
    held_out = sorted(settings.split)  # sorted: the order of the options has no effect
    names = ["train", *held_out]
    if len(numbers) < len(names):
        raise DataError(
            f"{len(numbers)} documents cannot fill {len(names)} splits ({', '.join(names)}). Give "
            "more documents, or fewer splits with --split."
        )
    split_of = np.zeros(len(numbers), np.int8)
    if held_out:
        ids = (id_.encode() for id_ in index.document_ids())
        hashes = np.fromiter((_hash64(b"txl-split", id_) for id_ in ids), np.uint64, len(index))
        split_of = _choose_splits(hashes[numbers], [settings.split[name] for name in held_out])
    order = numbers
    if settings.shuffle is not None:
        # Keys of document numbers, not of ranks among `numbers`: deduplication keeps the order.
        seed = settings.shuffle.to_bytes(8, "little")
        keys = (_hash64(b"txl-shuffle", seed + int(n).to_bytes(8, "little")) for n in numbers)
        shuffled = np.argsort(np.fromiter(keys, np.uint64, len(numbers)), kind="stable")
        order, split_of = numbers[shuffled], split_of[shuffled]
    return {name: order[split_of == number] for number, name in enumerate(names)}


def _choose_splits(hashes: np.ndarray, fractions: list[float]) -> np.ndarray:
    """int [D]: 0 for train, i for the split of the i-th fraction."""
    bounds = np.array(list(itertools.accumulate(int(f * 2**64) for f in fractions)), np.uint64)
    num_splits = len(fractions) + 1
    split_of = (np.searchsorted(bounds, hashes, side="right") + 1) % num_splits
    for split in range(num_splits):
        sizes = np.bincount(split_of, minlength=num_splits)
        if not sizes[split]:
            donors = np.flatnonzero(split_of == sizes.argmax())
            split_of[donors[hashes[donors].argmin()]] = split
    return split_of


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


def _hash64(purpose: bytes, content: bytes) -> int:
    digest = hashlib.blake2b(content, digest_size=8, person=purpose).digest()
    return int.from_bytes(digest, "little")
