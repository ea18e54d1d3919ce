"""What `txl eval --details` adds to a score: tables of the loss, and a confidence interval."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from txl_dist.evaluation.bootstrap import Interval, bootstrap_interval
from txl_dist.evaluation.breakdown import (
    TABLES,
    DocumentSums,
    LossBreakdown,
    LossTable,
    log_bucket_bounds,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class TableRow:
    """One bucket that has targets: values from `low` to `high`, both included."""

    low: int
    high: int
    tokens: int
    nats: float

    @property
    def nats_per_token(self) -> float:
        return self.nats / self.tokens


@dataclass(frozen=True, eq=False)
class ScoreDetails:
    """The loss of one split by position, by token frequency and by document."""

    breakdown: LossBreakdown
    counted_split: str
    """The split whose token frequencies are used."""

    @cached_property
    def interval(self) -> Interval | None:
        """None if the split has fewer than two documents."""
        return bootstrap_interval(self.breakdown.documents)

    @property
    def documents(self) -> DocumentSums:
        return self.breakdown.documents

    def rows(self, table: str) -> list[TableRow]:
        """The buckets of a table of TABLES, in rising order, without the empty ones."""
        return list(_rows(self.breakdown.tables[table], is_log=table != "segment_position"))

    def to_json(self) -> dict[str, Any]:
        """The value of `details` in the JSON of a result."""
        return {
            "interval": None if self.interval is None else self.interval.to_json(),
            "num_documents": len(self.documents.start_D),
            "token_frequency_counted_on": self.counted_split,
            **{
                f"by_{name}": [
                    {
                        "from": row.low,
                        "to": row.high,
                        "tokens": row.tokens,
                        "nats": row.nats,
                        "nats_per_token": row.nats_per_token,
                    }
                    for row in self.rows(name)
                ]
                for name in TABLES
            },
        }


def _rows(table: LossTable, *, is_log: bool) -> Iterator[TableRow]:
    columns = table.tokens_K.tolist(), table.nats_K.tolist()
    for bucket, (tokens, nats) in enumerate(zip(*columns, strict=True)):
        low, high = log_bucket_bounds(bucket) if is_log else (bucket, bucket)
        if tokens:
            yield TableRow(low=low, high=high, tokens=tokens, nats=nats)
