"""What several commands share: options and arguments, parsers of paths, workers and progress.

Most paths must be local, and some must exist: pathlib reads `s3://bucket/x` as the directory
`s3:/bucket/x` below the working directory. A command that takes no URL would write there, look
successful, and its output would be lost with the machine.

Progress is a live line on a terminal, and plain lines elsewhere, on standard error. `txl --help`
imports this module, so rich is imported only where a display is drawn.
"""

import json
import re
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from data_pipeline.errors import ConfigError
from data_pipeline.system.path_kind import PathKind, kind_of
from txl_dist.errors import CheckpointError, PreemptedError

if TYPE_CHECKING:
    from data_pipeline.system.files import StagedDirectory
    from data_pipeline.system.workers import Progress, Workers


def require_local(path: str) -> str:
    """Return `path`. Raises ConfigError if it is a URL."""
    from data_pipeline.system.sources import is_url, shown

    if is_url(path):
        raise ConfigError(
            f"{shown(path)}: expected a path on this machine, not a URL. Give a local path, and "
            "copy the files with the store's own tools; a dataset also with txl data push DIR "
            f"{shown(path)}"
        )
    return path


def path_argument(text: str) -> Path:
    """A `parser=` for typer: a path on this machine."""
    return Path(require_local(text))


def file_argument(text: str) -> Path:
    """A `parser=` for typer: a file to write on this machine."""
    path = path_argument(text)
    if path.is_dir():  # also an empty text, which is the working directory
        raise typer.BadParameter(f"{text!r} is a directory; give the path of a file to write")
    return path


def checkpoint_path(text: str) -> Path:
    """A `parser=` for typer: a local path that exists. Raises CheckpointError, before a command
    imports torch.
    """
    path = path_argument(text)
    if not path.exists():
        raise CheckpointError(f"{path} does not exist; give a run directory or a checkpoint in it")
    return path


def require_order(command: str, checkpoints: Iterable[Path]) -> None:
    """Raise CheckpointError if a dataset was given before the model."""
    for path in checkpoints:
        if kind_of(path) is PathKind.DATASET:
            raise CheckpointError(
                f"{path} is a dataset; the order is txl {command} CHECKPOINT DATA"
            )


def listed_names(option: str, text: str) -> list[str]:
    """The names in an option `NAME,NAME,...`."""
    names = [part.strip() for part in text.split(",")]
    if not all(names):
        raise ConfigError(f"{option} {text!r}: expected names, separated by commas")
    return names


def whole_numbers(option: str, text: str) -> list[int]:
    """The numbers in an option `N,N,...`, each from 1 to 9,999,999."""
    parts = [part.strip() for part in text.split(",")]
    numbers = [int(part) if re.fullmatch("[0-9]{1,7}", part) else 0 for part in parts]
    if not all(numbers):
        raise ConfigError(
            f"{option} {text!r}: expected whole numbers from 1 to 9999999, separated by commas"
        )
    return numbers


@contextmanager
def staged_output(out: Path | None, last: str) -> "Iterator[StagedDirectory | None]":
    """The directory of `--out`, whose file `last` appears last. None without one.

    Open it first: an unusable directory must be an error before minutes of computing.
    """
    from data_pipeline.system.files import StagedDirectory, require_writable

    if out is None:
        yield None
        return
    with StagedDirectory(out, last=last) as staged:
        require_writable(out)
        yield staged


def note(line: str) -> None:
    """Print a line for people, where standard output has the result."""
    print(line, file=sys.stderr)


def print_result(content: Mapping[str, object], text: str, *, as_json: bool) -> None:
    print(json.dumps(content) if as_json else text)


def print_table(rows: Sequence[Sequence[str]], *, num_texts: int = 0) -> None:
    """Print rows in columns, the first `num_texts` of them aligned left, the others right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [
            f"{cell:{'<' if number < num_texts else '>'}{width}}"
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        print("  ".join(cells).rstrip())


# --- options and arguments ------------------------------------------------------------------------

AsJson = Annotated[
    bool,
    typer.Option("--json", help="Print the result as JSON, and nothing else on standard output."),
]

ConfigPath = Annotated[
    Path,
    typer.Argument(
        metavar="CONFIG",
        help="YAML file of one run, or the name of a config of the package (txl config list).",
        parser=path_argument,
    ),
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="k.e.y=value", help="Settings that replace those of the file."),
]

CHECKPOINT_HELP = (
    "A checkpoint, a run directory (its newest checkpoint), or a directory that txl export or txl "
    "import wrote."
)
Checkpoint = Annotated[
    Path, typer.Argument(metavar="CHECKPOINT", help=CHECKPOINT_HELP, parser=checkpoint_path)
]
Run = Annotated[Path, typer.Argument(metavar="RUN", help="A run directory.", parser=path_argument)]
# For commands that need what exported models lack: the manifest, hashes, the state of training.
SavedCheckpoint = Annotated[
    Path,
    typer.Argument(
        metavar="CHECKPOINT",
        help="A checkpoint, or a run directory (its newest checkpoint).",
        parser=checkpoint_path,
    ),
]
EvaluationData = Annotated[
    str,
    typer.Argument(metavar="DATA", help="Directory that txl prepare wrote, or the URL of a copy."),
]
TgtLen = Annotated[
    int | None,
    typer.Option(min=1, help="Tokens per segment; default: as in training, or 128 if unknown."),
]
MemLen = Annotated[
    int | None, typer.Option(min=0, help="Tokens of memory; default: as in training.")
]

NumWorkers = Annotated[
    int, typer.Option(min=1, help="Number of processes, or of Ray tasks at a time.")
]


On = Annotated[
    str,
    typer.Option(
        metavar="processes|ray|ADDRESS",
        help="Where workers run. processes: on this machine. ray: a Ray started for this command. "
        "An address, or auto for that of this host: a running Ray cluster, whose nodes must all "
        "see the input and the output directory.",
        callback=lambda on: "processes" if on == "local" else on,  # `local` of older scripts
    ),
]


# --- workers --------------------------------------------------------------------------------------


@contextmanager
def open_workers(on: str, num_workers: int, *, use_gpus: bool = False) -> "Iterator[Workers]":
    """Workers in this process, in child processes, or on Ray; stopped at the end of the context.

    `use_gpus`: with a GPU each, if there are any.
    """
    from data_pipeline.system.signals import sigterm_interrupts
    from txl_dist.launch.launcher import find_launcher

    # ray.init installs its own SIGTERM handler, so ours is installed after it.
    workers = find_launcher(on).workers(num_workers, use_gpus=use_gpus)
    with workers as pool, sigterm_interrupts():
        yield pool


@contextmanager
def stoppable(advice: str) -> Iterator[None]:
    """Turn SIGTERM and Ctrl-C into PreemptedError, after everything inside has cleaned up."""
    from data_pipeline.system.signals import sigterm_interrupts

    try:
        with sigterm_interrupts():
            yield
    except (KeyboardInterrupt, SystemExit):  # SystemExit: Ray's reaction to SIGTERM while it starts
        raise PreemptedError(f"stopped on request; {advice}") from None


# --- progress -------------------------------------------------------------------------------------

SILENT_SECONDS = 4.0
"""Before each plain line: shorter work is not named."""


@contextmanager
def running(text: str) -> Iterator[None]:
    """Show `text` and the time while the context is open."""
    start = time.monotonic()
    with _shown(lambda: f"{text}: {time.monotonic() - start:.0f} s"):
        yield


@dataclass(frozen=True, slots=True)
class WorkUnit:
    name: str
    size: int = 1
    digits: int = 0

    def show(self, amount: float) -> str:
        return f"{amount / self.size:,.{self.digits}f}"


MIB = WorkUnit("MiB", 2**20, 1)
TOKENS = WorkUnit("tokens")


@contextmanager
def work_progress(unit: WorkUnit, workers: "Workers | None" = None) -> "Iterator[Progress]":
    """Yield `show(label, done, total)`, to be called often, both in bytes or in units."""
    work = _Work(unit, workers)
    with _shown(work.line):
        yield work.update


class _Work:
    """What is known of the work: its label, amount and rate."""

    def __init__(self, unit: WorkUnit, workers: "Workers | None") -> None:
        self.unit, self.workers, self.label = unit, workers, ""
        self.done = self.total = self._first_done = 0
        self._start = self._began_at = self._updated = time.monotonic()

    def update(self, label: str, done: int, total: int) -> None:
        self._updated = time.monotonic()
        # While `done` does not change, only finished units are looked up: that time is not work.
        if label != self.label or done == self._first_done:
            self.label, self._began_at, self._first_done = label, self._updated, done
        if total:
            self.done, self.total = done, total

    def line(self) -> str:
        """`reading: 60.0 of 90.0 MiB (67%), 10.0 MiB/s, 3 s left`.

        Without a rate of this label: what the work waits for, and the time since it began.
        """
        unit, waited = self.unit, time.monotonic() - self._start
        done, seconds = self.done - self._first_done, self._updated - self._began_at
        has_rate = done > 0 and seconds > 0
        idle = self.workers if not has_rate else None
        if idle and (missing := idle.missing()):
            return f"waiting {waited:,.0f} s for {missing}"
        if not self.total:
            return f"starting, {waited:,.0f} s"
        current, total = self.done, self.total
        if self.workers and unit is MIB:  # with the bytes of units that are not finished
            current = min(current + self.workers.unfinished_bytes(), total)
        amounts = f"{unit.show(current)} of {unit.show(total)} {unit.name} ({current / total:.0%})"
        if not has_rate:
            return f"{self.label}: {amounts}, {waited:,.0f} s"
        rate = done / seconds
        left = (total - self.done) / rate
        return f"{self.label}: {amounts}, {unit.show(rate)} {unit.name}/s, {left:,.0f} s left"


@contextmanager
def _shown(line: Callable[[], str]) -> Iterator[None]:
    """Show `line()` again and again, on standard error, while the context is open."""
    if sys.stderr.isatty():
        from rich.console import Console
        from rich.live import Live
        from rich.text import Text

        with Live(
            console=Console(stderr=True),
            get_renderable=lambda: Text(line()),
            refresh_per_second=10,
            transient=True,
        ):
            yield
        return
    ended = threading.Event()

    def print_lines() -> None:
        while not ended.wait(SILENT_SECONDS):
            sys.stderr.write(f"{line()}\n")  # one call, so lines of two threads are not mixed
            sys.stderr.flush()

    thread = threading.Thread(target=print_lines, name="progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
