"""Journal lines as MLflow points, and whether a run has points that the journal does not have.

A point is its key, step and time: what a resume trains again is written at another time, so points
of the abandoned stretch differ from those that took their place.
"""

import itertools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from txl_dist.tracking.journal import JOURNAL, SUPERSEDED, read_metrics
from txl_dist.tracking.mlflow_client import Point, Recorded, clean_key


def points_of(line: Mapping[str, Any]) -> Iterator[Point]:
    """The numbers of a journal line, infinities and NaN among them."""
    seconds = line.get("time", 0)
    milliseconds = int(seconds * 1000) if isinstance(seconds, (int, float)) else 0
    for name, value in line.items():
        if name not in ("step", "time") and type(value) in (int, float):
            yield Point(clean_key(name), float(value), line["step"], milliseconds)


def metric_keys(run_dir: Path) -> set[str]:
    """The keys of every metric that this run directory ever journalled."""
    lines = itertools.chain(_lines(run_dir / JOURNAL), _lines(run_dir / SUPERSEDED))
    names = {name for line in lines for name in line}
    return {clean_key(name) for name in names - {"step", "time"}}


def first_step_not_in_journal(run_dir: Path, recorded: Mapping[str, Recorded]) -> int | None:
    """The first step with a recorded point that the journal does not have; None if it has all."""
    missing = {key: set(points) for key, points in recorded.items()}
    for line in _lines(run_dir / JOURNAL):
        for point in points_of(line):
            missing.get(point.key, set()).discard((point.step, point.milliseconds))
    return min((step for points in missing.values() for step, _ in points), default=None)


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    return read_metrics(path) if path.exists() else iter(())
