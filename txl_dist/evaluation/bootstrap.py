"""Bootstrap intervals: how much a result depends on the choice of the text.

Percentile bootstrap: draw N of N units of text with replacement, compute the result, repeat, take
quantiles. Losses within a document depend on each other, so the units are whole documents. With
fewer than MIN_DOCUMENTS the units are single targets (`txl recl`), or there is no interval (`txl
eval --details`). An interval covers neither training nor the seed of a run. Its ends are among the
resampled values, so that of a rising function of a score is the function of its ends.

Source: Efron 1979, "Bootstrap Methods", doi:10.1214/aos/1176344552.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from data_pipeline.streams.order import hash_ids

# Shapes: N targets, U units, R resamples

MIN_DOCUMENTS = 10
LEVEL = 0.95
"""Share of resamples inside an interval."""
NUM_RESAMPLES = 1000
SEED = 0


@dataclass(frozen=True, slots=True)
class Resampling:
    """How resamples are drawn."""

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
