"""RECL, the relative effective context length of a model in a group of models (`txl recl`).

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

`txl recl --out DIR` writes recl.json next to the plots, and `--json` prints the
object of recl.json, with bootstrap intervals of losses and RECL. Its keys:

    format, version              "txl-recl", 1
    group, data, split           the names of the models, path or URL, split
    data_sha256                  digest of the dataset's manifest
    protocol                     one line to quote with the numbers
    contexts, delta, threshold   contexts and their step in tokens; gain that counts
    positions, documents         number of targets, and of documents that contain them
    within_documents             whether the context of each target is inside its document
    seed                         of the sample and of the intervals
    bootstrap                    unit, num_units, num_resamples and level of the intervals
    models                       per model: name, checkpoint, model digest, parameters, settings,
                                 max_context; curve: context, nats, perplexity, low, high (nats);
                                 recl: r, recl, low, high, is_lower_bound, last_gain_ends, gains
"""

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from data_pipeline.errors import counted
from data_pipeline.shards.manifest import load_manifest
from data_pipeline.shards.shard_reader import open_split
from data_pipeline.tokenizers.loading import differences
from txl_dist.analysis.windows import WindowScorer, measure_losses, sample_positions
from txl_dist.convert.stored_model import find_model
from txl_dist.errors import ConfigError, DataError
from txl_dist.evaluation.breakdown import LEVEL, Resampling, interval, plan_resampling, resamples
from txl_dist.evaluation.result import named
from txl_dist.evaluation.spec import EvaluationSpec

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
    steps = {later - earlier for earlier, later in pairwise(contexts)}
    if len(steps) != 1 or min(steps) < 1 or contexts[0] < 1:
        raise ValueError(f"contexts {list(contexts)} do not increase by one fixed step")
    if losses_MCN.ndim != 3 or losses_MCN.shape[1] != len(contexts) or 0 in losses_MCN.shape:
        raise ValueError(f"losses {losses_MCN.shape} are not [models, {len(contexts)}, targets]")
    if not np.isfinite(losses_MCN).all():
        raise ValueError("losses must be finite")
    gains = relative_gains(losses_MCN, r=r)
    limits = max_contexts or [sys.maxsize] * len(losses_MCN)
    return [
        _effective_context(gains_of_model, contexts, threshold, limit)
        for gains_of_model, limit in zip(gains, limits, strict=True)
    ]


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
        is_lower_bound=bool(reaches.all()) and limit > contexts[-1],
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
    """Per model: `curve`, its loss by context, and `recl`, one per r, with intervals."""

    def lengths(losses: NDArray[np.float64]) -> list[list[EffectiveContext]]:
        """By r and model."""
        return [
            relative_effective_context_length(
                losses, contexts, r=r, threshold=threshold, max_contexts=max_contexts
            )
            for r in r_values
        ]

    means, recl = [], []
    for indices in resamples(document_N, resampling):
        resampled = losses_MCN[:, :, indices]
        means.append(resampled.mean(axis=-1))
        recl.append([[length.recl for length in of_r] for of_r in lengths(resampled)])
    means_ZMC, recl_ZRM, measured = np.stack(means), np.array(recl), lengths(losses_MCN)
    models = []
    for model, losses_CN in enumerate(losses_MCN):
        curve = []
        for column, context in enumerate(contexts):
            nats = float(losses_CN[column].mean())
            low, high = interval(means_ZMC[:, model, column])
            point = {"context": context, "nats": nats, "low": low, "high": high}
            # Beyond the range of a float it is null, as in the results of `txl eval`.
            curve.append({**point, "perplexity": math.exp(nats) if nats < 700 else None})
        results = []
        for row, r in enumerate(r_values):
            low, high = interval(recl_ZRM[:, row, model])
            ends = {"r": r, "low": int(low), "high": int(high)}
            results.append({**ends, **asdict(measured[row][model])})
        models.append({"curve": curve, "recl": results})
    return models


# --- a group of stored models ---------------------------------------------------------------------

NUM_RESAMPLES = 500


def measure_group(
    specs: Mapping[str, EvaluationSpec],
    contexts: Sequence[int],
    *,
    r_values: Sequence[float],
    threshold: float,
    num_positions: int,
    seed: int,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, Any]:
    """Losses of every model at every context, their curves and RECL: the object of recl.json.

    `specs`: by the name that is published, because RECL depends on the group; all have the same
    data and split, and the batch size counts windows. `contexts` rise by equal steps. Calls
    `on_progress(targets scored, targets)`, of all models. Holds one model at a time. Raises
    ConfigError for invalid options and contexts that a model cannot use, DataError if tokenizers
    differ or no target has enough context, and CheckpointError for damaged weights.
    """
    if bad := [r for r in r_values if not 0 < r <= 1]:
        raise ConfigError(f"--r {bad[0]:g} must be above 0 and at most 1")
    _require_one_tokenizer([*specs.values()])
    first = next(iter(specs.values()))
    data, split = first.data, first.settings.split
    source = open_split(data, split, manifest=load_manifest(data))
    within_documents = any(spec.settings.reset == "document" for spec in specs.values())
    positions = sample_positions(
        source,
        context=contexts[-1],
        num_positions=num_positions,
        seed=seed,
        reset="document" if within_documents else "stream",
    )
    num_scored = 0

    def on_batch(num_targets: int) -> None:
        nonlocal num_scored
        num_scored += num_targets
        on_progress(num_scored, len(specs) * len(positions))

    losses, models = [], []
    for name, spec in specs.items():
        scorer, model = _open(name, spec)
        # In a group, its curve is what others are compared with.
        if len(specs) == 1 and (limit := scorer.max_context) <= contexts[0]:
            advice = f". Give --max-context {limit} --delta {max(1, limit // 4)}" * (limit > 1)
            raise ConfigError(
                f"{name} uses at most {counted(limit, 'token')} of context, and the first context "
                f"is {contexts[0]}: its loss is the same at all of them, so its RECL cannot be "
                f"measured{advice}"
            )
        losses.append(
            measure_losses(
                scorer,
                source,
                positions,
                contexts,
                batch_windows=spec.batch_chunks,
                on_batch=on_batch,
            )
        )
        models.append(model)
    resampling = plan_resampling(positions.document_N, num_resamples=NUM_RESAMPLES, seed=seed)
    analyses = analyse_group(
        np.stack(losses),
        contexts,
        positions.document_N,
        resampling,
        r_values=r_values,
        threshold=threshold,
        max_contexts=[model["max_context"] for model in models],
    )
    report = {
        "format": "txl-recl",
        "version": 1,
        "group": ", ".join(specs),
        "data": str(data),
        "data_sha256": source.manifest.digest,
        "split": split,
        "protocol": "",
        "contexts": list(contexts),
        "delta": contexts[1] - contexts[0],
        "threshold": threshold,
        "positions": len(positions),
        "documents": len(np.unique(positions.document_N)),
        "within_documents": within_documents,
        "seed": seed,
        "bootstrap": {
            "unit": resampling.unit,
            "num_units": resampling.num_units,
            "num_resamples": resampling.num_resamples,
            "level": LEVEL,
        },
        "models": [{**model, **analysis} for model, analysis in zip(models, analyses, strict=True)],
    }
    return {**report, "protocol": _protocol(report)}


def _protocol(report: dict[str, Any]) -> str:
    contexts = report["contexts"]
    place = "document" if report["within_documents"] else "split"
    models = "; ".join(
        f"{named(model['name'], model['digest'])}: tgt_len {model['tgt_len']}, mem_len "
        f"{model['mem_len']}, clamp_len {model['clamp_len']}, same_length "
        f"{model['same_length']}, {model['precision']}"
        for model in report["models"]
    )
    return (
        f"RECL (arXiv:1901.02860, appendix C) of group {report['group']!r} on {report['split']} of "
        f"{named(report['data'], report['data_sha256'])}: contexts {contexts[0]} to "
        f"{contexts[-1]} tokens in steps of {report['delta']}, threshold {report['threshold']:g}, "
        f"{report['positions']:,} targets of {counted(report['documents'], 'document')} (seed "
        f"{report['seed']}) with {contexts[-1]} tokens before them in their {place}; each loss "
        f"after exactly c tokens, read from an empty memory; {models}"
    )


def _require_one_tokenizer(specs: Sequence[EvaluationSpec]) -> None:
    """Before weights are loaded. Raises DataError."""
    models = [find_model(spec.checkpoint, weights=spec.weights) for spec in specs]
    first, data = models[0], specs[0].data
    for model in models:
        if (
            model.tokenizer
            and first.tokenizer
            and (changes := differences(model.tokenizer, first.tokenizer))
        ):
            raise DataError(
                f"the tokenizers of {model.path} and {first.path} differ: {changes}; a group needs "
                "one tokenizer, because its losses per token are compared. Compare models that "
                "were trained on the same prepared dataset"
            )
        model.check_data(load_manifest(data), data)


def _open(name: str, spec: EvaluationSpec) -> tuple[WindowScorer, dict[str, Any]]:
    stored, settings = find_model(spec.checkpoint, weights=spec.weights), spec.settings
    model = spec.open().model
    scorer = WindowScorer(model=model, tgt_len=settings.tgt_len, precision=settings.precision)
    options = ("tgt_len", "mem_len", "clamp_len", "same_length", "reset", "precision")
    return scorer, {
        "name": name,
        "checkpoint": str(spec.checkpoint),
        "digest": stored.digest,
        "num_parameters": sum(weight.numel() for weight in model.parameters()),
        "distance_encoding": model.config.distance_encoding,
        **{option: getattr(settings, option) for option in options},
        "max_context": scorer.max_context,
    }
