"""RECL, the relative effective context length of a model in a group of models.

For model i, target t and context c, l_i(c, t) is the loss of t after exactly c tokens, in nats.

    b(c, t)     = min over the models i of l_i(c, t)                     the baseline of the group
    T(c)        = the fraction r of all targets with the largest b(c, t)
    f_i(c, c')  = mean over T(c) of min(b(c, t), l_i(c', t))             relative loss
    g_i(c, c')  = (exp f_i(c, c) - exp f_i(c, c')) / exp f_i(c, c)       relative gain

    c = the first context; while g_i(c, c + delta) >= threshold: c = c + delta; RECL = c

Source: Dai et al. 2019, arXiv:1901.02860, appendix C, with threshold 0.01. Choices that the
appendix leaves open:

- The contexts: the caller's. Figure 3 of the paper has 100, 200, ..., 1000.
- |T| is the number of targets times r, rounded, and at least 1. Ties keep the order of targets.
- A model that cannot use more than `max_context` tokens has RECL at most `max_context` (in the
  paper's table 8 the vanilla Transformer has 128, no multiple of 100).
- If the last measured step still gains, RECL is a lower bound (`is_lower_bound`).

The procedure stops at the first step below the threshold, although a later step may gain again (as
when a text repeats itself at one long distance). `last_gain_ends` is the context from which on no
measured step reaches the threshold. Both agree if gains decrease with c.

The minimum with the baseline counts improvements and ignores deteriorations. A model whose losses
vary with the context without becoming better therefore has gains above 0.

`analyse_group` adds context curves, and bootstrap intervals of both.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from txl_dist.evaluation.bootstrap import Resampling, interval, resamples

# Shapes: M models, C contexts, N targets, Z resamples


@dataclass(frozen=True, slots=True)
class EffectiveContext:
    """The effective context length of one model in its group, in tokens."""

    recl: int
    is_lower_bound: bool
    """No measured step gains less than the threshold."""
    last_gain_ends: int
    """The smallest context from which on no measured step reaches the threshold."""
    gains: tuple[float, ...]
    """g_i(c, c + delta) for every context but the last."""


def relative_effective_context_length(
    losses_MCN: NDArray[np.float64],
    contexts: Sequence[int],
    *,
    r: float,
    threshold: float = 0.01,
    max_contexts: Sequence[int] | None = None,
) -> list[EffectiveContext]:
    """RECL of every model of the group. Losses in nats, contexts in tokens with equal steps.

    `max_contexts`: per model, the longest context it can use; None: not limited. Raises ValueError
    for contexts without equal steps, r outside (0, 1] and losses that are NaN or Inf.
    """
    check_contexts(contexts)
    if losses_MCN.ndim != 3 or losses_MCN.shape[1] != len(contexts) or 0 in losses_MCN.shape:
        raise ValueError(f"losses {losses_MCN.shape} are not [models, {len(contexts)}, targets]")
    if not np.isfinite(losses_MCN).all():
        raise ValueError("losses must be finite")
    gains = relative_gains(losses_MCN, r=r)
    limits = max_contexts or [contexts[-1]] * len(losses_MCN)
    return [
        _effective_context(gains_of_model, contexts, threshold, limit)
        for gains_of_model, limit in zip(gains, limits, strict=True)
    ]


def check_contexts(contexts: Sequence[int]) -> None:
    """Raises ValueError unless there are two or more contexts with one positive step."""
    steps = {later - earlier for earlier, later in pairwise(contexts)}
    if len(steps) != 1 or min(steps) < 1 or contexts[0] < 1:
        raise ValueError(f"contexts {list(contexts)} do not increase by one fixed step")


def relative_gains(losses_MCN: NDArray[np.float64], *, r: float) -> NDArray[np.float64]:
    """g_i(c, c') of every model for every two neighbouring contexts, [M, C - 1]."""
    if not 0 < r <= 1:
        raise ValueError(f"r={r} must be above 0 and at most 1")
    num_models, num_contexts, num_targets = losses_MCN.shape
    num_hard = max(1, round(r * num_targets))
    gains = np.empty((num_models, num_contexts - 1))
    for step in range(num_contexts - 1):
        baseline_N = losses_MCN[:, step].min(axis=0)
        hard = np.argsort(-baseline_N, kind="stable")[:num_hard]
        baseline = baseline_N[hard]
        # f_i(c, c) is the mean of the baseline, for every model.
        relative_loss_M = np.minimum(baseline, losses_MCN[:, step + 1, hard]).mean(axis=1)
        gains[:, step] = -np.expm1(relative_loss_M - baseline.mean())
    return gains


def _effective_context(
    gains: NDArray[np.float64], contexts: Sequence[int], threshold: float, limit: int
) -> EffectiveContext:
    reaches = gains >= threshold
    first_below = len(gains) if reaches.all() else int(np.argmin(reaches))
    last_above = int(np.flatnonzero(reaches)[-1]) if reaches.any() else -1
    return EffectiveContext(
        recl=min(contexts[first_below], limit),
        is_lower_bound=bool(reaches.all()) and limit >= contexts[-1],
        last_gain_ends=min(contexts[last_above + 1], limit),
        gains=tuple(gains.tolist()),
    )


def analyse_group(
    losses_MCN: NDArray[np.float64],
    contexts: Sequence[int],
    document_N: NDArray[np.int64],
    resampling: Resampling,
    *,
    r_values: Sequence[float],
    threshold: float,
    max_contexts: Sequence[int],
) -> list[dict[str, Any]]:
    """Per model: `curve`, its loss by context, and `recl`, one per r, with intervals (recl.json).

    `r_values` is empty if the contexts have no fixed step.
    """

    def lengths(losses: NDArray[np.float64], r: float) -> list[EffectiveContext]:
        return relative_effective_context_length(
            losses, contexts, r=r, threshold=threshold, max_contexts=max_contexts
        )

    means: list[NDArray[np.float64]] = []
    recl: list[list[list[int]]] = [[] for _ in r_values]
    for indices in resamples(document_N, resampling):
        resampled = losses_MCN[:, :, indices]
        means.append(resampled.mean(axis=-1))
        for values, r in zip(recl, r_values, strict=True):
            values.append([length.recl for length in lengths(resampled, r)])
    means_ZMC, models = np.stack(means), []
    for model, losses_CN in enumerate(losses_MCN):
        curve = []
        for column, context in enumerate(contexts):
            nats = float(losses_CN[column].mean())
            low, high = interval(means_ZMC[:, model, column])
            point = {"context": context, "nats": nats, "low": low, "high": high}
            curve.append({**point, "perplexity": math.exp(nats)})
        models.append({"curve": curve, "recl": []})
    for values, r in zip(recl, r_values, strict=True):
        for model, length in enumerate(lengths(losses_MCN, r)):
            low, high = interval([row[model] for row in values])
            result = {"r": r, "low": int(low), "high": int(high), **asdict(length)}
            models[model]["recl"].append(result)
    return models
