"""RunRecord: what a run directory says about a run, for its report. Reads only; damage is a note.

metrics.jsonl   -> metrics, by name: (step, value) of every line that has it
logs/rank-0.log -> events: the lines that are no step lines
goodput.json    -> seconds by cause
config.yaml, checkpoints/
"""

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from txl_dist.checkpoint.directory import CheckpointDirectory
from txl_dist.errors import CheckpointError
from txl_dist.tracking.journal import JOURNAL, read_metrics
from txl_dist.training.goodput import GoodputFile, read_goodput

Series: TypeAlias = Sequence[tuple[int, float]]
"""(step, value), in the order of the steps."""

_STEP_LINE = re.compile(r"\d\d:\d\d:\d\d step \d+ \|")
MAX_EVENTS = 500
"""The newest lines of the log that a report shows."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunRecord:
    """Everything that a report shows."""

    path: Path
    metrics: dict[str, Series]
    last: dict[str, float]
    """The newest value of every metric, and `step`, `tokens` and `time`."""
    first_time: float
    goodput: GoodputFile | None
    events: list[str]
    num_omitted_events: int
    checkpoints: list[tuple[int, str]]
    """(step, which of LATEST and BEST point to it)."""
    config: str
    """The text of config.yaml, which has no secrets."""

    def series(self, name: str) -> Series:
        """The values of a metric; empty if the run does not have it."""
        return self.metrics.get(name, ())

    @property
    def evaluated(self) -> str | None:
        """The metric of the split that is evaluated during training, such as `valid/loss`."""
        return next((name for name in self.metrics if name.endswith("/loss")), None)


def read_run(run: Path) -> RunRecord:
    """Read a run directory. Raises CheckpointError if it has no metrics."""
    journal = run / JOURNAL
    if not journal.is_file():
        raise CheckpointError(
            f"{run} has no {JOURNAL}: it is not a run directory, or no step was trained yet. Give "
            "the `directory` of a config that `txl train` has run"
        )
    metrics: dict[str, list[tuple[int, float]]] = defaultdict(list)
    last: dict[str, float] = {}
    first_time = 0.0
    for line in read_metrics(journal):
        numbers = {name: value for name, value in line.items() if isinstance(value, int | float)}
        first_time = first_time or numbers.get("time", 0.0)
        last |= numbers
        for name, value in numbers.items():
            if name not in ("step", "tokens", "time"):
                metrics[name].append((line["step"], value))
    if not last:
        raise CheckpointError(f"{journal} has no complete line; run the report again after a step")
    events = _events(run / "logs" / "rank-0.log")
    return RunRecord(
        path=run,
        metrics=dict(metrics),
        last=last,
        first_time=first_time,
        goodput=read_goodput(run / "goodput.json"),
        events=events[-MAX_EVENTS:],
        num_omitted_events=max(0, len(events) - MAX_EVENTS),
        checkpoints=_checkpoints(run),
        config=_text(run / "config.yaml"),
    )


def _events(log: Path) -> list[str]:
    return [line for line in _text(log).splitlines() if line and not _STEP_LINE.match(line)]


def _checkpoints(run: Path) -> list[tuple[int, str]]:
    directory = CheckpointDirectory(run)
    pointers = {name: directory.pointer(name) for name in ("LATEST", "BEST")}
    return [
        (step, ", ".join(name for name, target in pointers.items() if target == step))
        for step in directory.steps()
    ]


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        return f"({path.name} cannot be read: {error.strerror})"
