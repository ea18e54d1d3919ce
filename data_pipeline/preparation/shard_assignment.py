"""Assignment: which documents go into which shard of which split, in which order.

Decided from the whole input at once, but from arrays alone. The outcome depends on input and
settings only, so any number of workers can then write the shards, each by itself.

Splits and shuffle come from a fixed 64-bit hash, not from a library's generator whose stream may
change: the same input and settings give the same bytes, always.
"""

import hashlib
import itertools

import numpy as np

from data_pipeline.errors import DataError
from data_pipeline.preparation.input_index import InputIndex, first_of_each_text
from data_pipeline.preparation.settings import PrepareSettings


def assign(index: InputIndex, settings: PrepareSettings) -> dict[str, list[np.ndarray]]:
    """Per split, its shards: the numbers of each one's documents, in order."""
    kept = first_of_each_text(index) if settings.dedup == "exact" else np.arange(len(index))
    orders = _orders(index, kept, settings)
    return {
        name: _cut(order, index.text_bytes[order], settings.shard_bytes)
        for name, order in orders.items()
    }


def _orders(
    index: InputIndex, kept: np.ndarray, settings: PrepareSettings
) -> dict[str, np.ndarray]:
    """Per split, the numbers of its documents in their final order.

    A document's split depends on its id alone, so it stays where it is when the input grows. A
    split that would be empty takes the document with the smallest hash from the largest one.
    """
    held_out = sorted(settings.split)  # by name: the order they were given in decides nothing
    names = ["train", *held_out]
    if len(kept) < len(names):
        raise DataError(
            f"{len(kept)} documents cannot fill {len(names)} splits ({', '.join(names)}). Give "
            "more documents, or ask for fewer splits with --split."
        )
    part = np.zeros(len(kept), np.int8)
    if held_out:
        ids = (id_.encode() for id_ in index.document_ids())
        hashes = np.fromiter((_hash64(b"txl-split", id_) for id_ in ids), np.uint64, len(index))
        part = _parts(hashes[kept], [settings.split[name] for name in held_out])
    order = kept
    if settings.shuffle is not None:
        seed = settings.shuffle.to_bytes(8, "little")
        keys = (_hash64(b"txl-shuffle", seed + int(n).to_bytes(8, "little")) for n in kept)
        shuffled = np.argsort(np.fromiter(keys, np.uint64, len(kept)), kind="stable")
        order, part = kept[shuffled], part[shuffled]
    return {name: order[part == number] for number, name in enumerate(names)}


def _parts(hashes: np.ndarray, fractions: list[float]) -> np.ndarray:
    """int [D]: 0 for train, i for the i-th fraction's split."""
    bounds = np.array(list(itertools.accumulate(int(f * 2**64) for f in fractions)), np.uint64)
    num_parts = len(fractions) + 1
    part = (np.searchsorted(bounds, hashes, side="right") + 1) % num_parts
    for empty in range(num_parts):
        sizes = np.bincount(part, minlength=num_parts)
        if not sizes[empty]:
            donors = np.flatnonzero(part == sizes.argmax())
            part[donors[hashes[donors].argmin()]] = empty
    return part


def _cut(order: np.ndarray, text_bytes: np.ndarray, shard_bytes: int) -> list[np.ndarray]:
    """Consecutive runs of documents of at most `shard_bytes` of text, or of one larger document."""
    ends = np.cumsum(text_bytes)
    shards, first = [], 0
    while first < len(order):
        before = int(ends[first]) - int(text_bytes[first])
        limit = np.uint64(before + shard_bytes)  # a Python int would have all `ends` made floats
        stop = int(np.searchsorted(ends, limit, side="right"))
        stop = max(stop, first + 1)
        shards.append(order[first:stop])
        first = stop
    return shards


def _hash64(purpose: bytes, content: bytes) -> int:
    digest = hashlib.blake2b(content, digest_size=8, person=purpose).digest()
    return int.from_bytes(digest, "little")
