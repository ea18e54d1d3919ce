"""recl.json and curve.csv: context curves and RECL of one group of models on one split.

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
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from txl_dist.context.analysis import GroupAnalysis, ModelAnalysis
from txl_dist.context.bootstrap import LEVEL
from txl_dist.evaluation.protocol import Subject

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
