"""`txl reproduce`: one of the paper's experiments, from the published text to its score.

It runs `txl prepare`, `train` and `eval`, and prints these commands. The experiments and the
published files of their corpora are data (configs/paper/experiments.toml). The files of a corpus
are found in the user's directory in any published form, and compared with the published ones.
"""

import contextlib
import glob
import hashlib
import itertools
import json
import shlex
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from data_pipeline.errors import DataError, printable
from data_pipeline.system.files import write_file
from txl_dist.cli.options import AsJson, Overrides, path_argument, print_result, print_table
from txl_dist.errors import ConfigError
from txl_dist.runtime.process import num_gpus

if TYPE_CHECKING:
    from data_pipeline.shards.manifest import ShardManifest

SHRUNK = (
    *("model.n_layer=2", "model.d_model=64", "model.n_head=2", "model.d_head=32"),
    *("model.d_inner=128", "data.num_lanes=4", "data.tgt_len=32", "training.num_steps=20"),
    *("model.mem_len=32", "optimizer.warmup_steps=0", "optimizer.averaging_start_step=1"),
    # A sample of the corpus has fewer words than cutoffs need.
    *("model.cutoffs=[]", "model.div_val=1", "model.tie_projs=[]"),
    *("evaluation.max_tokens=2000", "tracking.enabled=false"),
)
"""What --shrink changes in every config. A row's own settings replace these."""
SHRUNK_LENGTHS = {"tgt_len": 128, "mem_len": 32}
"""The largest lengths of the evaluation with --shrink."""


# --- the experiments and their files --------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Layout:
    """One form in which the files of a corpus are published."""

    inputs: dict[str, str]
    """Path or pattern by split, below the directory that the user gives, or in the archive. `all`:
    a file that the recipe cuts into splits."""
    files: dict[str, str] = field(default_factory=dict)
    """Name, or names in braces -> published digest (ALGORITHM:HEX, of hashlib); "": not known."""
    archive: str = ""
    """Name or pattern of the archive that has the inputs, without the folder that contains all."""


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """The published files of a corpus, and how they become a dataset."""

    recipe: str
    layouts: tuple[Layout, ...]
    """The first one that is there is used."""
    source: str
    format: str = "text"
    tokens: dict[str, int] = field(default_factory=dict)
    """By split, as published, with the line ends of word models; {} if not known."""
    words: int | None = None
    """Of the vocabulary, as published, with the line end; None if not known."""
    differences: tuple[str, ...] = ()
    """What its recipe does otherwise than the paper's code, with the published files, too."""


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """One row of the paper's tables."""

    corpus: Corpus
    metric: Literal["perplexity", "bits_per_character"]
    lengths: dict[str, int]
    """tgt_len, mem_len and clamp_len of the evaluation; same_length is always on."""
    config: str
    """Name of the config, as in `txl config list`."""
    settings: tuple[str, ...] = ()
    split: str = "test"
    """Of which the paper's result is."""
    published: float | None = None
    """None: the paper has none."""
    table: str = ""
    ours: str = ""
    """What the paper does not say, so that it was chosen here."""


@cache
def experiments() -> dict[str, Experiment]:
    """Return all experiments that can be run, by name."""
    from pydantic import TypeAdapter

    from txl_dist.config.config_file import configs_directory

    path = configs_directory() / "paper" / "experiments.toml"
    content = tomllib.loads(path.read_text("utf-8"))
    for name, values in content["experiments"].items():
        values.setdefault("config", f"paper/{name}")
        values["corpus"] = content["corpora"][values["corpus"]]
    return TypeAdapter(dict[str, Experiment]).validate_python(content["experiments"])


@dataclass(frozen=True, slots=True)
class FoundFiles:
    """The files of one layout of a corpus, in one directory."""

    directory: Path
    layout: Layout

    def files(self, split: str) -> list[Path]:
        """The files that have the split: of an archive, the archive."""
        pattern = self.layout.archive or self.layout.inputs[split]
        return sorted(filter(Path.is_file, self.directory.glob(pattern)))

    def inputs(self) -> list[str]:
        """The inputs of `txl prepare`: SPLIT=PATH, or one path in which it finds the splits."""
        inputs = []
        for split, pattern in self.layout.inputs.items():
            files = self.files(split)
            if self.layout.archive:
                archive = str(files[0])
                path = f"{glob.escape(archive) if '*' in pattern else archive}/{pattern}"
            elif len(files) == 1:
                path = str(files[0])
            else:
                path = f"{glob.escape(str(self.directory))}/{pattern}"
            inputs.append(path if split == "all" else f"{split}={path}")
        return inputs

    def differences(self) -> Iterator[str]:
        """What is not as published: files that are missing, and their digests."""
        from braceexpand import braceexpand

        found = {path.name: path for split in self.layout.inputs for path in self.files(split)}
        for names, published in self.layout.files.items():
            algorithm, _, expected = published.partition(":")
            for name in braceexpand(names):
                if name not in found:
                    yield f"{name} is missing"
                elif published:
                    with found[name].open("rb") as file:
                        digest = hashlib.file_digest(file, algorithm).hexdigest()
                    if digest != expected:
                        yield f"{name} has {algorithm} {digest}, the published file has {expected}"


def find_published(corpus: Corpus, given: Path) -> FoundFiles:
    """The files of the first layout that is complete in `given`, or in one folder below it.

    `given` can also be one of those files. Raises DataError if there are none, or if several
    folders have them.
    """
    shown, source = printable(str(given)), corpus.source
    if not given.exists():
        raise DataError(f"{shown}: there is no such file or directory. Expected files of {source}")
    directory = given.parent if given.is_file() else given
    # Archives may have folders above their files.
    places = [directory, *sorted(path for path in directory.glob("*/") if path.is_dir())]
    for layout in corpus.layouts:
        complete = [
            found
            for found in (FoundFiles(place, layout) for place in places)
            if all(files := [found.files(split) for split in layout.inputs])
            and (given.is_dir() or given in itertools.chain(*files))
        ]
        if len(complete) > 1 and complete[0].directory != directory:
            names = ", ".join(printable(str(each.directory)) for each in complete)
            raise DataError(
                f"{shown} has files of {source} in several folders: {names}. Give one of them"
            )
        if complete:
            return complete[0]
    forms = (layout.archive or ", ".join(layout.inputs.values()) for layout in corpus.layouts)
    raise DataError(f"{shown} must hold the published files of {source}: {'; or '.join(forms)}")


def count_differences(corpus: Corpus, manifest: "ShardManifest") -> Iterator[str]:
    """Tokens and vocabulary that differ from the published ones, in whatever files they came."""
    for split, published in corpus.tokens.items():
        entry = manifest.splits.get(split)
        tokens = entry.tokens if entry else 0
        if tokens != published:
            yield f"{split} has {tokens:,} tokens, the published {published:,}"
    words = manifest.vocab_size - 1  # without the end of a document
    if corpus.words is not None and words != corpus.words:
        yield f"the vocabulary has {words:,} words, the published {corpus.words:,}"


# --- the command ----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    name: str
    experiment: Experiment
    found: FoundFiles
    out: Path
    overrides: tuple[str, ...] = ()
    is_shrunk: bool = False
    on: str = "ray"
    ranks: int = 1

    def settings(self) -> list[str]:
        """All settings that replace those of the config; the last one of a name counts."""
        shrunk = SHRUNK if self.is_shrunk else ()
        places = (f"directory={self.out / 'run'}", f"data.path={self.out / 'data'}")
        return [*places, *shrunk, *self.experiment.settings, *self.overrides]

    def commands(self) -> dict[str, list[str]]:
        row, corpus = self.experiment, self.experiment.corpus
        options: list[object] = []
        for key, length in row.lengths.items():
            most = SHRUNK_LENGTHS.get(key, length) if self.is_shrunk else length
            options += [f"--{key.replace('_', '-')}", min(length, most)]
        commands: dict[str, list[object]] = {
            "prepare": [
                *("prepare", *self.found.inputs(), "--format", corpus.format),
                *("--recipe", corpus.recipe, "--out", self.out / "data", "--workers", self.ranks),
            ],
            "train": [
                *("train", row.config, *self.settings()),
                *("--on", self.on, "--ranks", self.ranks),
            ],
            "eval": [
                *("eval", self.out / "run", self.out / "data", "--split", row.split, *options),
                *("--same-length", "--on", self.on, "--workers", self.workers, "--resume"),
                *("--out", self.out / row.split),
            ],
        }
        return {name: [str(word) for word in words] for name, words in commands.items()}

    @property
    def workers(self) -> int:
        """Of the evaluation. Processes cannot have a GPU each."""
        return 1 if self.on == "processes" and num_gpus() else self.ranks

    def comparison(
        self, differences: list[str], evaluation: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """The content of the result file.

        The paper's perplexity is per word and line end, also for lm1b, whose tokens here also mark
        where lines begin. A token of enwik8 and text8 is a character there.
        """
        row = self.experiment
        key = "word_perplexity" if row.metric == "perplexity" else "bits_per_token"
        return {
            "experiment": self.name,
            "split": row.split,
            "metric": row.metric,
            "score": evaluation[key] if evaluation else None,
            "published": row.published,
            "source": f"arXiv:1901.02860, {row.table}" if row.table else None,
            "shrunk": self.is_shrunk,
            "overrides": [*(SHRUNK if self.is_shrunk else ()), *self.overrides],
            "chosen_here": row.ours or None,
            "not_the_papers_data": differences,
            "not_the_papers_code": list(row.corpus.differences),
            "evaluation": evaluation,
        }


def reproduce(
    context: typer.Context,
    name: Annotated[str, typer.Argument(metavar="NAME", help="An experiment, see --list.")] = "",
    overrides: Overrides = None,
    data: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Directory of the published files, or an archive, as published.",
            parser=path_argument,
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="For dataset, run and result. Default: runs/NAME, or runs/NAME-shrunk.",
            parser=path_argument,
        ),
    ] = None,
    on: Annotated[str, typer.Option(help="As for txl train and txl eval.")] = "ray",
    ranks: Annotated[
        int,
        typer.Option(min=1, help="Ranks, and processes of the preparation and the evaluation."),
    ] = 1,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Check the files and the config, print the commands, stop."),
    ] = False,
    shrink: Annotated[
        bool,
        typer.Option(
            "--shrink",
            help="A smoke run on a laptop: prepares all of --data, which may be a sample of the "
            "corpus, and trains a tiny model for 20 steps. Its score means nothing.",
        ),
    ] = False,
    as_json: AsJson = False,
    list_: Annotated[bool, typer.Option("--list", help="List the experiments.")] = False,
) -> None:
    """Prepare, train and evaluate one of the paper's experiments.

    The result is compared with the paper's. If it is stopped, run it again to continue. Overrides
    of the config, for example fewer steps, files that are not as published, and what differs from
    the paper's code are listed with the score.

    Example: txl reproduce enwik8-base --data downloads/ --ranks 8
    """
    from data_pipeline.shards.manifest import load_manifest
    from txl_dist.cli.evaluation_output import RESULT_NAME
    from txl_dist.config.config_file import load_run_config

    if list_:
        _print_list(as_json=as_json)
        return
    if name not in experiments():
        names = ", ".join(experiments())
        raise ConfigError(f"there is no experiment {name!r}; expected one of {names}")
    experiment = experiments()[name]
    if data is None:
        source = experiment.corpus.source
        raise ConfigError(f"txl reproduce {name}: give --data DIR, the published files of {source}")
    plan = Plan(
        name=name,
        experiment=experiment,
        found=find_published(experiment.corpus, data),
        out=out or Path("runs", f"{name}-shrunk" if shrink else name),
        overrides=tuple(overrides or ()),
        is_shrunk=shrink,
        on=on,
        ranks=ranks,
    )
    commands, differences = plan.commands(), list(plan.found.differences())
    if dry_run:
        load_run_config(experiment.config, plan.settings())
        lines = [f"$ {shlex.join(['txl', *words])}" for words in commands.values()]
        comparison = plan.comparison(differences)
        lines += [_text_of(comparison), "the config is valid; nothing was started"]
        content = {**comparison, "commands": [["txl", *words] for words in commands.values()]}
        print_result(content, "\n".join(lines), as_json=as_json)
        return
    program = context.find_root().command
    # With --json only the result goes to standard output.
    with contextlib.redirect_stdout(sys.stderr if as_json else sys.stdout):
        _run_command(program, commands["prepare"])
        differences += count_differences(experiment.corpus, load_manifest(plan.out / "data"))
        for difference in differences:  # before hours of training
            print(f"not the paper's data: {difference}", file=sys.stderr)
        _run_command(program, commands["train"])
        _run_command(program, commands["eval"])
    result = json.loads((plan.out / experiment.split / RESULT_NAME).read_text())
    comparison = plan.comparison(differences, result)
    write_file(plan.out / "reproduction.json", f"{json.dumps(comparison, indent=1)}\n".encode())
    print_result(comparison, _text_of(comparison), as_json=as_json)


def _run_command(program: Any, words: list[str]) -> None:
    """Run a command of typer's `program` by its words, and print it: that does the same."""
    print(f"$ txl {shlex.join(words)}", file=sys.stderr, flush=True)
    if code := program(words, prog_name="txl", standalone_mode=False):
        raise typer.Exit(code)


def _text_of(comparison: dict[str, Any]) -> str:
    published, score, source = (comparison[key] for key in ("published", "score", "source"))
    lines = [
        f"{comparison['experiment']}, {comparison['split']}, "
        f"{comparison['metric'].replace('_', ' ')}",
        *(["  a tiny model (--shrink): NO REPRODUCTION"] if comparison["shrunk"] else []),
        f"  this run   {'no score' if score is None else f'{score:.4f}'}",
        f"  the paper  {'no result' if published is None else f'{published} ({source})'}",
        *(f"  not the paper's data: {each}" for each in comparison["not_the_papers_data"]),
        *(f"  not as the paper's code: {each}" for each in comparison["not_the_papers_code"]),
        *(f"  not the paper's setting: {each}" for each in comparison["overrides"]),
        f"  not in the paper, chosen here: {comparison['chosen_here'] or 'nothing'}",
    ]
    if comparison["evaluation"]:
        lines.append(f"  protocol: {comparison['evaluation']['protocol']}")
    return "\n".join(lines)


def _print_list(*, as_json: bool) -> None:
    if as_json:
        print(json.dumps({name: asdict(row) for name, row in experiments().items()}))
        return
    rows = [
        [
            *(name, row.split, row.metric.replace("_", " "), f"{row.published or '-'}"),
            *(row.table, row.corpus.source),
        ]
        for name, row in experiments().items()
    ]
    print_table(rows, num_texts=6)
