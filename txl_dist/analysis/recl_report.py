"""`txl recl`: measures a group of stored models on one split; recl.json, curve.csv and tables.

`txl recl --out DIR` writes both next to the plots, and `--json` prints the object of recl.json. No
code of this project reads it back. Its keys:

    format, version              "txl-recl", 1
    group, data, split           the name of the group, path or URL, split
    data_sha256                  digest of the dataset's manifest
    protocol                     one line to quote with the numbers
    contexts, delta, threshold   in tokens; delta is null if the steps differ, then there is no RECL
    positions, documents         number of targets, and of documents that contain them
    within_documents             whether the context of each target is inside its document
    seed                         of the sample and of the intervals
    bootstrap                    unit, num_units, num_resamples and level of the intervals
    models                       per model: name, checkpoint, model digest, parameters, settings,
                                 max_context; curve: context, nats, perplexity, low, high (nats);
                                 recl: r, recl, low, high, is_lower_bound, last_gain_ends, gains
"""

import csv
import io
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from data_pipeline.shards.manifest import load_manifest
from data_pipeline.shards.shard_reader import open_split
from data_pipeline.streams.segments import Reset
from data_pipeline.tokenizers.loading import differences
from txl_dist.analysis.recl import GroupAnalysis, ModelAnalysis, analyse_group, check_contexts
from txl_dist.analysis.windows import (
    WindowScorer,
    max_context,
    measure_losses,
    sample_positions,
    useful_contexts,
)
from txl_dist.convert.stored_model import StoredModel, find_model
from txl_dist.errors import ConfigError, DataError
from txl_dist.evaluation.bootstrap import LEVEL
from txl_dist.evaluation.job import EvaluationJob
from txl_dist.evaluation.result import Subject

JSON_NAME = "recl.json"
CSV_NAME = "curve.csv"


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelDescription:
    """A model of the group and how it reads."""

    name: str
    checkpoint: str
    digest: str
    num_parameters: int
    distance_encoding: str
    tgt_len: int
    mem_len: int
    clamp_len: int | None
    same_length: bool
    reset: str
    precision: str
    max_context: int
    """Tokens of context that can influence its loss."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupReport:
    """Everything that `txl recl` reports."""

    group: str
    data: str
    data_sha256: str
    split: str
    contexts: tuple[int, ...]
    delta: int | None
    threshold: float
    num_positions: int
    num_documents: int
    within_documents: bool
    seed: int
    models: tuple[ModelDescription, ...]
    analysis: GroupAnalysis

    @property
    def protocol(self) -> str:
        """One line to quote with the numbers."""
        step = f" in steps of {self.delta}" if self.delta else ""
        place = "document" if self.within_documents else "split"
        models = "; ".join(
            f"{Subject(model.name, model.digest)}: tgt_len {model.tgt_len}, mem_len "
            f"{model.mem_len}, clamp_len {model.clamp_len}, same_length {model.same_length}, "
            f"{model.precision}"
            for model in self.models
        )
        return (
            f"RECL (arXiv:1901.02860, appendix C) of group {self.group!r} on {self.split} of "
            f"{Subject(self.data, self.data_sha256)}: contexts {self.contexts[0]} to "
            f"{self.contexts[-1]} tokens{step}, threshold {self.threshold:g}, "
            f"{self.num_positions:,} targets of {self.num_documents:,} documents (seed "
            f"{self.seed}) with {self.contexts[-1]} tokens before them in their {place}; each "
            f"loss after exactly c tokens, read from an empty memory; {models}"
        )

    def to_json(self) -> dict[str, Any]:
        """The object of recl.json."""
        resampling = self.analysis.resampling
        return {
            "format": "txl-recl",
            "version": 1,
            "group": self.group,
            "data": self.data,
            "data_sha256": self.data_sha256,
            "split": self.split,
            "protocol": self.protocol,
            "contexts": list(self.contexts),
            "delta": self.delta,
            "threshold": self.threshold,
            "positions": self.num_positions,
            "documents": self.num_documents,
            "within_documents": self.within_documents,
            "seed": self.seed,
            "bootstrap": {
                "unit": resampling.unit,
                "num_units": resampling.num_units,
                "num_resamples": resampling.num_resamples,
                "level": LEVEL,
            },
            "models": [
                {**asdict(description), **_model_json(analysis)}
                for description, analysis in zip(self.models, self.analysis.models, strict=True)
            ],
        }

    def to_json_text(self) -> str:
        return json.dumps(self.to_json(), allow_nan=False)

    def to_csv(self) -> str:
        """One line per model and context."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(["model", "context", "nats", "low", "high", "perplexity"])
        for description, analysis in zip(self.models, self.analysis.models, strict=True):
            for point in analysis.curve:
                numbers = point.nats, point.low, point.high, math.exp(point.nats)
                writer.writerow([description.name, point.context, *map(repr, numbers)])
        return text.getvalue()


def _model_json(analysis: ModelAnalysis) -> dict[str, Any]:
    return {
        "curve": [
            {**asdict(point), "perplexity": math.exp(point.nats)} for point in analysis.curve
        ],
        "recl": [
            {"r": result.r, "low": result.low, "high": result.high, **asdict(result.length)}
            for result in analysis.recl
        ],
    }


def recl_table(report: GroupReport) -> list[str]:
    """Lines of a table: RECL of every model by r, with intervals."""
    names = [model.name for model in report.models]
    width = max(len(name) for name in ("model", *names))
    r_values = [result.r for result in report.analysis.models[0].recl]
    header = "".join(f"  {f'RECL r={r:g}':>20}" for r in r_values)
    lines = [f"{'model':{width}}{header}  {'last gain ends':>20}"]
    for name, analysis in zip(names, report.analysis.models, strict=True):
        cells = [_recl_cell(result.length.is_lower_bound, result) for result in analysis.recl]
        ends = "/".join(f"{result.length.last_gain_ends:,}" for result in analysis.recl)
        lines.append(f"{name:{width}}" + "".join(f"  {c:>20}" for c in cells) + f"  {ends:>20}")
    return lines


def _recl_cell(is_lower_bound: bool, result: Any) -> str:
    sign = ">=" if is_lower_bound else ""
    return f"{sign}{result.length.recl:,} ({result.low:,}-{result.high:,})"


def curve_table(report: GroupReport, *, max_rows: int = 12) -> list[str]:
    """Lines of a table: nats per token of every model by context; at most about `max_rows`."""
    names = [model.name for model in report.models]
    width = max(16, *(len(name) for name in names))
    lines = [f"{'context':>9}" + "".join(f"  {name:>{width}}" for name in names)]
    columns: Sequence[int] = range(len(report.contexts))
    step = -(-len(columns) // max_rows)
    for column in sorted({*columns[::step], columns[-1]}):
        cells = []
        for analysis in report.analysis.models:
            point = analysis.curve[column]
            cells.append(f"{point.nats:.4f} ±{(point.high - point.low) / 2:.4f}")
        row = "".join(f"  {cell:>{width}}" for cell in cells)
        lines.append(f"{report.contexts[column]:>9,}{row}")
    return lines


@dataclass(frozen=True, kw_only=True, slots=True)
class ReclRequest:
    """What `txl recl` measures. All jobs have the same data and split."""

    group: str
    """Published with the result, because RECL depends on the group."""
    names: tuple[str, ...]
    jobs: tuple[EvaluationJob, ...]
    """One per model; the batch size counts windows."""
    contexts: tuple[int, ...]
    r_values: tuple[float, ...]
    threshold: float
    num_positions: int
    num_resamples: int
    seed: int


def check_group(request: ReclRequest) -> None:
    """Check everything that can be checked before weights are loaded.

    Raises ConfigError for invalid options; DataError if tokenizers differ, among models or from the
    data.
    """
    if len(set(request.names)) < len(request.names):
        raise ConfigError(f"the models need different names, got {', '.join(request.names)}")
    if bad := [r for r in request.r_values if not 0 < r <= 1]:
        raise ConfigError(f"--r {bad[0]:g} must be above 0 and at most 1")
    models = [find_model(job.checkpoint, weights=job.weights) for job in request.jobs]
    _require_one_tokenizer(models)
    data = request.jobs[0].data
    manifest = load_manifest(data)
    for model in models:
        model.check_data(manifest, data)


def measure_group(
    request: ReclRequest, *, on_progress: Callable[[int, int], None] = lambda done, total: None
) -> GroupReport:
    """Losses of every model at every context, their curves and RECL.

    Calls `on_progress(tokens read, tokens to read)`, first before anything is read. Holds one model
    in memory at a time. Raises DataError if no target has enough context, CheckpointError for
    damaged weights.
    """
    check_group(request)
    first = request.jobs[0]
    source = open_split(first.data, first.settings.split, manifest=load_manifest(first.data))
    within_documents = any(job.settings.reset == "document" for job in request.jobs)
    reset: Reset = "document" if within_documents else "stream"
    positions = sample_positions(
        source,
        context=request.contexts[-1],
        num_positions=request.num_positions,
        seed=request.seed,
        reset=reset,
    )
    losses, descriptions = [], []
    work = [tokens_per_target(job, request.contexts) * len(positions) for job in request.jobs]
    on_progress(0, sum(work))
    for number, (name, job) in enumerate(zip(request.names, request.jobs, strict=True)):
        scorer, description = _open(name, job)
        descriptions.append(description)
        losses.append(
            measure_losses(
                scorer,
                source,
                positions,
                request.contexts,
                batch_windows=job.batch_chunks,
                on_progress=_shared_progress(on_progress, work, number),
            )
        )
    delta = _fixed_step(request.contexts)
    analysis = analyse_group(
        np.stack(losses),
        request.contexts,
        positions.document_N,
        r_values=request.r_values if delta else (),
        threshold=request.threshold,
        max_contexts=[description.max_context for description in descriptions],
        num_resamples=request.num_resamples,
        seed=request.seed,
    )
    return GroupReport(
        group=request.group,
        data=str(first.data),
        data_sha256=source.manifest.digest,
        split=first.settings.split,
        contexts=request.contexts,
        delta=delta,
        threshold=request.threshold,
        num_positions=len(positions),
        num_documents=positions.num_documents,
        within_documents=within_documents,
        seed=request.seed,
        models=tuple(descriptions),
        analysis=analysis,
    )


def _require_one_tokenizer(models: list[StoredModel]) -> None:
    """Losses per token can be compared only if all models have the same tokens."""
    first = models[0]
    for model in models[1:]:
        if not model.tokenizer or not first.tokenizer:
            continue
        if changes := differences(model.tokenizer, first.tokenizer):
            raise DataError(
                f"the tokenizers of {model.path} and {first.path} differ: {changes}; a group needs "
                "one tokenizer, because its losses per token are compared. Compare models that "
                "were trained on the same prepared dataset"
            )


def _open(name: str, job: EvaluationJob) -> tuple[WindowScorer, ModelDescription]:
    stored, settings = find_model(job.checkpoint, weights=job.weights), job.settings
    model = job.open().model
    description = ModelDescription(
        name=name,
        checkpoint=str(job.checkpoint),
        digest=stored.digest,
        num_parameters=sum(weight.numel() for weight in model.parameters()),
        distance_encoding=model.config.distance_encoding,
        tgt_len=settings.tgt_len,
        mem_len=settings.mem_len,
        clamp_len=settings.clamp_len,
        same_length=settings.same_length,
        reset=settings.reset,
        precision=settings.precision,
        max_context=max_context(model.config, settings.tgt_len),
    )
    scorer = WindowScorer(model=model, tgt_len=settings.tgt_len, precision=settings.precision)
    return scorer, description


def tokens_per_target(job: EvaluationJob, contexts: Sequence[int]) -> int:
    """Tokens that a model reads to score one target after each of `contexts` tokens."""
    config = job.model_config(find_model(job.checkpoint, weights=job.weights).config)
    return sum(useful_contexts(contexts, max_context(config, job.settings.tgt_len)))


def _shared_progress(
    on_progress: Callable[[int, int], None], work: Sequence[int], number: int
) -> Callable[[int, int], None]:
    """Progress of model `number` as a part of the work of all models."""
    return lambda done, _: on_progress(sum(work[:number]) + done, sum(work))


def _fixed_step(contexts: tuple[int, ...]) -> int | None:
    try:
        check_contexts(contexts)
    except ValueError:
        return None
    return contexts[1] - contexts[0]
