"""What `txl eval` prints and writes: one score, a table of scores, or a sweep."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from txl_dist.evaluation.distributed import PlannedJob
    from txl_dist.evaluation.evaluate import EvaluationResult
    from txl_dist.evaluation.job import EvaluationJob
    from txl_dist.evaluation.sweep import PlannedSweep, SweepResult


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
        planned: "Sequence[PlannedSweep]",
        results: "Sequence[SweepResult]",
        *,
        swept: list[str],
        num_workers: int,
    ) -> Self:
        models = []
        for sweep, result in zip(planned, results, strict=True):
            scored = [
                ScoredJob(jobs[0].given, score, number == result.best)
                for number, (jobs, score) in enumerate(
                    zip(sweep.candidates, result.candidates, strict=True)
                )
            ]
            others = zip(sweep.candidates[result.best][1:], result.reported, strict=True)
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
        per_byte = "-" if result.bits_per_byte is None else f"{result.bits_per_byte:.4f}"
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
    from txl_dist.evaluation.chunks import MAX_OVERHEAD

    job, result = scored.job, scored.result
    sums, settings = result.sums, result.settings
    print(f"{job.checkpoint} on {job.data}, split {settings.split} ({settings.mode})")
    if job.weights == "averaged":
        print("  weights          averaged over steps; those of the last one: --weights last")
    print(f"  targets scored   {sums.num_tokens:,}")
    print(f"  nats             {sums.nats:.4f}  ({sums.nats_per_token:.4f} per token)")
    print(f"  perplexity       {sums.perplexity:.4f}")
    print(f"  bits per token   {sums.bits_per_token:.4f}")
    if result.bits_per_byte is not None:
        print(f"  bits per byte    {result.bits_per_byte:.4f}")
    if result.bits_per_character is not None:
        print(f"  bits per char    {result.bits_per_character:.4f}")
    if result.word_perplexity is not None:
        print(f"  word perplexity  {_show(result.word_perplexity)}")
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
    interval = result.details.interval
    if interval is None:
        print("  95 % interval    none: the split has one document, so documents cannot be drawn")
        return
    low, high = interval.nats_per_token
    print(
        f"  95 % interval    {low:.4f} to {high:.4f} nats per token, from "
        f"{interval.num_documents:,} documents"
    )
