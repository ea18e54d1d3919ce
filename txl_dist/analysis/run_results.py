"""The results about a run that other commands have written, read from their JSON files.

    RUN/evaluations/SPLIT-KEY.json        `txl eval`, one result
    .../result.json                       `txl eval --out DIR`: one, a list, or a sweep
    .../recl.json, .../attention.json     `txl recl --out DIR`, `txl attention --out DIR`

Files are searched in the run directory, at most MAX_DEPTH folders deep, and in directories that a
person names. A file that cannot be read, or is something else, becomes a note.

`read_result` reads one result for a model card, and refuses such a file.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Self, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from data_pipeline.system.strict import first_problem
from txl_dist.checkpoint.directory import model_name
from txl_dist.errors import CheckpointError
from txl_dist.evaluation.scores import kept_results

MAX_DEPTH = 2
MAX_BYTES = 64 * 2**20
"""A larger file is not read."""
NAMES = ("result.json", "recl.json", "attention.json")
SKIPPED = ("checkpoints", "logs", "events", "attempts", "profile")
"""Folders of a run directory that have no results."""


Number: TypeAlias = Annotated[float, Field(strict=True)]


class _Content(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)


class Bucket(_Content):
    """One row of a table of `txl eval --details`."""

    start: int = Field(alias="from")
    nats_per_token: float


class Details(_Content):
    """The tables by position of `txl eval --details`."""

    by_document_position: tuple[Bucket, ...] = ()
    by_segment_position: tuple[Bucket, ...] = ()


class Evaluation(_Content):
    """One result of `txl eval`."""

    checkpoint: str
    split: str
    mode: str
    tgt_len: int
    mem_len: int
    clamp_len: int | None = None
    same_length: bool = False
    weights: str = ""
    precision: str = ""
    tokens_scored: int
    nats_per_token: Number
    perplexity: Number | None
    bits_per_token: Number | None = None
    bits_per_byte: Number | None = None
    word_perplexity: Number | None = None
    data_sha256: str
    model_sha256: str
    protocol: str
    details: Details | None = None

    @property
    def name(self) -> str:
        """`RUN/step-NNNNNNNN`, or the name of the exported model."""
        return model_name(Path(self.checkpoint))

    @property
    def key(self) -> tuple[Any, ...]:
        """Equal for results of the same evaluation."""
        return (*self.settings, self.mem_len)

    @property
    def settings(self) -> tuple[Any, ...]:
        """Everything that the score depends on, except the length of the memory."""
        return (
            self.model_sha256, self.data_sha256, self.split, self.mode, self.tgt_len,
            self.clamp_len, self.same_length, self.weights, self.precision, self.tokens_scored,
        )  # fmt: skip


class _Point(_Content):
    context: int
    nats: float
    low: float
    high: float


class _Recl(_Content):
    r: float
    recl: int
    low: int
    high: int
    is_lower_bound: bool


class ReclModel(_Content):
    name: str
    curve: tuple[_Point, ...]
    recl: tuple[_Recl, ...] = ()


class Recl(_Content):
    """A recl.json."""

    group: str
    split: str
    positions: int
    protocol: str
    models: tuple[ReclModel, ...]

    @model_validator(mode="after")
    def _require_rows(self) -> Self:
        if len({tuple(each.r for each in model.recl) for model in self.models}) > 1:
            raise ValueError("the models do not have recl of the same fractions r")
        return self


class _Heads(_Content):
    by_distance: list[list[list[float]]]
    """[L, H, D]: shares of the attention."""
    memory: list[list[float]]
    """[L, H]."""


class _Settings(_Content):
    split: str
    tgt_len: int
    mem_len: int


class Attention(_Content):
    """An attention.json."""

    checkpoint: str
    settings: _Settings
    num_queries: int
    heads: _Heads
    even: _Heads

    @model_validator(mode="after")
    def _require_arrays(self) -> Self:
        sizes = set[int]()
        for mass in (self.heads, self.even):
            sizes |= {len(distances) for heads in mass.by_distance for distances in heads}
            num_heads = {len(heads) for heads in mass.by_distance}
            if len(num_heads) != 1 or 0 in num_heads:
                raise ValueError("by_distance is not [layers, heads, distances]")
            if {len(heads) for heads in mass.memory} != num_heads:
                raise ValueError("memory is not [layers, heads]")
        if len(sizes) != 1 or 0 in sizes:
            raise ValueError("by_distance is not [layers, heads, distances]")
        return self


@dataclass(frozen=True, slots=True)
class Results:
    """All results that were found."""

    evaluations: list[Evaluation] = field(default_factory=list)
    recl: list[Recl] = field(default_factory=list)
    attention: list[Attention] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """Files that were not read, and why."""


def read_results(directories: Sequence[Path]) -> Results:
    """The results in these directories; each evaluation once, the one with details first."""
    results, evaluations = Results(), list[Evaluation]()
    for path in sorted({path for each in directories for path in _files(each, MAX_DEPTH)}):
        try:
            if path.stat().st_size > MAX_BYTES:
                raise ValueError(f"it is larger than {MAX_BYTES:,} bytes")
            content = json.loads(path.read_bytes())
            if path.name == "recl.json":
                results.recl.append(Recl.model_validate(content))
            elif path.name == "attention.json":
                results.attention.append(Attention.model_validate(content))
            else:
                evaluations += map(Evaluation.model_validate, _scored(content))
        # ValidationError is a ValueError.
        except (OSError, ValueError, TypeError, RecursionError) as error:
            results.notes.append(f"{path} is not shown: {_problem(error)}")
    evaluations.sort(key=lambda each: (each.name, each.split, each.mem_len, not each.details))
    by_key: dict[tuple[Any, ...], Evaluation] = {}
    for each in evaluations:
        by_key.setdefault(each.key, each)
    results.evaluations.extend(by_key.values())
    return results


def read_result(path: Path, model_digest: str) -> Evaluation:
    """The result of `txl eval --json` in a file.

    Raises CheckpointError for another file, and for the result of another model.
    """
    try:
        result = Evaluation.model_validate(json.loads(path.read_bytes()))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{path} is not a result of txl eval ({_problem(error)}). Write one: txl eval "
            "CHECKPOINT DATA --json > FILE"
        ) from None
    if result.model_sha256 != model_digest:
        raise CheckpointError(
            f"{path} is the score of another model (sha256 {result.model_sha256[:12]}) than the "
            f"one that is exported (sha256 {model_digest[:12]}). Score this one: txl eval "
            "CHECKPOINT DATA --json > FILE"
        )
    return result


def results_of_model(run: Path, model_digest: str) -> list[Evaluation]:
    """What `txl eval` has kept in a run about these weights, sorted by name.

    A broken file, or one of another model, is not of interest here.
    """
    results = []
    for path in kept_results(run):
        with suppress(CheckpointError):
            results.append(read_result(path, model_digest))
    return results


def _problem(error: Exception) -> object:
    return first_problem(error) if isinstance(error, ValidationError) else error


def _files(directory: Path, depth: int) -> Iterator[Path]:
    if not directory.is_dir():
        return
    for path in directory.iterdir():
        if path.is_dir() and depth and path.name not in SKIPPED:
            yield from _files(path, depth - 1)
        elif path.name in NAMES or _is_kept_result(path):
            yield path


def _is_kept_result(path: Path) -> bool:
    # step-*.json are scores during training.
    return path.match("evaluations/*.json") and not path.name.startswith("step-")


def _scored(content: Any) -> Iterable[Any]:
    """The result objects in the content of a result.json."""
    if isinstance(content, list):
        return [each for part in content for each in _scored(part)]
    if isinstance(content, dict) and "candidates" in content:
        return [*content["candidates"], *content.get("reported", [])]
    return [content]


def curves_by_mem_len(evaluations: Iterable[Evaluation]) -> dict[str, list[tuple[int, float]]]:
    """(mem_len, nats per token), by label, where a model was scored with several lengths."""
    groups: dict[tuple[Any, ...], list[Evaluation]] = {}
    for each in evaluations:
        groups.setdefault(each.settings, []).append(each)
    return {
        f"{group[0].name}, {group[0].split}": sorted((e.mem_len, e.nats_per_token) for e in group)
        for group in groups.values()
        if len({each.mem_len for each in group}) > 1
    }
