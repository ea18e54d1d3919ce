"""`txl reproduce`: one of the paper's experiments, from the published text to its score.

The experiments and their corpora are data (configs/paper/experiments.toml). The files of a corpus
are found in the user's directory, and compared with the published ones.
"""

import contextlib
import glob
import hashlib
import json
import shlex
import sys
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from data_pipeline.errors import ConfigError, DataError, printable
from txl_dist.cli.options import AsJson, Overrides, path_argument

if TYPE_CHECKING:
    from data_pipeline.shards.manifest import ShardManifest
    from data_pipeline.tokenizers.recipes import RecipeName

RESULT = "reproduction.json"
CONFIGS = Path(__file__).parents[2] / "configs" / "paper"
EXPERIMENTS_NAME = "experiments.toml"


def reproduce(
    name: Annotated[str, typer.Argument(metavar="NAME", help="An experiment, see --list.")] = "",
    overrides: Overrides = None,
    data: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Directory of the published files.", parser=path_argument),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="For dataset, run and result. Default: runs/NAME.",
            parser=path_argument,
        ),
    ] = None,
    on: Annotated[str, typer.Option(help="As for txl train and txl eval.")] = "ray",
    ranks: Annotated[int, typer.Option(min=1, help="Ranks and evaluation workers.")] = 1,
    workers: Annotated[int, typer.Option(min=1, help="Processes of the preparation.")] = 1,
    as_json: AsJson = False,
    list_: Annotated[bool, typer.Option("--list", help="List the experiments.")] = False,
) -> None:
    """Prepare, train and evaluate one of the paper's experiments, and compare with its result.

    If it is stopped, run it again to continue. Overrides of the config, for example fewer steps,
    and files that are not as published are listed with the score.

    Example: txl reproduce enwik8-base --data downloads/ --ranks 8
    """
    from data_pipeline.shards.manifest import load_manifest
    from txl_dist.cli.evaluation_output import RESULT_NAME

    if list_:
        for each, experiment in experiments().items():
            published = "-" if experiment.published is None else f"{experiment.published:g}"
            metric = experiment.metric.replace("_", " ")
            print(f"{each:14}{metric:20}{published:>6}   {experiment.corpus.source}")
        return
    if name not in experiments():
        raise ConfigError(f"txl reproduce {name!r}: expected one of {', '.join(experiments())}")
    experiment, out = experiments()[name], out or Path("runs", name)
    if data is None:
        raise ConfigError(
            f"txl reproduce {name}: give the directory of the published files with --data DIR. "
            f"Source: {experiment.corpus.source}"
        )
    corpus, run, dataset = experiment.corpus, out / "run", out / "data"
    found = find_published(corpus, data)
    # With --json only the result goes to standard output.
    with contextlib.redirect_stdout(sys.stderr if as_json else sys.stdout):
        _run_command(
            *("prepare", *found.inputs(), "--format", corpus.format, "--recipe", corpus.recipe),
            *("--out", dataset, "--workers", workers),
        )
        differences = [*found.differences(), *count_differences(corpus, load_manifest(dataset))]
        for difference in differences:  # before hours of training
            print(f"not the paper's data: {difference}", file=sys.stderr)
        _run_command(
            *("train", CONFIGS / f"{name}.yaml", f"directory={run}", f"data.path={dataset}"),
            *(*(overrides or []), "--on", on, "--ranks", ranks),
        )
        options = {f"--{key.replace('_', '-')}": n for key, n in experiment.lengths.items()}
        lengths = [word for option in options.items() for word in option]
        _run_command(
            *("eval", run, dataset, "--split", "test", *lengths, "--same-length"),
            *("--on", on, "--workers", ranks, "--resume", "--out", out / "test"),
        )
    result = json.loads((out / "test" / RESULT_NAME).read_text())
    comparison = _comparison(name, experiment, result, overrides or [], differences)
    (out / RESULT).write_text(json.dumps(comparison, indent=1) + "\n")
    print(json.dumps(comparison) if as_json else _text_of(comparison))


def _run_command(*words: object) -> None:
    """Run a txl command by its words, and print them: what is printed does the same."""
    from txl_dist.cli.app import app

    texts = [str(word) for word in words]
    print(f"$ txl {shlex.join(texts)}", file=sys.stderr, flush=True)
    code = typer.main.get_command(app)(texts, prog_name="txl", standalone_mode=False)
    if code:
        raise typer.Exit(code)


def _comparison(
    name: str,
    experiment: "Experiment",
    result: dict[str, Any],
    overrides: list[str],
    differences: list[str],
) -> dict[str, Any]:
    """The content of the result file. A token of enwik8 and text8 is a character of the paper."""
    key = "perplexity" if experiment.metric == "perplexity" else "bits_per_token"
    return {
        "experiment": name,
        "metric": experiment.metric,
        "score": result[key],
        "published": experiment.published,
        "source": f"arXiv:1901.02860, {experiment.table}" if experiment.table else None,
        "overrides": overrides,
        "not_the_papers_data": differences,
        "evaluation": result,
    }


def _text_of(comparison: dict[str, Any]) -> str:
    published, score, source = (comparison[key] for key in ("published", "score", "source"))
    overrides = [" ".join(comparison["overrides"])] if comparison["overrides"] else []
    lines = [
        f"{comparison['experiment']}, test, {comparison['metric'].replace('_', ' ')}",
        f"  this run   {'out of range' if score is None else f'{score:.4f}'}",
        f"  the paper  {'no result' if published is None else f'{published} ({source})'}",
        *(f"  not the paper's data: {each}" for each in comparison["not_the_papers_data"]),
        *(f"  not the paper's settings: {each}" for each in overrides),
        f"  protocol: {comparison['evaluation']['protocol']}",
    ]
    return "\n".join(lines)


# --- the paper's experiments, and the files of their corpora --------------------------------------


@dataclass(frozen=True, kw_only=True)
class Layout:
    """One way in which the files of a corpus are published."""

    inputs: dict[str, str]
    """Path or pattern by split, below the directory that the user gives."""
    files: dict[str, str] = field(default_factory=dict)
    """Name, or names in braces -> published digest (ALGORITHM:HEX, of hashlib); "": not known."""


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """The published files of a corpus, and how they become a dataset."""

    recipe: "RecipeName"
    layouts: tuple[Layout, ...]
    """The first one that is there is used. With the recipe's fixed splits, it has only train."""
    source: str
    """Where to get the files."""
    format: str = "text"
    tokens: dict[str, int] = field(default_factory=dict)
    """By split, as published, with the line ends of word models; {} if not known."""
    words: int | None = None
    """Of the vocabulary, as published, with the line end; None if not known."""


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """One row of the paper's tables."""

    corpus: Corpus
    metric: Literal["perplexity", "bits_per_character"]
    lengths: dict[Literal["tgt_len", "mem_len", "clamp_len"], int]
    """Of the evaluation; same_length is always on."""
    published: float | None = None
    """On the test split; None: the paper has none."""
    table: str = ""


@cache
def experiments() -> Mapping[str, Experiment]:
    """All experiments by name. Raises ConfigError if their file is not there."""
    path = CONFIGS / EXPERIMENTS_NAME
    if not path.exists():
        raise ConfigError(
            f"{path} does not exist: the configs are part of the repository, not of the "
            "installed package. Install txl from a clone: pip install -e ."
        )
    content = tomllib.loads(path.read_text("utf-8"))
    corpora = {}
    for name, values in content["corpora"].items():
        layouts = tuple(Layout(**layout) for layout in values["layouts"])
        corpora[name] = Corpus(**{**values, "layouts": layouts})
    return {
        name: Experiment(**{**values, "corpus": corpora[values["corpus"]]})
        for name, values in content["experiments"].items()
    }


@dataclass(frozen=True, slots=True)
class FoundFiles:
    """The files of one layout of a corpus, in one directory."""

    directory: Path
    layout: Layout

    def files(self, split: str) -> list[Path]:
        return sorted(self.directory.glob(self.layout.inputs[split]))

    def inputs(self) -> list[str]:
        """The inputs of `txl prepare`: SPLIT=PATH, or one path if the recipe has fixed splits."""
        inputs = []
        for split, pattern in self.layout.inputs.items():
            path = str(self.directory / pattern)
            if "*" in pattern:
                path = f"{glob.escape(str(self.directory))}/{pattern}"
            inputs.append(f"{split}={path}" if len(self.layout.inputs) > 1 else path)
        return inputs

    def differences(self) -> Iterator[str]:
        """What is not as published: files that are missing, and their digests."""
        from braceexpand import braceexpand

        found = {path.name: path for split in self.layout.inputs for path in self.files(split)}
        digests = {
            name: digest
            for names, digest in self.layout.files.items()
            for name in braceexpand(names)
        }
        if missing := [name for name in digests if name not in found]:
            listed = ", ".join(missing[:3]) + (", ..." if len(missing) > 3 else "")
            yield f"{len(missing)} of {len(digests)} files are missing: {listed}"
        for name in filter(found.get, filter(digests.get, digests)):
            algorithm, _, expected = digests[name].partition(":")
            with found[name].open("rb") as file:
                digest = hashlib.file_digest(file, algorithm).hexdigest()
            if digest != expected:
                yield (
                    f"{name} has {algorithm} {digest[:12]}..., the published file has "
                    f"{expected[:12]}..."
                )


def find_published(corpus: Corpus, directory: Path) -> FoundFiles:
    """The files of the first layout that is complete in `directory`, or in one folder below it.

    Raises DataError if there is none, or if several folders have one.
    """
    # Archives may have a folder above their files.
    places = [directory, *sorted(path for path in directory.glob("*/") if path.is_dir())]
    shown = printable(str(directory))
    for layout in corpus.layouts:
        found = [FoundFiles(place, layout) for place in places]
        complete = [each for each in found if all(map(each.files, layout.inputs))]
        if len(complete) > 1 and complete[0].directory != directory:
            names = [printable(str(each.directory)) for each in complete]
            raise DataError(
                f"{shown} has files of {corpus.source} in several folders: {', '.join(names)}. "
                f"Give one of them: --data {names[0]}"
            )
        if complete:
            return complete[0]
    expected = "; or ".join(", ".join(layout.inputs.values()) for layout in corpus.layouts)
    raise DataError(
        f"{shown} must hold the published files of {corpus.source}, unpacked: {expected}"
    )


def count_differences(corpus: Corpus, manifest: "ShardManifest") -> Iterator[str]:
    """Tokens and vocabulary that differ from the published ones, in whatever files they came."""
    for split, published in corpus.tokens.items():
        tokens = manifest.splits[split].tokens
        if tokens != published:
            yield f"{split} has {tokens:,} tokens, the published {published:,}"
    words = manifest.vocab_size - 1  # without the end of a document
    if corpus.words is not None and words != corpus.words:
        yield f"the vocabulary has {words:,} words, the published {corpus.words:,}"
