"""Bootstrap intervals: how much a result depends on the sampled text.

Targets of one document are not independent, so whole documents are drawn with replacement. With
fewer than MIN_DOCUMENTS documents, targets are drawn instead, and intervals are too narrow if
targets of a document are alike.

Source: Efron 1979, "Bootstrap Methods", doi:10.1214/aos/1176344552; percentile intervals.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from data_pipeline.streams.order import hash_ids

# Shapes: N targets

MIN_DOCUMENTS = 10
LEVEL = 0.95
"""Share of resamples inside an interval."""


@dataclass(frozen=True, slots=True)
class Resampling:
    """How resamples are drawn."""

    unit: Literal["document", "position"]
    num_units: int
    num_resamples: int
    seed: int


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
    for number in range(resampling.num_resamples):
        drawn = hash_ids(resampling.seed, number, num_ids=len(members)) % np.uint64(len(members))
        yield np.concatenate([members[unit] for unit in drawn.tolist()])


def interval(values: Sequence[float] | NDArray[np.float64]) -> tuple[float, float]:
    """The percentile interval; its ends are among the values."""
    tail = (1 - LEVEL) / 2
    low, high = np.quantile(np.asarray(values), [tail, 1 - tail], method="inverted_cdf")
    return float(low), float(high)
