"""`txl bench recall`: up to which distance does a trained model copy a repeated span?

Protocol. One sequence has `2 * SPAN + max_distance` tokens, and ends with a span of SPAN tokens:

    control        text ........................................ text SPAN
    distance d     text ........ SPAN ...... d - SPAN tokens .... text SPAN

Both are the same tokens, except that at distance d the span also occurs d tokens earlier, where the
control has text. A model that uses the first occurrence predicts the second one better. The first
CUE tokens of the second span are not scored: before them, nothing indicates a repetition. The
loss of the other `SPAN - CUE` tokens is averaged over all sequences, at each distance and in the
control; the gain is the difference, and its interval is a bootstrap over sequences.

Text and spans are uniformly random token ids, so nothing but the first occurrence helps the
prediction. How much context helps on real text is measured by `txl recl`.

The model reads a sequence from an empty memory, in segments of `tgt_len` tokens with its memory, as
in `txl eval`; the last segment ends with the last scored token (analysis/windows.py). It therefore
cannot use more than `max_context` tokens. A model without memory sees its last `tgt_len` tokens.

The reach is the largest distance up to which every measured distance gains at least `MIN_SHARE` of
the control's loss; 0 if the first one does not.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile

import numpy as np
import torch
from numpy.typing import NDArray

from data_pipeline.streams.order import hash_ids
from txl_dist.analysis.windows import WindowScorer
from txl_dist.errors import ConfigError
from txl_dist.evaluation.bootstrap import interval, plan_resampling, resamples

# Shapes: B sequences, N tokens of a sequence, X tokens of a span, D distances

SPAN, CUE = 16, 4
NUM_SEQUENCES = 32
MIN_SHARE = 0.1
NUM_RESAMPLES = 500


@dataclass(frozen=True, slots=True)
class RecallRow:
    """One distance: mean nats per scored token, and the gain over the control with its interval."""

    distance: int
    nats: float
    gain: float
    low: float
    high: float
    share: float
    """The gain as a fraction of the control's loss."""


@dataclass(frozen=True, slots=True)
class RecallResult:
    """The table of the probe."""

    control_nats: float
    rows: tuple[RecallRow, ...]
    reach: int
    min_share: float = MIN_SHARE


def measure_recall(
    scorer: WindowScorer,
    distances: Sequence[int],
    *,
    seed: int,
    excluded: Sequence[int] = (),
    batch_windows: int,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> RecallResult:
    """Losses of the second span at every distance and without a first one.

    `distances` rise, and are from the first token of the first occurrence to that of the second.
    `excluded` ids do not occur. Raises ConfigError for other distances.
    """
    if sorted({*distances}) != [*distances] or distances[0] < SPAN:
        raise ConfigError(
            f"--distances {','.join(map(str, distances))}: expected rising numbers of at least "
            f"{SPAN} tokens, the length of the span, or its occurrences would overlap"
        )
    vocab_size = scorer.model.config.num_ids
    text_BN, span_BX = random_text(distances[-1], vocab_size, seed=seed, excluded=excluded)
    conditions: list[int | None] = [None, *distances]
    means = np.empty((len(conditions), len(text_BN)))
    for row, distance in enumerate(conditions):
        sequence_BN = torch.from_numpy(place_spans(text_BN, span_BX, distance))
        losses = [
            scorer.last_nats(batch_BN, num_scored=SPAN - CUE)
            for batch_BN in sequence_BN.split(batch_windows)
        ]
        means[row] = torch.cat(losses).double().mean(dim=1).numpy()
        on_progress(row + 1, len(conditions))
    gains_DB, control = means[0] - means[1:], float(means[0].mean())
    each = np.arange(len(text_BN))
    plan = plan_resampling(each, num_resamples=NUM_RESAMPLES, seed=seed)
    resampled = np.stack([gains_DB[:, indices].mean(axis=1) for indices in resamples(each, plan)])
    rows = []
    for number, distance in enumerate(distances):
        nats, gain = float(means[1 + number].mean()), float(gains_DB[number].mean())
        low, high = interval(resampled[:, number])
        rows.append(RecallRow(distance, nats, gain, low, high, gain / control))
    reached = takewhile(lambda row: row.share >= MIN_SHARE, rows)
    return RecallResult(control, tuple(rows), max((row.distance for row in reached), default=0))


def place_spans(
    text_BN: NDArray[np.int64], span_BX: NDArray[np.int64], distance: int | None
) -> NDArray[np.int64]:
    """The text with the span at its end and, unless `distance` is None, that much earlier."""
    sequence_BN, size = text_BN.copy(), span_BX.shape[1]
    num_tokens = text_BN.shape[1]
    sequence_BN[:, num_tokens - size :] = span_BX
    if distance is not None:
        sequence_BN[:, num_tokens - size - distance : num_tokens - distance] = span_BX
    return sequence_BN


def random_text(
    max_distance: int, vocab_size: int, *, seed: int, excluded: Sequence[int]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Uniformly random texts [B, N] and spans [B, X] without the `excluded` ids."""
    allowed = np.setdiff1d(np.arange(vocab_size), np.array(excluded, np.int64))
    num_tokens = 2 * SPAN + max_distance
    hashes = hash_ids(seed, num_ids=NUM_SEQUENCES * (num_tokens + SPAN))
    tokens = allowed[(hashes % np.uint64(len(allowed))).astype(np.int64)]
    tokens = tokens.reshape(NUM_SEQUENCES, -1)
    return tokens[:, :num_tokens], tokens[:, num_tokens:]
