"""`txl reproduce`: one of the paper's experiments, from the published text to its score."""

import contextlib
import json
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from txl_dist.cli.options import AsJson, Overrides, local_path_parser

if TYPE_CHECKING:
    from txl_dist.cli.published_files import Experiment

RESULT = "reproduction.json"


def reproduce(
    name: Annotated[str, typer.Argument(metavar="NAME", help="An experiment, see --list.")] = "",
    overrides: Overrides = None,
    data: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Directory of the published files.", parser=local_path_parser()
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="For dataset, run and result. Default: runs/NAME.",
            parser=local_path_parser(),
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
    from txl_dist.cli.published_files import (
        CONFIGS,
        count_differences,
        experiments,
        find_published,
    )
    from txl_dist.errors import ConfigError

    if list_:
        _print_list()
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
    if as_json:
        print(json.dumps(comparison))
    else:
        _print_comparison(comparison)


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
    is_perplexity = experiment.metric == "perplexity"
    return {
        "experiment": name,
        "metric": experiment.metric,
        "score": result["perplexity" if is_perplexity else "bits_per_token"],
        "published": experiment.published,
        "source": f"arXiv:1901.02860, {experiment.table}" if experiment.table else None,
        "overrides": overrides,
        "not_the_papers_data": differences,
        "evaluation": result,
    }


def _print_comparison(comparison: dict[str, Any]) -> None:
    published, score = comparison["published"], comparison["score"]
    print(f"{comparison['experiment']}, test, {comparison['metric'].replace('_', ' ')}")
    print(f"  this run   {'out of range' if score is None else f'{score:.4f}'}")
    print(f"  the paper  {published if published is not None else 'no result'}"
          f"{' (' + comparison['source'] + ')' if comparison['source'] else ''}")  # fmt: skip
    for difference in comparison["not_the_papers_data"]:
        print(f"  not the paper's data: {difference}")
    if comparison["overrides"]:
        print(f"  not the paper's settings: {' '.join(comparison['overrides'])}")
    print(f"  protocol: {comparison['evaluation']['protocol']}")


def _print_list() -> None:
    from txl_dist.cli.published_files import experiments

    for name, experiment in experiments().items():
        published = "-" if experiment.published is None else f"{experiment.published:g}"
        metric = experiment.metric.replace("_", " ")
        print(f"{name:14}{metric:20}{published:>6}   {experiment.corpus.source}")
