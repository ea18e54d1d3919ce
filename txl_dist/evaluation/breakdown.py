"""Where the loss of a split comes from: sums by document, position and token frequency.

A `BreakdownCounter` adds the segments of one batch of chunks on a worker. The breakdowns of all
batches are added in their order, so the result does not depend on the workers. Every scored target
has exactly one key in each table:

document: position of the first token of the target's document in the split.
document_position: tokens from the start of the target's document to the target. The first token of
    a document, at 0, is an end-of-document token in datasets that have them.
segment_position: the position in the segment of the query that predicts the target.
token_frequency: how often the target's id occurs in the split that `counted_split` names.

Percentile bootstrap: how much a result depends on the choice of the text. Draw N of N units of text
with replacement, compute the result, repeat, take quantiles. Losses within a document depend on
each other, so the units are whole documents. With fewer than MIN_DOCUMENTS the units are single
targets (`txl recl`), or there is no interval (`txl eval --details`). An interval covers neither
training nor the seed of a run. Its ends are among the resampled values, so that of a rising
function of a score is the function of its ends. Source: Efron 1979, "Bootstrap Methods",
doi:10.1214/aos/1176344552.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Self, TypeAlias

import numpy as np
from numpy.typing import NDArray

from data_pipeline.shards.manifest import ShardManifest
from data_pipeline.shards.shard_reader import SplitReader
from data_pipeline.streams.order import hash_ids
from data_pipeline.streams.segments import read_range
from data_pipeline.system.workers import Progress
from txl_dist.evaluation.scores import SCORES

if TYPE_CHECKING:
    from torch import Tensor

# Shapes: B chunks per batch, T segment tokens, V vocabulary, K keys, N targets

DOCUMENT = "document"
TABLES = ("document_position", "segment_position", "token_frequency")


def log_bucket(value: NDArray[Any]) -> NDArray[np.int64]:
    """The number of bits of each value: 0 -> 0, 1 -> 1, 2 and 3 -> 2. No value is negative."""
    return np.frexp(value.astype(np.float64))[1].astype(np.int64)


def log_bucket_bounds(bucket: int) -> tuple[int, int]:
    return (0, 0) if bucket == 0 else (2 ** (bucket - 1), 2**bucket - 1)


@dataclass(frozen=True, slots=True, eq=False)
class LossTable:
    """Sums by key, in rising order of the keys: only keys that have a target."""

    key_K: NDArray[np.int64]
    nats_K: NDArray[np.float64]
    tokens_K: NDArray[np.int64]
    bytes_K: NDArray[np.int64]

    @property
    def columns(self) -> tuple[NDArray[Any], ...]:
        return self.key_K, self.nats_K, self.tokens_K, self.bytes_K

    def rows(self) -> list[tuple[int, float, int, int]]:
        """Key, nats, tokens and bytes of each key."""
        return list(zip(*(column.tolist() for column in self.columns), strict=True))

    @classmethod
    def total(cls, parts: Sequence["LossTable"]) -> Self:
        """Add the sums of equal keys, in float64 and in the order of `parts`."""
        columns = zip(*(part.columns for part in parts), strict=True)
        key_N, nats_N, tokens_N, bytes_N = (np.concatenate(column) for column in columns)
        key_K, row_N = np.unique(key_N, return_inverse=True)
        nats_K = np.bincount(row_N, nats_N).astype(np.float64)  # without rows it is of integers
        # Counts are exact in float64 below 2**53.
        tokens_K = np.bincount(row_N, tokens_N).astype(np.int64)
        bytes_K = np.bincount(row_N, bytes_N).astype(np.int64)
        return cls(key_K, nats_K, tokens_K, bytes_K)


Breakdown: TypeAlias = Mapping[str, LossTable]
"""The sums by DOCUMENT, and unless only the documents are wanted those of all TABLES. Keys of
`document_position` and `token_frequency` are the `log_bucket` of positions and of occurrences."""


def total_breakdown(parts: Sequence[Breakdown]) -> Breakdown:
    """The sum of `parts`, of which there is at least one, added in their order."""
    return {name: LossTable.total([part[name] for part in parts]) for name in parts[0]}


def breakdown_to_json(breakdown: Breakdown) -> dict[str, Any]:
    """Every digit of the sums, for `breakdown_from_json`."""
    return {
        name: [column.tolist() for column in table.columns] for name, table in breakdown.items()
    }


def breakdown_from_json(content: dict[str, Any]) -> Breakdown:
    """Raises TypeError or ValueError for content that `breakdown_to_json` does not write."""
    return {
        name: LossTable(
            np.array(keys, np.int64),
            np.array(nats, np.float64),
            np.array(tokens, np.int64),
            np.array(num_bytes, np.int64),
        )
        for name, (keys, nats, tokens, num_bytes) in content.items()
    }


class BreakdownCounter:
    def __init__(
        self, *, frequency_bucket_V: NDArray[np.uint8] | None, byte_counts_V: "Tensor"
    ) -> None:
        """`frequency_bucket_V`: None leaves out all TABLES."""
        self._frequency_bucket_V, self._bytes_V = frequency_bucket_V, byte_counts_V.numpy()
        # The sums so far, then segments not added yet. The order of additions does not depend on
        # when they are made.
        self._parts: list[Breakdown] = []
        self._num_pending = 0  # documents of these segments

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
        keys = {DOCUMENT: position_N - age_N}
        if self._frequency_bucket_V is not None:
            frequency_N = self._frequency_bucket_V[target_N].astype(np.int64)
            keys |= zip(TABLES, (log_bucket(age_N), index[1], frequency_N), strict=True)
        one_N, bytes_N = np.ones_like(target_N), self._bytes_V[target_N]
        segment = {
            name: LossTable.total([LossTable(key_N, nats_N, one_N, bytes_N)])
            for name, key_N in keys.items()
        }
        self._parts.append(segment)
        self._num_pending += len(segment[DOCUMENT].key_K)
        # Not at each segment, which took time quadratic in the number of documents.
        if self._num_pending > len(self._parts[0][DOCUMENT].key_K):
            self.breakdown()

    def breakdown(self) -> Breakdown:
        """The sums of all segments so far, of which there is at least one."""
        self._parts, self._num_pending = [total_breakdown(self._parts)], 0
        return self._parts[0]


# --- bootstrap intervals --------------------------------------------------------------------------

# Shapes: N targets, U units

MIN_DOCUMENTS = 10
LEVEL = 0.95
"""Share of resamples inside an interval."""
NUM_RESAMPLES = 1000
SEED = 0


@dataclass(frozen=True, slots=True)
class Resampling:
    unit: Literal["document", "position"]
    num_units: int
    num_resamples: int = NUM_RESAMPLES
    seed: int = SEED

    def draws(self) -> Iterator[NDArray[np.int64]]:
        """The units of each resample, [U]."""
        for number in range(self.num_resamples):
            hashes = hash_ids(self.seed, number, num_ids=self.num_units)
            yield (hashes % np.uint64(self.num_units)).astype(np.int64)


def plan_resampling(document_N: NDArray[np.int64], *, num_resamples: int, seed: int) -> Resampling:
    """By document if there are enough of them, else by position."""
    num_documents = len(np.unique(document_N))
    if num_documents >= MIN_DOCUMENTS:
        return Resampling("document", num_documents, num_resamples, seed)
    return Resampling("position", len(document_N), num_resamples, seed)


def resamples(document_N: NDArray[np.int64], resampling: Resampling) -> Iterator[NDArray[np.int64]]:
    """The indices of the targets in each resample."""
    if resampling.unit == "document":
        _, unit_N = np.unique(document_N, return_inverse=True)
    else:
        unit_N = np.arange(len(document_N))
    order = np.argsort(unit_N, kind="stable")
    members = np.split(order, np.flatnonzero(np.diff(unit_N[order])) + 1)
    for drawn_U in resampling.draws():
        yield np.concatenate([members[unit] for unit in drawn_U.tolist()])


def interval(values: Sequence[float] | NDArray[np.float64]) -> tuple[float, float]:
    """The percentile interval; its ends are among the values."""
    tail = (1 - LEVEL) / 2
    low, high = np.quantile(np.asarray(values), [tail, 1 - tail], method="inverted_cdf")
    return float(low), float(high)


# --- the details of a result ----------------------------------------------------------------------


def score_intervals(documents: LossTable) -> dict[str, tuple[float, float] | None] | None:
    """By name of each score of tokens or bytes: its interval, from resampled documents.

    None for fewer documents than a resample needs, and for a score whose sum is not known, or 0, in
    a resample.
    """
    num_documents = len(documents.key_K)
    if num_documents < MIN_DOCUMENTS:
        return None
    names = ("nats", "tokens", "bytes")
    resampled = [
        dict(zip(names, sums_3.tolist(), strict=True)) for sums_3 in _resampled(documents.columns)
    ]
    intervals: dict[str, tuple[float, float] | None] = {}
    for name, score in SCORES.items():
        if score.needs in names:
            is_known = all(sums[score.needs] > 0 for sums in resampled)
            values = [score.finish(sums) for sums in resampled] if is_known else []
            intervals[name] = interval(values) if values else None
    return intervals


def _resampled(columns: Sequence[NDArray[Any]]) -> Iterator[NDArray[Any]]:
    """The sums of all columns but the first, the keys, in each resample of the documents."""
    table_DC = np.stack(columns[1:], axis=1)
    for drawn in Resampling("document", len(table_DC)).draws():
        yield np.bincount(drawn, minlength=len(table_DC)) @ table_DC


def paired_difference(
    documents: LossTable, base: LossTable
) -> tuple[float, tuple[float, float] | None]:
    """Nats per token of a model less those of another one, on the same documents; its interval.

    Both are resampled with the same documents: how hard those are is in neither end. None for fewer
    documents than a resample needs.
    """
    nats_D = documents.nats_K - base.nats_K
    columns = documents.key_K, nats_D, documents.tokens_K
    ends = None
    if len(nats_D) >= MIN_DOCUMENTS:
        sums = [sums_2 for sums_2 in _resampled(columns) if sums_2[1]]
        ends = interval([nats / tokens for nats, tokens in sums])
    return float(nats_D.sum() / documents.tokens_K.sum()), ends


def in_range(value: float | None) -> float | None:
    """None for infinity, which JSON does not have."""
    return value if value is not None and math.isfinite(value) else None


def details_to_json(breakdown: Breakdown, counted_split: str) -> dict[str, Any]:
    """What `txl eval --details` adds to the JSON of a result: the value of `details`.

    `counted_split`: whose token frequencies are used.
    """
    documents = breakdown[DOCUMENT]
    intervals = score_intervals(documents)
    num_documents = len(documents.key_K)
    return {
        "interval": intervals
        and {
            "level": LEVEL,
            "num_resamples": NUM_RESAMPLES,
            "seed": SEED,
            "num_documents": num_documents,
            **{name: ends and [*map(in_range, ends)] for name, ends in intervals.items()},
        },
        "num_documents": num_documents,
        "token_frequency_counted_on": counted_split,
        **{
            f"by_{name}": list(_rows(breakdown[name], is_log=name != "segment_position"))
            for name in TABLES
        },
    }


def _rows(table: LossTable, *, is_log: bool) -> Iterator[dict[str, Any]]:
    """The buckets in rising order: values from `from` to `to`, both included."""
    for bucket, nats, tokens, _ in table.rows():
        low, high = log_bucket_bounds(bucket) if is_log else (bucket, bucket)
        sums = {"tokens": tokens, "nats": nats, "nats_per_token": nats / tokens}
        yield {"from": low, "to": high, **sums}


COUNTED_TOKENS = 1 << 18


def counted_split(manifest: ShardManifest, scored: str) -> str:
    """The split whose token frequencies are used for the scored split."""
    return "train" if "train" in manifest.splits else scored


def count_tokens(
    source: SplitReader,
    *,
    max_tokens: int | None = None,
    progress: Progress = lambda label, done, total: None,
) -> NDArray[np.int64]:
    """Occurrences of each token id in a split, or in its first `max_tokens` tokens, [V]."""
    num_tokens = min(max_tokens or source.num_tokens, source.num_tokens)
    count_V = np.zeros(source.manifest.vocab_size, np.int64)
    for start in range(0, num_tokens, COUNTED_TOKENS):
        stop = min(start + COUNTED_TOKENS, num_tokens)
        tokens, _ = read_range(source, start, stop)
        count_V += np.bincount(tokens, minlength=len(count_V))
        progress("counting tokens", stop, num_tokens)
    return count_V
