"""Where the loss of a split comes from: sums by position, by token frequency and by document.

A `BreakdownCounter` adds the segments of one batch of chunks on a worker. The LossBreakdowns of all
batches are added in their order, as the LossSums are, so the result does not depend on the workers.
Every scored target is in exactly one bucket of each table, and in exactly one document.

document_position: tokens from the start of the target's document to the target. The first token of
    a document, at 0, is an end-of-document token in datasets that have them.
segment_position: the position in the segment of the query that predicts the target.
token_frequency: how often the target's id occurs in the split that `counted_split` names:
    `train`, or the scored split in a dataset without it. Workers count it.
"""

import math
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.typing import NDArray

from data_pipeline.shards.manifest import ShardManifest, load_manifest
from data_pipeline.shards.shard_reader import SplitReader, open_split
from data_pipeline.streams.cursor import read_range
from data_pipeline.system.progress import Progress
from data_pipeline.system.remote_path import DatasetPath
from data_pipeline.system.workers import Workers
from txl_dist.evaluation import bootstrap
from txl_dist.evaluation.scores import SCORES

if TYPE_CHECKING:
    from torch import Tensor

# Shapes: B chunks per batch, T segment tokens, V vocabulary, K buckets, D documents, N targets

TABLES = ("document_position", "segment_position", "token_frequency")
NUM_LOG_BUCKETS = 64
"""Buckets 0, 1, 2-3, 4-7, ...: bucket k holds the values of k bits."""
MAX_PARTS = 256
"""Segments whose sums are kept before they are added up."""


def log_bucket(value: NDArray[Any]) -> NDArray[np.int64]:
    """The number of bits of each value: 0 -> 0, 1 -> 1, 2 and 3 -> 2. No value is negative."""
    return np.frexp(value.astype(np.float64))[1].astype(np.int64)


def log_bucket_bounds(bucket: int) -> tuple[int, int]:
    """The smallest and largest value of a bucket."""
    return (0, 0) if bucket == 0 else (2 ** (bucket - 1), 2**bucket - 1)


@dataclass(frozen=True, slots=True, eq=False)
class LossTable:
    """Nats and number of targets by bucket."""

    nats_K: NDArray[np.float64]
    tokens_K: NDArray[np.int64]

    @classmethod
    def of(cls, bucket_N: NDArray[Any], nats_N: NDArray[np.float64], num_buckets: int) -> Self:
        return cls(_sums(bucket_N, nats_N, num_buckets), _counts(bucket_N, None, num_buckets))

    def __add__(self, other: "LossTable") -> "LossTable":
        return LossTable(self.nats_K + other.nats_K, self.tokens_K + other.tokens_K)


@dataclass(frozen=True, slots=True, eq=False)
class DocumentSums:
    """Sums by document, in the order of the split."""

    start_D: NDArray[np.int64]
    """Position of the document's first token in the split: its identity."""
    nats_D: NDArray[np.float64]
    tokens_D: NDArray[np.int64]
    bytes_D: NDArray[np.int64]

    @property
    def columns(self) -> tuple[NDArray[Any], ...]:
        return self.start_D, self.nats_D, self.tokens_D, self.bytes_D

    def rows(self) -> list[tuple[int, float, int, int]]:
        """Start, nats, tokens and bytes of each document."""
        return list(zip(*(column.tolist() for column in self.columns), strict=True))

    @classmethod
    def total(cls, parts: Sequence["DocumentSums"]) -> Self:
        """Add the parts of documents that are in several of `parts`, in the order of `parts`."""
        start_D, document = np.unique(
            np.concatenate([part.start_D for part in parts]), return_inverse=True
        )
        size = len(start_D)
        return cls(
            start_D,
            _sums(document, np.concatenate([part.nats_D for part in parts]), size),
            _counts(document, np.concatenate([part.tokens_D for part in parts]), size),
            _counts(document, np.concatenate([part.bytes_D for part in parts]), size),
        )


@dataclass(frozen=True, slots=True, eq=False)
class LossBreakdown:
    """The sums of some chunks."""

    tables: Mapping[str, LossTable]
    """By name in TABLES; none if only the documents are wanted. Buckets of `segment_position`: one
    per position; of the others: by `log_bucket` of the position or of the number of occurrences."""
    documents: DocumentSums

    @classmethod
    def total(cls, parts: Sequence["LossBreakdown"]) -> Self:
        """The sum of `parts`, of which there is at least one, added in their order."""
        tables = dict(parts[0].tables)
        for part in parts[1:]:
            tables = {name: table + part.tables[name] for name, table in tables.items()}
        return cls(tables, DocumentSums.total([part.documents for part in parts]))

    def to_json(self) -> dict[str, Any]:
        """Every digit of the sums, for `from_json`."""
        return {
            "tables": {
                name: [table.nats_K.tolist(), table.tokens_K.tolist()]
                for name, table in self.tables.items()
            },
            "documents": [column.tolist() for column in self.documents.columns],
        }

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> Self:
        """Raises KeyError, TypeError or ValueError for content that `to_json` does not write."""
        tables = {
            name: LossTable(np.array(nats, np.float64), np.array(tokens, np.int64))
            for name, (nats, tokens) in content["tables"].items()
        }
        start, nats, tokens, num_bytes = content["documents"]
        documents = DocumentSums(
            np.array(start, np.int64),
            np.array(nats, np.float64),
            np.array(tokens, np.int64),
            np.array(num_bytes, np.int64),
        )
        return cls(tables, documents)


class BreakdownCounter:
    """Adds the segments of one batch of chunks."""

    def __init__(
        self, *, tgt_len: int, frequency_bucket_V: NDArray[np.uint8] | None, byte_counts_V: "Tensor"
    ) -> None:
        """`frequency_bucket_V`: None leaves out all tables."""
        self._frequency_bucket_V, self._bytes_V = frequency_bucket_V, byte_counts_V.numpy()
        self._num_buckets = (NUM_LOG_BUCKETS, tgt_len, NUM_LOG_BUCKETS)
        self._parts: list[LossBreakdown] = []

    def add(
        self,
        nats_BT: "Tensor",
        target_BT: "Tensor",
        position_BT: "Tensor",
        document_age_BT: "Tensor",
    ) -> None:
        """Add the targets that are not negative.

        `position_BT`: of the target in the split. `document_age_BT`: its position in its document.
        """
        index = tuple(axis.numpy() for axis in (target_BT >= 0).nonzero(as_tuple=True))
        columns = nats_BT.detach().double(), target_BT, position_BT, document_age_BT
        nats_N, target_N, position_N, age_N = (column.numpy()[index] for column in columns)
        tables = {}
        if self._frequency_bucket_V is not None:
            buckets = (log_bucket(age_N), index[1], self._frequency_bucket_V[target_N])
            tables = {
                name: LossTable.of(bucket_N, nats_N, size)
                for name, bucket_N, size in zip(TABLES, buckets, self._num_buckets, strict=True)
            }
        targets = DocumentSums(
            position_N - age_N, nats_N, np.ones_like(target_N), self._bytes_V[target_N]
        )
        self._parts.append(LossBreakdown(tables, DocumentSums.total([targets])))
        if len(self._parts) > MAX_PARTS:
            self._parts = [self.breakdown()]

    def breakdown(self) -> LossBreakdown:
        """The sums of all segments so far, of which there is at least one."""
        return LossBreakdown.total(self._parts)


def _sums(bucket_N: NDArray[Any], value_N: NDArray[Any], num_buckets: int) -> NDArray[np.float64]:
    """The sum of the values of each bucket, in float64 and in the order of the values."""
    return np.bincount(bucket_N, value_N, minlength=num_buckets).astype(np.float64, copy=False)


def _counts(
    bucket_N: NDArray[Any], count_N: NDArray[Any] | None, num_buckets: int
) -> NDArray[np.int64]:
    """The sum of the counts of each bucket; None: every count is 1. Exact below 2**53."""
    return np.bincount(bucket_N, count_N, minlength=num_buckets).astype(np.int64)


def score_intervals(
    documents: DocumentSums, known: Container[str] = ("tokens", "bytes")
) -> dict[str, tuple[float, float] | None] | None:
    """By name of each score of tokens or bytes: its interval, from resampled documents.

    None for fewer documents than a resample needs, and for a score whose sum is not in `known` or
    is 0 in a resample.
    """
    num_documents = len(documents.start_D)
    if num_documents < bootstrap.MIN_DOCUMENTS:
        return None
    names = ("nats", "tokens", "bytes")
    table_D3 = np.stack([documents.nats_D, documents.tokens_D, documents.bytes_D], axis=1)
    resampled = []
    for drawn in bootstrap.Resampling("document", num_documents).draws():
        sums_3 = np.bincount(drawn, minlength=num_documents) @ table_D3
        resampled.append(dict(zip(names, sums_3.tolist(), strict=True)))
    intervals: dict[str, tuple[float, float] | None] = {}
    for name, score in SCORES.items():
        if score.needs in names:
            is_known = score.needs in known and all(sums[score.needs] for sums in resampled)
            values = [score.finish(sums) for sums in resampled] if is_known else []
            intervals[name] = bootstrap.interval(values) if values else None
    return intervals


def in_range(value: float | None) -> float | None:
    """None for infinity, which JSON does not have."""
    return value if value is not None and math.isfinite(value) else None


@dataclass(frozen=True, eq=False)
class ScoreDetails:
    """What `txl eval --details` adds: the loss by position, token frequency and document."""

    breakdown: LossBreakdown
    counted_split: str
    """The split whose token frequencies are used."""

    @property
    def documents(self) -> DocumentSums:
        return self.breakdown.documents

    def to_json(self, known: Container[str] = ("tokens", "bytes")) -> dict[str, Any]:
        """The value of `details` in the JSON of a result. `known`: sums that the score has."""
        intervals = score_intervals(self.documents, known)
        num_documents = len(self.documents.start_D)
        return {
            "interval": intervals
            and {
                "level": bootstrap.LEVEL,
                "num_resamples": bootstrap.NUM_RESAMPLES,
                "seed": bootstrap.SEED,
                "num_documents": num_documents,
                **{name: ends and [*map(in_range, ends)] for name, ends in intervals.items()},
            },
            "num_documents": num_documents,
            "token_frequency_counted_on": self.counted_split,
            **{
                f"by_{name}": list(_rows(table, is_log=name != "segment_position"))
                for name, table in self.breakdown.tables.items()
            },
        }


def _rows(table: LossTable, *, is_log: bool) -> Iterator[dict[str, Any]]:
    """The buckets that have targets, in rising order: values from `from` to `to`, both included."""
    columns = table.tokens_K.tolist(), table.nats_K.tolist()
    for bucket, (tokens, nats) in enumerate(zip(*columns, strict=True)):
        low, high = log_bucket_bounds(bucket) if is_log else (bucket, bucket)
        if tokens:
            sums = {"tokens": tokens, "nats": nats, "nats_per_token": nats / tokens}
            yield {"from": low, "to": high, **sums}


TASK_TOKENS = 1 << 22
COUNTED_TOKENS = 1 << 18


@dataclass(frozen=True, slots=True)
class CountingTask:
    """Tokens [start, stop) of a split."""

    data: DatasetPath
    split: str
    start: int
    stop: int

    def __str__(self) -> str:
        return f"tokens {self.start:,} to {self.stop:,} of split {self.split}"


def counted_split(manifest: ShardManifest, scored: str) -> str:
    """The split whose token frequencies are used for the scored split."""
    return "train" if "train" in manifest.splits else scored


def count_tokens(
    data: DatasetPath,
    split: str,
    workers: Workers,
    *,
    progress: Progress = lambda phase, done, total: None,
) -> NDArray[np.int64]:
    """Occurrences of each token id, [V]."""
    manifest = load_manifest(data)
    num_tokens = manifest.split(split, data).tokens
    count_V = np.zeros(manifest.vocab_size, np.int64)
    done = 0
    tasks = list(_counting_tasks(data, split, num_tokens))
    for number, part_V in workers.map(count_range, tasks):
        count_V += part_V
        done += tasks[number].stop - tasks[number].start
        progress("counting tokens", done, num_tokens)
    _open_split.cache_clear()
    return count_V


def count_range(task: CountingTask) -> NDArray[np.int64]:
    """Occurrences of each token id, on a worker."""
    source = _open_split(task.data, task.split)
    vocab_size = source.manifest.vocab_size
    count_V = np.zeros(vocab_size, np.int64)
    for start in range(task.start, task.stop, COUNTED_TOKENS):
        tokens, _ = read_range(source, start, min(start + COUNTED_TOKENS, task.stop))
        count_V += np.bincount(tokens, minlength=vocab_size)
    return count_V


def _counting_tasks(data: DatasetPath, split: str, num_tokens: int) -> Iterator[CountingTask]:
    for start in range(0, num_tokens, TASK_TOKENS):
        yield CountingTask(data, split, start, min(start + TASK_TOKENS, num_tokens))


@lru_cache(maxsize=1)
def _open_split(data: DatasetPath, split: str) -> SplitReader:
    """A worker opens the split once, and not for each task."""
    return open_split(data, split)
