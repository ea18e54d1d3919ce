"""A confidence interval for the loss of a split, by resampling its documents.

Percentile bootstrap: draw D of D documents with replacement, divide the sums of the draw, repeat,
and take quantiles. Documents are drawn, not tokens, because the losses within a document depend on
each other. The interval covers the choice of the text, and neither training nor the seed of a run.

Source: Efron and Tibshirani 1993, An Introduction to the Bootstrap, chapter 13; the interval of a
ratio of sums over clusters.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from txl_dist.evaluation.breakdown import DocumentSums

LEVEL = 0.95
NUM_RESAMPLES = 1000
SEED = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Interval:
    """The interval of each score: (low, high)."""

    num_documents: int
    nats_per_token: tuple[float, float]
    bits_per_byte: tuple[float, float] | None
    """None if the scored text has no bytes."""

    def to_json(self) -> dict[str, Any]:
        low, high = self.nats_per_token
        return {
            "level": LEVEL,
            "num_resamples": NUM_RESAMPLES,
            "seed": SEED,
            "num_documents": self.num_documents,
            "nats_per_token": [low, high],
            "perplexity": [_exp(low), _exp(high)],
            "bits_per_token": [low / math.log(2), high / math.log(2)],
            "bits_per_byte": None if self.bits_per_byte is None else list(self.bits_per_byte),
        }


def bootstrap_interval(documents: DocumentSums) -> Interval | None:
    """The interval at LEVEL. None for fewer than two documents, which cannot be resampled."""
    num_documents = len(documents.start_D)
    if num_documents < 2:
        return None
    table_D3 = np.stack([documents.nats_D, documents.tokens_D, documents.bytes_D], axis=1)
    random = np.random.default_rng(SEED)
    sums_R3 = np.empty((NUM_RESAMPLES, 3))
    for resample in range(NUM_RESAMPLES):
        drawn = random.integers(num_documents, size=num_documents)
        sums_R3[resample] = np.bincount(drawn, minlength=num_documents) @ table_D3
    nats_R, tokens_R, bytes_R = sums_R3.T
    return Interval(
        num_documents=num_documents,
        nats_per_token=_quantiles(nats_R / tokens_R),
        bits_per_byte=_quantiles(nats_R / bytes_R / math.log(2)) if bytes_R.all() else None,
    )


def _quantiles(values: np.ndarray) -> tuple[float, float]:
    low, high = np.quantile(values, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)


def _exp(nats: float) -> float:
    return math.exp(nats) if nats < 700 else math.inf
