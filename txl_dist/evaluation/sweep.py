"""`txl eval --sweep`: the memory options with the best score on one split, reported on the others.

The paper chose mem_len and clamp_len of its published numbers in this way: by the validation split.
Every combination scores the same targets, so the lowest loss is the best one.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from data_pipeline.system.progress import Progress
from data_pipeline.system.workers import Workers
from txl_dist.errors import ConfigError
from txl_dist.evaluation.distributed import PlannedJob, evaluate_on_workers
from txl_dist.evaluation.evaluate import EvaluationResult

SMALLEST = {"tgt_len": 1, "mem_len": 0, "clamp_len": 0}
"""The options that can be swept, and the smallest value of each. clamp_len 0: no clamping."""
EXAMPLE = "--sweep mem_len=0,128,640 --sweep clamp_len=0,400"


def parse_sweep(texts: Sequence[str]) -> dict[str, list[int]]:
    """Values by option. Each text has one or more assignments such as `mem_len=0,128,640`.

    Raises ConfigError naming the assignment that is wrong.
    """
    values: dict[str, list[int]] = {}
    for assignment in " ".join(texts).split():
        name, equals, numbers = assignment.partition("=")
        if not equals or name not in SMALLEST:
            raise ConfigError(
                f"--sweep {assignment!r}: expected an option of {', '.join(SMALLEST)} and its "
                f"values, as in {EXAMPLE}"
            )
        if name in values:
            raise ConfigError(f"--sweep {assignment!r}: {name} is there twice; list all its values")
        values[name] = [_value(assignment, name, number) for number in numbers.split(",")]
        if len(set(values[name])) < len(values[name]):
            raise ConfigError(f"--sweep {assignment!r}: a value is there twice")
    return values


def _value(assignment: str, name: str, number: str) -> int:
    if not number.isdecimal() or int(number) < SMALLEST[name]:
        raise ConfigError(
            f"--sweep {assignment!r}: {number!r} is not a whole number of at least {SMALLEST[name]}"
        )
    return int(number)


def combinations(values: Mapping[str, Sequence[int]]) -> list[dict[str, int]]:
    """Every combination of the values, the last option varying fastest."""
    return [dict(zip(values, each, strict=True)) for each in product(*values.values())]


@dataclass(frozen=True, slots=True, eq=False)
class PlannedSweep:
    """The jobs of one model: candidates[combination][split]. The first split selects."""

    candidates: Sequence[Sequence[PlannedJob]]


@dataclass(frozen=True, slots=True, eq=False)
class SweepResult:
    """The scores of one model."""

    candidates: list[EvaluationResult]
    """Result of each combination on the first split."""
    best: int
    """The combination with the lowest loss; the first of equal ones."""
    reported: list[EvaluationResult]
    """Results of the best combination on the other splits."""


def evaluate_sweep(
    sweeps: Sequence[PlannedSweep],
    workers: Workers,
    *,
    progress: Progress = lambda phase, done, total: None,
    note: Callable[[str], None] = lambda line: None,
) -> list[SweepResult]:
    """Score all combinations on the first split, and the best one of each model on the others."""
    first_jobs = [jobs[0] for sweep in sweeps for jobs in sweep.candidates]
    scored = iter(evaluate_on_workers(first_jobs, workers, progress=progress, note=note))
    candidates = [[next(scored) for _ in sweep.candidates] for sweep in sweeps]
    best = [_argmin([result.sums.nats for result in results]) for results in candidates]
    chosen = [sweep.candidates[number] for sweep, number in zip(sweeps, best, strict=True)]
    other_jobs = [job for jobs in chosen for job in jobs[1:]]
    if other_jobs:
        scored = iter(evaluate_on_workers(other_jobs, workers, progress=progress, note=note))
    reported = [[next(scored) for _ in jobs[1:]] for jobs in chosen]
    return [SweepResult(*each) for each in zip(candidates, best, reported, strict=True)]


def _argmin(values: Sequence[float]) -> int:
    return min(range(len(values)), key=values.__getitem__)
