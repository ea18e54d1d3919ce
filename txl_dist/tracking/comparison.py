"""Whether the points that a server has are those of the journal of a run."""

import itertools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from txl_dist.tracking.journal import JOURNAL, SUPERSEDED, read_metrics
from txl_dist.tracking.tracker import Recorded, points_of


def journal_metrics(run_dir: Path) -> set[str]:
    """Names of every metric in the journal and in the lines that resumes have superseded."""
    lines = itertools.chain(_lines(run_dir / JOURNAL), _lines(run_dir / SUPERSEDED))
    return {name for line in lines for name in line} - {"step", "time"}


def first_step_not_in_journal(run_dir: Path, recorded: Mapping[str, Recorded]) -> int | None:
    """The first step with a recorded point that the journal does not have; None if it has all.

    Points are compared by metric, step and time: a step that was trained again has another time.
    """
    missing = {metric: set(points) for metric, points in recorded.items()}
    for line in _lines(run_dir / JOURNAL):
        for point in points_of(line):
            missing.get(point.metric, set()).discard((point.step, point.milliseconds))
    return min((step for points in missing.values() for step, _ in points), default=None)


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    return read_metrics(path) if path.exists() else iter(())
