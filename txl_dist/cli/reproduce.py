"""`txl reproduce`: one of the paper's experiments, from the published text to its score.

It runs `txl prepare`, `train` and `eval`, and prints these commands. The experiments and the files
of their corpora are in `experiments.py`.
"""

import contextlib
import difflib
import json
import shlex
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from data_pipeline.errors import counted
from data_pipeline.system.files import write_file
from txl_dist.cli.experiments import (
    Experiment,
    FoundFiles,
    count_differences,
    experiments,
    find_published,
    read_experiments,
)
from txl_dist.cli.options import AsJson, Overrides, path_argument, print_result
from txl_dist.errors import ConfigError

RESULT = "reproduction.json"
SMALL_MODEL = ("n_layer=2", "d_model=64", "n_head=2", "d_head=32", "d_inner=128")
SHRUNK = (
    *(f"model.{setting}" for setting in SMALL_MODEL),
    *("data.num_lanes=4", "data.tgt_len=32", "training.num_steps=20"),
    *("optimizer.warmup_steps=0", "optimizer.averaging_start_step=1"),
    *("evaluation.max_tokens=2000", "tracking.enabled=false"),
)
"""What --shrink changes in the config of an experiment, besides a memory of 32 tokens."""
SHRUNK_LENGTHS = {"tgt_len": 128, "mem_len": 32}
"""The largest lengths of the evaluation with --shrink."""
NOTE_OF_SHRUNK = "a smoke run of a tiny model (--shrink): NO REPRODUCTION, its score means nothing"


DataOption = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR",
        help="Directory of the published files, or an archive, as published.",
        parser=path_argument,
    ),
]
OutOption = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR",
        help="For dataset, run and result. Default: runs/NAME, or runs/NAME-shrunk.",
        parser=path_argument,
    ),
]
DryRunOption = Annotated[
    bool,
    typer.Option("--dry-run", help="Check the files and the config, print the commands, stop."),
]
ShrinkOption = Annotated[
    bool,
    typer.Option(
        "--shrink",
        help="A smoke run on a laptop: prepares all of --data, which may be a sample of the "
        "corpus, and trains a tiny model for 20 steps. Its score means nothing.",
    ),
]
ListOption = Annotated[
    bool, typer.Option("--list", help="List the experiments, and the rows without one.")
]


def reproduce(
    name: Annotated[str, typer.Argument(metavar="NAME", help="An experiment, see --list.")] = "",
    overrides: Overrides = None,
    data: DataOption = None,
    out: OutOption = None,
    on: Annotated[str, typer.Option(help="As for txl train and txl eval.")] = "ray",
    ranks: Annotated[int, typer.Option(min=1, help="Ranks and evaluation workers.")] = 1,
    workers: Annotated[int, typer.Option(min=1, help="Processes of the preparation.")] = 1,
    dry_run: DryRunOption = False,
    shrink: ShrinkOption = False,
    as_json: AsJson = False,
    list_: ListOption = False,
) -> None:
    """Prepare, train and evaluate one of the paper's experiments.

    The result is compared with the paper's. If it is stopped, run it again to continue. Overrides
    of the config, for example fewer steps, and files that are not as published are listed with the
    score.

    Example: txl reproduce enwik8-base --data downloads/ --ranks 8
    """
    from data_pipeline.shards.manifest import load_manifest
    from txl_dist.cli.evaluation_output import RESULT_NAME

    if list_:
        _print_list(as_json=as_json)
        return
    experiment = _find_experiment(name)
    if data is None:
        raise ConfigError(
            f"txl reproduce {name}: give the directory of the published files with --data DIR. "
            f"Source: {experiment.corpus.source}"
        )
    plan = Plan(
        name=name,
        experiment=experiment,
        found=find_published(experiment.corpus, data),
        out=out or Path("runs", f"{name}-shrunk" if shrink else name),
        overrides=(*(SHRUNK if shrink else ()), *shrunk_memory(experiment, shrink=shrink)),
        own_overrides=tuple(overrides or ()),
        is_shrunk=shrink,
    )
    commands = plan.commands(on=on, ranks=ranks, workers=workers)
    if dry_run:
        _print_dry_run(plan, commands, as_json=as_json)
        return
    # With --json only the result goes to standard output.
    with contextlib.redirect_stdout(sys.stderr if as_json else sys.stdout):
        _run_command(commands["prepare"])
        manifest = load_manifest(plan.dataset)
        differences = [
            *plan.found.differences(),
            *count_differences(experiment.corpus, manifest),
        ]
        for difference in differences:  # before hours of training
            print(f"not the paper's data: {difference}", file=sys.stderr)
        if shrink:
            plan = plan.for_vocabulary(manifest.vocab_size)
            commands = plan.commands(on=on, ranks=ranks, workers=workers)
        _run_command(commands["train"])
        _run_command(commands["eval"])
    result = json.loads((plan.out / experiment.split / RESULT_NAME).read_text())
    comparison = plan.comparison(result, differences)
    write_file(plan.out / RESULT, f"{json.dumps(comparison, indent=1)}\n".encode())
    print_result(comparison, _text_of(comparison), as_json=as_json)


def _find_experiment(name: str) -> Experiment:
    known = read_experiments()
    if name in known.impossible:
        raise ConfigError(f"txl reproduce {name}: cannot be run. {known.impossible[name]}")
    if name not in known.possible:
        nearest = difflib.get_close_matches(name, known.possible, n=3)
        hint = f"did you mean {' or '.join(nearest)}?" if nearest else "see txl reproduce --list"
        raise ConfigError(f"txl reproduce: there is no experiment {name!r}; {hint}")
    return known.possible[name]


def shrunk_memory(experiment: Experiment, *, shrink: bool) -> tuple[str, ...]:
    """A row without memory stays one."""
    has_memory = "model.mem_len=0" not in experiment.settings
    return ("model.mem_len=32",) if shrink and has_memory else ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What one `txl reproduce` does."""

    name: str
    experiment: Experiment
    found: FoundFiles
    out: Path
    overrides: tuple[str, ...]
    """Of --shrink."""
    own_overrides: tuple[str, ...]
    """Of the user; they are the last ones, and count."""
    is_shrunk: bool

    @property
    def dataset(self) -> Path:
        return self.out / "data"

    def settings(self) -> list[str]:
        """All overrides of the config."""
        places = (f"directory={self.out / 'run'}", f"data.path={self.dataset}")
        return [*places, *self.experiment.settings, *self.overrides, *self.own_overrides]

    def for_vocabulary(self, vocab_size: int) -> "Plan":
        """The plan with the cutoffs that a sample of the corpus, with fewer words, can have."""
        from txl_dist.config.config_file import load_run_config

        cutoffs = load_run_config(self.experiment.config, self.settings()).model.cutoffs
        possible = [cutoff for cutoff in cutoffs if cutoff < vocab_size]
        if len(possible) == len(cutoffs):
            return self
        listed = ",".join(map(str, possible))
        return replace(self, overrides=(*self.overrides, f"model.cutoffs=[{listed}]"))

    def lengths(self) -> dict[str, int]:
        most = SHRUNK_LENGTHS if self.is_shrunk else {}
        lengths = self.experiment.lengths.items()
        return {key: min(length, most.get(key, length)) for key, length in lengths}

    def commands(self, *, on: str, ranks: int, workers: int) -> dict[str, list[str]]:
        """The words of each txl command, by its name."""
        corpus, split = self.experiment.corpus, self.experiment.split
        options = [(f"--{key.replace('_', '-')}", n) for key, n in self.lengths().items()]
        prepare = ("prepare", *self.found.inputs(), "--format", corpus.format)
        train = ("train", self.experiment.config, *self.settings(), "--on", on, "--ranks", ranks)
        evaluate = ("eval", self.out / "run", self.dataset, "--split", split)
        commands: dict[str, tuple[object, ...]] = {
            "prepare": (
                *(*prepare, "--recipe", corpus.recipe),
                *("--out", self.dataset, "--workers", workers),
            ),
            "train": train,
            "eval": (
                *(*evaluate, *(word for option in options for word in option), "--same-length"),
                *("--on", on, "--workers", ranks, "--resume", "--out", self.out / split),
            ),
        }
        return {name: [str(word) for word in words] for name, words in commands.items()}

    def comparison(self, result: dict[str, Any], differences: list[str]) -> dict[str, Any]:
        """The content of the result file. A token of enwik8 and text8 is a character there."""
        row = self.experiment
        key = "perplexity" if row.metric == "perplexity" else "bits_per_token"
        return {
            "experiment": self.name,
            "split": row.split,
            "metric": row.metric,
            "score": result[key],
            "published": row.published,
            "source": f"arXiv:1901.02860, {row.table}" if row.table else None,
            "shrunk": self.is_shrunk,
            "overrides": [*self.overrides, *self.own_overrides],
            "chosen_here": row.ours or None,
            "not_the_papers_data": differences,
            "evaluation": result,
        }


def _print_dry_run(plan: Plan, commands: dict[str, list[str]], *, as_json: bool) -> None:
    from txl_dist.config.config_file import load_run_config

    load_run_config(plan.experiment.config, plan.settings())
    differences = [*plan.found.differences()]
    files = [str(path) for split in plan.found.layout.inputs for path in plan.found.files(split)]
    shown = [f"$ txl {shlex.join(words)}" for words in commands.values()]
    content = {
        "experiment": plan.name,
        "commands": [["txl", *words] for words in commands.values()],
        "files": files,
        "not_the_papers_data": differences,
        "shrunk": plan.is_shrunk,
    }
    lines = [
        *shown,
        f"found {counted(len(files), 'file')}, such as {files[0]}",
        *(f"not the paper's data: {each}" for each in differences),
        *([f"settings chosen here: {plan.experiment.ours}"] if plan.experiment.ours else []),
        *([NOTE_OF_SHRUNK] if plan.is_shrunk else []),
        "the config is valid; nothing was started",
    ]
    print_result(content, "\n".join(lines), as_json=as_json)


def _run_command(words: list[str]) -> None:
    """Run a txl command by its words, and print them: what is printed does the same."""
    from txl_dist.cli.app import app

    print(f"$ txl {shlex.join(words)}", file=sys.stderr, flush=True)
    code = typer.main.get_command(app)(words, prog_name="txl", standalone_mode=False)
    if code:
        raise typer.Exit(code)


def _text_of(comparison: dict[str, Any]) -> str:
    published, score, source = (comparison[key] for key in ("published", "score", "source"))
    paper = "no result" if published is None else f"{published} ({source})"
    overrides = [" ".join(comparison["overrides"])] if comparison["overrides"] else []
    chosen = [comparison["chosen_here"]] if comparison["chosen_here"] else []
    shrunk = [f"  {NOTE_OF_SHRUNK}"] if comparison["shrunk"] else []
    lines = [
        f"{comparison['experiment']}, {comparison['split']}, "
        f"{comparison['metric'].replace('_', ' ')}",
        *shrunk,
        f"  this run   {'out of range' if score is None else f'{score:.4f}'}",
        f"  the paper  {paper}",
        *(f"  not the paper's data: {each}" for each in comparison["not_the_papers_data"]),
        *(f"  not the paper's settings: {each}" for each in overrides),
        *(f"  not in the paper, chosen here: {each}" for each in chosen),
        f"  protocol: {comparison['evaluation']['protocol']}",
    ]
    return "\n".join(lines)


def _print_list(*, as_json: bool) -> None:
    rows: dict[str, dict[str, Any]] = {
        name: {
            "published": row.published,
            "metric": row.metric,
            "split": row.split,
            "table": row.table or None,
            "chosen_here": row.ours or None,
            "source": row.corpus.source,
        }
        for name, row in experiments().items()
    }
    impossible = read_experiments().impossible
    if as_json:
        print(json.dumps({"experiments": rows, "impossible": dict(impossible)}))
        return
    for name, row in rows.items():
        published = "-" if row["published"] is None else f"{row['published']:g}"
        metric = f"{row['split']} {row['metric'].replace('_', ' ')}"
        print(f"{name:26}{metric:26}{published:>6}  {row['table'] or '':8} {row['source']}")
    print("\nThese rows of the paper's tables cannot be run:")
    for name, reason in impossible.items():
        print(f"{name:32}{reason}")
