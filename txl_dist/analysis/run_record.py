"""RunRecord: everything that a run directory says about a run, for `txl report`.

metrics.jsonl     -> metrics, by name: (step, value) of every line that has it
logs/rank-0.log   -> starts, events, errors (run_log.py)
goodput.json      -> seconds by cause
checkpoints/      -> the newest manifest: parameters, data, versions
config.yaml       -> settings
evaluations/, ... -> results of other commands (run_results.py)

Reads only, and imports no torch. What is damaged or missing becomes a note.
"""

import math
import os
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from data_pipeline.errors import DataError
from data_pipeline.shards.manifest import load_manifest, open_tokenizer
from data_pipeline.shards.shard_reader import open_split
from txl_dist.analysis.run_results import Results, read_results
from txl_dist.checkpoint.directory import CheckpointDirectory
from txl_dist.checkpoint.manifest import CheckpointManifest, load_checkpoint_manifest
from txl_dist.config.config_file import flatten_settings
from txl_dist.config.data_config import dataset_paths
from txl_dist.config.yaml_file import YamlTextError, read_yaml
from txl_dist.errors import CheckpointError, ConfigError, TxlError
from txl_dist.tracking.journal import JOURNAL, SUPERSEDED, read_metrics
from txl_dist.tracking.tracker import as_text
from txl_dist.training.goodput import GoodputFile, read_goodput
from txl_dist.training.run_log import RunLog, read_log

Series: TypeAlias = Sequence[tuple[int, float]]
"""(step, value), in the order of the steps."""
Settings: TypeAlias = Mapping[str, Any]
"""By dotted name."""

SAMPLE_TOKENS = 400
"""Tokens of the held-out text that a report shows."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunRecord:
    """Everything that a report shows."""

    path: Path
    name: str
    metrics: dict[str, Series]
    superseded: Series
    """The training loss of steps that a resume or a rollback has superseded."""
    loss_by_tokens: Series
    """The training loss by the number of targets trained on."""
    last: dict[str, float]
    """The newest value of every metric, and `step`, `tokens` and `time`."""
    first_time: float
    log: RunLog
    goodput: GoodputFile | None
    checkpoints: list[tuple[int, str]]
    """(step, which of LATEST and BEST point to it)."""
    manifest: CheckpointManifest | None
    """Of the newest checkpoint that can be read."""
    settings: Settings
    config: str
    """The text of config.yaml, which has no secrets."""
    data: list[tuple[str, str]]
    """What is known of each dataset: (name, description)."""
    sample: str
    """The beginning of the held-out text; empty if it cannot be read."""
    results: Results
    generated: tuple[str, str] | None = None
    """A prompt and how the newest checkpoint continues it."""
    notes: list[str] = field(default_factory=list)
    """What could not be read, and why."""

    def series(self, name: str) -> Series:
        """The values of a metric; empty if the run does not have it."""
        return self.metrics.get(name, ())

    @property
    def evaluated(self) -> str | None:
        """The metric of the split that is evaluated during training, such as `valid/loss`."""
        return next((name for name in self.metrics if name.endswith("/loss")), None)

    @property
    def best(self) -> tuple[int, float] | None:
        """(step, loss) of the best evaluation during training."""
        points = [p for p in self.series(self.evaluated or "") if math.isfinite(p[1])]
        return min(points, key=lambda point: point[1], default=None)

    @property
    def num_parameters(self) -> int | None:
        if self.manifest is None:
            return self.log.parameters
        return sum(math.prod(entry.shape) for entry in self.manifest.parameters.values())


def read_run(run: Path, *, results: Sequence[Path] = ()) -> RunRecord:
    """Read a run directory, and results about it in other directories.

    Raises ConfigError if it has no metrics.
    """
    journal = run / JOURNAL
    if not journal.is_file():
        raise ConfigError(
            f"{run} has no {JOURNAL}: it is not a run directory, or no step was trained yet. Give "
            "the `directory` of a config that `txl train` has run"
        )
    lines = _read_journal(journal)
    if not lines.last:
        raise ConfigError(f"{journal} has no complete line; run the report again after a step")
    notes: list[str] = []
    log, goodput = _read_log(run, notes), _read_goodput(run / "goodput.json", notes)
    manifest, (config, settings) = _read_manifest(run, notes), _read_config(run, notes)
    data, sample = _read_data(settings, manifest, lines.metrics, notes)
    path = run / SUPERSEDED
    superseded = _read_journal(path).metrics if path.is_file() else {}
    found = read_results([run, *results])
    return RunRecord(
        path=run,
        name=run.resolve().name,
        metrics=lines.metrics,
        superseded=superseded.get("loss", ()),
        loss_by_tokens=lines.loss_by_tokens,
        last=lines.last,
        first_time=lines.first_time,
        log=log,
        goodput=goodput,
        checkpoints=_checkpoints(run),
        manifest=manifest,
        settings=settings,
        config=config,
        data=data,
        sample=sample,
        results=found,
        notes=[*notes, *found.notes],
    )


class _Journal(NamedTuple):
    """What the lines of a journal say; the fields of `RunRecord` with these names."""

    metrics: dict[str, Series]
    loss_by_tokens: Series
    last: dict[str, float]
    first_time: float


def _read_journal(path: Path) -> _Journal:
    metrics: dict[str, list[tuple[int, float]]] = defaultdict(list)
    loss_by_tokens: list[tuple[int, float]] = []
    last: dict[str, float] = {}
    first_time = 0.0
    for line in read_metrics(path):
        numbers = {name: value for name, value in line.items() if isinstance(value, int | float)}
        first_time = first_time or numbers.get("time", 0.0)
        last |= numbers
        if "tokens" in numbers and "loss" in numbers:
            loss_by_tokens.append((int(numbers["tokens"]), numbers["loss"]))
        for name, value in numbers.items():
            if name not in ("step", "tokens", "time"):
                metrics[name].append((line["step"], value))
    return _Journal({**metrics}, loss_by_tokens, last, first_time)


def _read_log(run: Path, notes: list[str]) -> RunLog:
    try:
        return read_log(run)
    except OSError as error:
        notes.append(f"logs/rank-0.log cannot be read: {error.strerror}")
        return RunLog()


def _read_goodput(path: Path, notes: list[str]) -> GoodputFile | None:
    goodput = read_goodput(path)
    if goodput is None:
        problem = "damaged" if path.exists() else "missing"
        notes.append(f"{path.name} is {problem}: goodput and restarts are not known")
    return goodput


def _read_manifest(run: Path, notes: list[str]) -> CheckpointManifest | None:
    directory = CheckpointDirectory(run)
    for step in reversed(directory.steps()):
        try:
            return load_checkpoint_manifest(directory.at(step))
        except CheckpointError as error:
            # A run that trains removes old checkpoints.
            if directory.at(step).exists():
                notes.append(str(error))
    return None


def _read_config(run: Path, notes: list[str]) -> tuple[str, Settings]:
    # Not validated: a run of another version may have other settings.
    with suppress(OSError, UnicodeDecodeError):
        text = (run / "config.yaml").read_text(encoding="utf-8")
        try:
            value = read_yaml(text).value
            return text, flatten_settings(value) if isinstance(value, dict) else {}
        except YamlTextError as error:
            notes.append(f"config.yaml{error.place}: {error}")
            return text, {}
    notes.append("config.yaml cannot be read: settings are not known")
    return "", {}


def _checkpoints(run: Path) -> list[tuple[int, str]]:
    directory = CheckpointDirectory(run)
    names = directory.pointers_by_step()
    return [(step, ", ".join(names.get(step, ()))) for step in directory.steps()]


# --- the data of a run ----------------------------------------------------------------------------


def _read_data(
    settings: Settings,
    manifest: CheckpointManifest | None,
    metrics: Mapping[str, Series],
    notes: list[str],
) -> tuple[list[tuple[str, str]], str]:
    """A description of each dataset, and the beginning of the held-out text."""
    recorded = _recorded_corpora(manifest)
    paths = dataset_paths(settings)
    described, sample = [], ""
    split = _held_out_split(settings, metrics)
    for name, path in paths.items():
        entry = recorded.get(name) or (next(iter(recorded.values()), {}) if not name else {})
        parts = [f"{entry['tokens']:,} training tokens"] if "tokens" in entry else []
        parts += [f"digest {entry['digest'][:12]}"] if "digest" in entry else []
        # At a URL, reading would use the network.
        if "://" not in path and Path(path).is_dir():
            try:
                digest, parts_now, text = _open_data(Path(path), split)
                sample = sample or text
                if digest[:12] != entry.get("digest", digest)[:12]:
                    notes.append(f"{path} is another dataset now: its digest is {digest[:12]}")
                else:
                    parts = parts_now
            except (TxlError, DataError, OSError) as error:
                notes.append(f"{path} cannot be read: {error}")
        described.append((path, ", ".join(parts) or "not found from here"))
    return described, sample


def _recorded_corpora(manifest: CheckpointManifest | None) -> dict[str, Mapping[str, Any]]:
    """What a checkpoint says about its corpora, by name (`CorpusEntry`)."""
    with suppress(KeyError, IndexError, TypeError):  # of another version
        corpora = manifest.state["phases"][-1]["corpora"] if manifest else []
        return {each["name"]: each for each in corpora}
    return {}


def _held_out_split(settings: Settings, metrics: Mapping[str, Series]) -> str:
    label = next((name for name in metrics if name.endswith("/loss")), "")
    return label.removesuffix("/loss").rpartition("/")[2] or str(
        settings.get("evaluation.split") or "valid"
    )


def _open_data(path: Path, split: str) -> tuple[str, list[str], str]:
    """Digest, description and the beginning of a split."""
    manifest = load_manifest(path)
    parts = [
        *(f"{entry.tokens:,} {name} tokens" for name, entry in manifest.train_first()),
        f"tokenizer {manifest.settings.tokenizer}",
        f"digest {manifest.digest[:12]}",
    ]
    if split not in manifest.splits:
        return manifest.digest, parts, ""
    source = open_split(path, split, manifest=manifest, cache_frames=1)
    ids = source.read(0, 0, min(SAMPLE_TOKENS, int(source.block_tokens[0])))
    text = open_tokenizer(path, manifest).decode_bytes(ids).decode("utf-8", errors="ignore")
    return manifest.digest, parts, text


def with_distinct_names(runs: Sequence[RunRecord]) -> list[RunRecord]:
    """Runs whose directories have the same name are named by their paths, as far as they differ."""
    count = Counter(run.name for run in runs)
    alike = [run.path.resolve() for run in runs if count[run.name] > 1]
    if len(set(alike)) < 2:
        return list(runs)
    common = Path(os.path.commonpath(alike))
    names = [str(run.path.resolve().relative_to(common)) for run in runs if count[run.name] > 1]
    renamed = iter(names)
    return [replace(run, name=next(renamed)) if count[run.name] > 1 else run for run in runs]


def differing_settings(runs: Sequence[RunRecord]) -> list[tuple[str, ...]]:
    """(name, value in each run) of every setting that is not the same in all runs."""
    names = dict.fromkeys(name for run in runs for name in run.settings if name != "directory")
    rows = [(name, *(as_text(run.settings.get(name, "")) for run in runs)) for name in names]
    return [row for row in rows if len(set(row[1:])) > 1]
