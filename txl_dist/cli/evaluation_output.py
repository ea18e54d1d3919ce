"""What `txl eval` prints and writes: one score, a table of scores, or a sweep.

The files of --out DIR are made from the objects that --json prints:

result.json                 that object, or the list of them
scores.csv                  one line per checkpoint, split and setting
by_document_position.csv    with --details: one line per bucket of each of these; also
by_document_position.png    by_segment_position and by_token_frequency
sweep.png                   with --sweep: perplexity of every setting

--per-document FILE has one line of JSON for each document of the scored splits:

    {"checkpoint": "...", "split": "valid", "id": "...", "tokens": 12, "bytes": 40, "nats": 31.25}

Every target is in one document, so tokens and bytes add up to those of the score exactly, and nats
up to the rounding of float64. The workers send the sums of each batch (breakdown.py), from which
`--resume` continues. Here they take 32 bytes per document; ids are read shard by shard.
"""

import csv
import io
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Self

from data_pipeline.shards.shard_reader import open_split
from data_pipeline.system.files import StagedDirectory, explain_disk_errors, write_synced
from txl_dist.evaluation.bootstrap import MIN_DOCUMENTS
from txl_dist.evaluation.breakdown import TABLES, DocumentSums, score_intervals
from txl_dist.evaluation.scores import SCORES

if TYPE_CHECKING:
    from txl_dist.evaluation.distributed import PlannedJob, Sweep, SweepResult
    from txl_dist.evaluation.job import EvaluationJob
    from txl_dist.evaluation.result import EvaluationResult

RESULT_NAME = "result.json"
SCORES_NAME = "scores.csv"
SWEEP_PLOT_NAME = "sweep.png"
SETTINGS = ("checkpoint", "split", "weights", "tgt_len", "mem_len", "clamp_len", "same_length")
COLUMNS = (
    *SETTINGS,
    "selected",
    "data",
    "mode",
    "reset",
    "precision",
    "tokens_scored",
    "nats",
)
BUCKETS = ("from", "to", "tokens", "nats", "nats_per_token")

Scored = Mapping[str, Any]
"""The JSON object of one result."""


def write_evaluation(
    staged: StagedDirectory, content: Any, scored: Sequence[Scored], *, swept: Sequence[str] = ()
) -> list[str]:
    """Write the files; returns their names. `content`: of result.json. `swept`: option names.

    Files of an earlier evaluation in the same directory are replaced or removed.
    """
    # Imported here: matplotlib takes a second, and RESULT_NAME is needed before the scores.
    from txl_dist.analysis.plots import plot_sweep, plot_table, write_png

    with explain_disk_errors("writing the files of an evaluation", staged.directory):
        staging = staged.stage()
        write_synced(staging / SCORES_NAME, _csv((*COLUMNS, *SCORES, "protocol"), scored))
        for name in TABLES if any("details" in each for each in scored) else ():
            rows = [
                {**each, **bucket} for each in scored for bucket in each["details"][f"by_{name}"]
            ]
            write_synced(staging / f"by_{name}.csv", _csv((*SETTINGS, *BUCKETS), rows))
            write_png(plot_table(name, scored), staging / f"by_{name}.png")
        if swept:
            write_png(plot_sweep(scored, swept), staging / SWEEP_PLOT_NAME)
        write_synced(
            staging / RESULT_NAME, json.dumps(content, indent=1, allow_nan=False).encode() + b"\n"
        )
        names = sorted(path.name for path in staging.iterdir())
        for name in set(_all_names()) - set(names):
            (staged.directory / name).unlink(missing_ok=True)
        staged.publish(names)
    return names


def _all_names() -> list[str]:
    tables = [f"by_{name}.{suffix}" for name in TABLES for suffix in ("csv", "png")]
    return [RESULT_NAME, SCORES_NAME, SWEEP_PLOT_NAME, *tables]


def _csv(columns: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> bytes:
    """Columns that a row does not have are empty, and so are null values."""
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, columns, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue().encode("utf-8", "backslashreplace")


def document_lines(
    planned: "Sequence[PlannedJob]", results: "Sequence[EvaluationResult]"
) -> Iterator[bytes]:
    """The lines of all jobs, in the order of the splits. The jobs have no `num_ranks`."""
    for each, result in zip(planned, results, strict=True):
        names = {"checkpoint": str(each.given.checkpoint), "split": result.settings.split}
        # Words are replaced by `<unk>`, and token ids have no text: no document's bytes are known.
        has_bytes = result.sums.num_bytes > 0 and not result.text.is_word_model
        for id_, nats, tokens, num_bytes in _scores_of_documents(each):
            score = {"tokens": tokens, "bytes": num_bytes if has_bytes else None, "nats": nats}
            yield json.dumps({**names, "id": id_, **score}).encode() + b"\n"


def _scores_of_documents(planned: "PlannedJob") -> Iterator[tuple[str, float, int, int]]:
    """Id, nats, tokens and bytes of every document of which a token was read."""
    scored = _sums_of_documents(planned)
    document = next(scored, None)
    position, stop = 0, planned.chunks[-1].stop + 1
    for id_, num_tokens in open_split(planned.job.data, planned.job.settings.split).documents():
        if position >= stop:  # of `max_tokens`
            return
        if document is not None and position == document[0]:
            _, nats, tokens, num_bytes = document
            yield id_, nats, tokens, num_bytes
            document = next(scored, None)
        else:  # one token, the first of the split, which nothing predicts
            yield id_, 0.0, 0, 0
        position += num_tokens


def _sums_of_documents(planned: "PlannedJob") -> Iterator[tuple[int, float, int, int]]:
    """Start, nats, tokens and bytes of every document with a target, in order."""
    last: list[DocumentSums] = []
    for _, scores in sorted(planned.finished.batches.items()):
        assert scores.breakdown is not None, "planned with per_document"
        documents = DocumentSums.total([*last, scores.breakdown.documents])
        yield from documents.rows()[:-1]
        # The next batch may continue the last document.
        last = [DocumentSums(*(column[-1:] for column in documents.columns))]
    for documents in last:
        yield from documents.rows()


@dataclass(frozen=True, slots=True)
class ScoredJob:
    """One score."""

    job: "EvaluationJob"
    result: "EvaluationResult"
    selected: bool | None = None
    """In a sweep: whether the setting is the best one of its model."""

    def to_json(self, num_workers: int) -> dict[str, Any]:
        content = {
            **self.result.to_json(),
            "checkpoint": str(self.job.checkpoint),
            "data": str(self.job.data),
            "weights": self.job.weights,
            "workers": num_workers,
        }
        return content if self.selected is None else {**content, "selected": self.selected}


@dataclass(frozen=True)
class EvaluationOutput:
    """All scores of one command."""

    models: list[list[ScoredJob]]
    """By model. In a sweep: first all settings on the first split, then the best one on others."""
    swept: list[str]
    """Names of the swept options; empty if it is no sweep."""
    num_workers: int

    @classmethod
    def of_jobs(
        cls,
        planned: "Sequence[PlannedJob]",
        results: "Sequence[EvaluationResult]",
        *,
        num_workers: int,
    ) -> Self:
        pairs = zip(planned, results, strict=True)
        return cls([[ScoredJob(each.given, result) for each, result in pairs]], [], num_workers)

    @classmethod
    def of_sweeps(
        cls,
        planned: "Sequence[Sweep]",
        results: "Sequence[SweepResult]",
        *,
        swept: list[str],
        num_workers: int,
    ) -> Self:
        models = []
        for sweep, result in zip(planned, results, strict=True):
            scored = [
                ScoredJob(jobs[0].given, score, number == result.best)
                for number, (jobs, score) in enumerate(zip(sweep, result.candidates, strict=True))
            ]
            others = zip(sweep[result.best][1:], result.reported, strict=True)
            models.append(scored + [ScoredJob(each.given, score, True) for each, score in others])
        return cls(models, swept, num_workers)

    @property
    def scored(self) -> list[ScoredJob]:
        return [each for model in self.models for each in model]

    @cached_property
    def objects(self) -> list[dict[str, Any]]:
        """The JSON object of each score."""
        return [each.to_json(self.num_workers) for each in self.scored]

    def content(self) -> Any:
        """What --json prints: one object, or a list of them. In a sweep, one object per model."""
        contents = self.objects
        if self.swept:
            remaining = iter(self.objects)
            contents = [
                self._sweep_content([next(remaining) for _ in model]) for model in self.models
            ]
        return contents[0] if len(contents) == 1 else contents

    def _sweep_content(self, objects: list[dict[str, Any]]) -> dict[str, Any]:
        split = objects[0]["split"]
        candidates = [each for each in objects if each["split"] == split]
        (best,) = (each for each in candidates if each["selected"])
        return {
            "checkpoint": best["checkpoint"],
            "swept": self.swept,
            "selected_on": split,
            "selected": {name: best[name] for name in self.swept},
            "candidates": candidates,
            "reported": [each for each in objects if each["split"] != split],
        }

    def to_json(self) -> str:
        return json.dumps(self.content(), allow_nan=False)

    def print(self) -> None:
        """Print for people: one score in full, several as a table with a line of protocol each."""
        if len(self.scored) == 1:
            print_score(self.scored[0])
        else:
            print_table(self.scored, self.swept)


def print_table(scored: Sequence[ScoredJob], swept: Sequence[str]) -> None:
    names = [str(each.job.checkpoint) for each in scored]
    width = max(len(name) for name in ("checkpoint", *names))
    splits = max(len(each.result.settings.split) for each in scored)
    splits = max(splits, len("split"))
    settings = "".join(f"  {name:>9}" for name in swept)
    print(
        f"{'checkpoint':{width}}  {'split':{splits}}{settings}  {'targets':>12}  "
        f"{'nats/token':>10}  {'perplexity':>11}  {'bits/byte':>9}  context"
    )
    for name, each in zip(names, scored, strict=True):
        result, sums = each.result, each.result.sums
        bits_per_byte = result.scores["bits_per_byte"]
        per_byte = "-" if bits_per_byte is None else f"{bits_per_byte:.4f}"
        values = (getattr(result.settings, option) for option in swept)
        settings = "".join(f"  {'none' if value is None else value:>9}" for value in values)
        print(
            f"{name:{width}}  {result.settings.split:{splits}}{settings}  {sums.num_tokens:>12,}  "
            f"{sums.nats_per_token:>10.4f}  {sums.perplexity:>11.4f}  {per_byte:>9}  "
            f"{result.overhead:.1%}{'  selected' if each.selected else ''}"
        )
    print(
        f"data {scored[0].job.data}; context: additional tokens read, because chunks are "
        "scored independently"
    )
    if swept:
        first = scored[0].result.settings.split
        print(f"selected: the lowest loss on split {first}, for each checkpoint")
    for name, each in zip(names, scored, strict=True):
        if each.selected is not False:
            print(f"protocol: {name}: {each.result.protocol}")


def print_score(scored: ScoredJob) -> None:
    from txl_dist.evaluation.scoring import MAX_OVERHEAD

    job, result = scored.job, scored.result
    sums, settings = result.sums, result.settings
    print(f"{job.checkpoint} on {job.data}, split {settings.split} ({settings.mode})")
    if job.weights == "averaged":
        print("  weights          averaged over steps; those of the last one: --weights last")
    print(f"  targets scored   {sums.num_tokens:,}")
    print(f"  nats             {sums.nats:.4f}  ({sums.nats_per_token:.4f} per token)")
    for name, value in result.scores.items():
        if value is not None and name != "nats_per_token":
            print(f"  {SCORES[name].label:15}  {_show(value)}")
    _print_interval(result)
    print(f"  {result.num_chunks} chunks, {result.overhead:.1%} more tokens read as context")
    if result.overhead > MAX_OVERHEAD:
        print("  so many because a short split too is cut into chunks, the same for any --workers")
    if settings.mode == "fast":
        print("  fast: one memory length of context per chunk; the exact loss is usually lower")
    print(f"  protocol: {result.protocol}")


def _show(value: float) -> str:
    """Four decimals; a word perplexity of an untrained model over bytes has more than 15 digits."""
    return f"{value:.4f}" if value < 1e6 else f"{value:.4g}"


def _print_interval(result: "EvaluationResult") -> None:
    if result.details is None:
        return
    documents = result.details.documents
    intervals, num_documents = score_intervals(documents), len(documents.start_D)
    if intervals is None:
        print(
            f"  95 % interval    none: {num_documents} documents are too few; resampling needs at "
            f"least {MIN_DOCUMENTS}"
        )
    elif (ends := intervals["nats_per_token"]) is not None:
        print(
            f"  95 % interval    {ends[0]:.4f} to {ends[1]:.4f} nats per token, from "
            f"{num_documents:,} documents"
        )
