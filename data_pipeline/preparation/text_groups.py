"""Read the documents of a batch again, many short ones at a time.

Opening a file, checking a hash and calling a tokenizer take several microseconds each, more than
encoding a sentence. So consecutive short documents form a group: their files stay open between two
documents, adjacent documents are one read, and their hashes are compared together.
"""

import contextlib
import hashlib
import itertools
import os
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from data_pipeline.preparation.document_batch import DocumentBatch
from data_pipeline.preparation.input_index import TEXT_HASH_BYTES
from data_pipeline.readers import text_of_stored
from data_pipeline.tokenizers.interface import MAX_PART_CHARS

GROUP_BYTES = 2**20
"""Maximum stored bytes of a group."""
MAX_SHORT_BYTES = MAX_PART_CHARS
"""A longer document is not part of a group: its text may have to be cut into parts."""
_MAX_OPEN_FILES = 32


@dataclass(frozen=True, slots=True, eq=False)
class TextGroup:
    """Consecutive documents of a batch, the first of them with number `first`."""

    first: int
    texts: list[str] | None
    """None: one long document. Use `DocumentBatch.read_text`."""


def read_groups(batch: DocumentBatch, staging: Path) -> Iterator[TextGroup]:
    """All documents of a batch in order. Raises as `DocumentBatch.read_text` does."""
    sizes = np.maximum(batch.location[:, 1], batch.text_bytes).astype(np.int64)
    ends, is_long = np.cumsum(sizes), sizes > MAX_SHORT_BYTES
    next_long = [*np.flatnonzero(is_long).tolist(), len(batch)]
    first = position = 0
    with _OpenFiles() as files:
        while first < len(batch):
            if is_long[first]:
                yield TextGroup(first, None)
                first, position = first + 1, position + 1
                continue
            limit = int(ends[first] - sizes[first]) + GROUP_BYTES
            stop = min(int(np.searchsorted(ends, limit, side="right")), next_long[position])
            yield TextGroup(first, _read_group(batch, first, stop, staging, files))
            first = stop


def _read_group(
    batch: DocumentBatch, first: int, stop: int, staging: Path, files: "_OpenFiles"
) -> list[str]:
    texts: list[str] = []
    digests: list[bytes] = []
    for start, end in _runs(batch, first, stop):
        source = batch.source_of(start, staging)
        with source.explain_errors():
            descriptor = files.open(source.file.path)
            if source.file.holds_plain_texts:
                raws = _read_run(descriptor, batch.location[start:end])
                texts += [raw.decode("utf-8") for raw in raws]
            else:
                raws = []
                for place in batch.location[start:end].tolist():
                    stored = os.pread(descriptor, place[1], place[0])
                    texts.append(text_of_stored(source.file, stored, batch.text_key))
                    raws.append(texts[-1].encode("utf-8"))
        digests += [hashlib.sha256(raw).digest()[:TEXT_HASH_BYTES] for raw in raws]
    if b"".join(digests) != batch.text_hash[first:stop].tobytes():
        # The last check, and the only one for a change that kept size and modification time.
        numbers = enumerate(digests, first)
        changed = next(n for n, digest in numbers if digest != batch.text_hash[n].tobytes())
        raise batch.source_of(changed, staging).changed
    return texts


def _runs(batch: DocumentBatch, first: int, stop: int) -> Iterator[tuple[int, int]]:
    """The documents [first, stop) as runs of documents that are read from the same file."""
    file, unit = batch.file[first:stop], batch.spill_unit[first:stop]
    differs = (file[1:] != file[:-1]) | (unit[1:] != unit[:-1])
    bounds = [first, *(np.flatnonzero(differs) + first + 1).tolist(), stop]
    return itertools.pairwise(bounds)


def _read_run(descriptor: int, location: np.ndarray) -> list[bytes]:
    """The stored bytes of documents of one file. `location` is uint64 [N, 3]."""
    starts, sizes = location[:, 0], location[:, 1]
    places = location[:, :2].tolist()
    start, stop = places[0][0], sum(places[-1])
    in_order = bool((starts[1:] >= starts[:-1] + sizes[:-1]).all())  # False if shuffled
    if len(places) == 1 or not in_order or stop - start > 2 * GROUP_BYTES:
        return [os.pread(descriptor, size, offset) for offset, size in places]
    raw = os.pread(descriptor, stop - start, start)
    return [raw[offset - start : offset - start + size] for offset, size in places]


class _OpenFiles:
    """Descriptors of the files that were read last."""

    def __init__(self) -> None:
        self._descriptors: OrderedDict[str, int] = OrderedDict()

    def __enter__(self) -> "_OpenFiles":
        return self

    def __exit__(self, *_: object) -> None:
        for descriptor in self._descriptors.values():
            with contextlib.suppress(OSError):
                os.close(descriptor)

    def open(self, path: str) -> int:
        """A descriptor of `path`. It stays open until many others were opened."""
        descriptor = self._descriptors.pop(path, None)
        if descriptor is None:
            # O_NONBLOCK: opening a FIFO would otherwise wait for a writer.
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        self._descriptors[path] = descriptor
        if len(self._descriptors) > _MAX_OPEN_FILES:
            os.close(self._descriptors.popitem(last=False)[1])
        return descriptor
