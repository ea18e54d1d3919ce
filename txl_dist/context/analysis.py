"""Context curves and RECL of a group of models, with bootstrap intervals."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from txl_dist.context.bootstrap import Resampling, interval, plan_resampling, resamples
from txl_dist.context.recl import EffectiveContext, relative_effective_context_length

# Shapes: M models, C contexts, N targets, Z resamples


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """The mean loss at one context, in nats per token, with its interval."""

    context: int
    nats: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class ReclResult:
    """The effective context length of a model for one r, with the interval of its RECL."""

    r: float
    length: EffectiveContext
    low: int
    high: int


@dataclass(frozen=True, slots=True)
class ModelAnalysis:
    """What the losses of one model in its group show."""

    curve: tuple[CurvePoint, ...]
    recl: tuple[ReclResult, ...]
    """One per r; empty if the contexts have no fixed step."""


@dataclass(frozen=True, slots=True)
class GroupAnalysis:
    """All models of a group, and how the intervals were computed."""

    models: tuple[ModelAnalysis, ...]
    resampling: Resampling


def analyse_group(
    losses_MCN: NDArray[np.float64],
    contexts: Sequence[int],
    document_N: NDArray[np.int64],
    *,
    r_values: Sequence[float],
    threshold: float,
    max_contexts: Sequence[int],
    num_resamples: int,
    seed: int,
) -> GroupAnalysis:
    """Curves, RECL for every r, and intervals from resamples of documents or targets.

    `r_values` is empty if the contexts have no fixed step.
    """
    resampling = plan_resampling(document_N, num_resamples=num_resamples, seed=seed)

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
    curves = _curves(losses_MCN, np.stack(means), contexts)
    results: list[list[ReclResult]] = [[] for _ in losses_MCN]
    for values, r in zip(recl, r_values, strict=True):
        for model, length in enumerate(lengths(losses_MCN, r)):
            low, high = interval([row[model] for row in values])
            results[model].append(ReclResult(r, length, int(low), int(high)))
    models = [
        ModelAnalysis(curve, tuple(result)) for curve, result in zip(curves, results, strict=True)
    ]
    return GroupAnalysis(tuple(models), resampling)


def _curves(
    losses_MCN: NDArray[np.float64], means_ZMC: NDArray[np.float64], contexts: Sequence[int]
) -> list[tuple[CurvePoint, ...]]:
    curves = []
    for model, losses_CN in enumerate(losses_MCN):
        points = []
        for column, context in enumerate(contexts):
            low, high = interval(means_ZMC[:, model, column])
            points.append(CurvePoint(context, float(losses_CN[column].mean()), low, high))
        curves.append(tuple(points))
    return curves
