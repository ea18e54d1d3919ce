"""`txl reproduce`: one of the paper's experiments, from the published text to its score."""

import contextlib
import json
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from txl_dist.cli.options import AsJson, Overrides
from txl_dist.cli.paths import local_path_parser

if TYPE_CHECKING:
    from txl_dist.evaluation.evaluate import EvaluationResult
    from txl_dist.reproduction.experiments import Corpus, Experiment

CONFIGS = Path(__file__).parents[2] / "configs" / "paper"
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
            help="For datasets, run and result. Default: runs/NAME.",
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

    If it is stopped, run it again to continue. Overrides of the config, for example
    fewer steps, are listed with the score.

    Example: txl reproduce enwik8-base --data downloads/ --ranks 8
    """
    from txl_dist.errors import ConfigError
    from txl_dist.reproduction.experiments import EXPERIMENTS

    if list_:
        _print_list()
        return
    if name not in EXPERIMENTS:
        raise ConfigError(f"txl reproduce {name!r}: expected one of {', '.join(EXPERIMENTS)}")
    experiment, config, out = EXPERIMENTS[name], CONFIGS / f"{name}.yaml", out or Path("runs", name)
    if data is None:
        raise ConfigError(
            f"txl reproduce {name}: give the directory of the published files with --data DIR. "
            f"Source: {experiment.corpus.source}"
        )
    if not config.exists():
        raise ConfigError(
            f"{config} does not exist: the configs are part of the repository, not of the "
            "installed package. Install txl from a clone: pip install -e ."
        )
    # With --json only the result goes to standard output.
    with contextlib.redirect_stdout(sys.stderr if as_json else sys.stdout):
        datasets = _prepare(experiment.corpus, data, out, workers=workers)
        settings = [
            f"directory={out / 'run'}",
            f"data.path={datasets['train']}",
            *_split("evaluation", datasets, "valid"),
            *(overrides or []),
        ]
        _train(config, settings, on=on, ranks=ranks)
        result = _evaluate(experiment, out / "run", datasets, on=on, ranks=ranks)
    comparison = _comparison(name, experiment, result, overrides or [])
    (out / RESULT).write_text(json.dumps(comparison, indent=1) + "\n")
    if as_json:
        print(json.dumps(comparison))
    else:
        _print_comparison(comparison)


def _prepare(corpus: "Corpus", data: Path, out: Path, *, workers: int) -> dict[str, Path]:
    """The dataset of each split. Datasets that exist already are used."""
    from txl_dist.cli.prepare import prepare

    inputs = {split: _input(corpus, data, pattern) for split, pattern in corpus.files.items()}
    datasets: dict[str, Path] = {}
    for split, source in inputs.items():
        datasets[split] = target = out / ("data" if split == "train" else f"data-{split}")
        is_train = split == "train"
        _say("prepare", *source, "--format", "text", "--out", target)
        prepare(
            [str(path) for path in source],
            out=target,
            format="text",
            tokenizer=corpus.tokenizer if is_train else str(datasets["train"] / "tokenizer.json"),
            recipe=corpus.recipe if is_train else None,
            min_freq=corpus.min_freq if is_train else None,
            workers=workers,
        )
    return datasets


def _input(corpus: "Corpus", data: Path, pattern: str) -> list[Path]:
    from txl_dist.errors import DataError

    # Archives may have a directory above the files.
    found = sorted(data.glob(pattern)) or sorted(data.glob(f"*/{pattern}"))
    if not found:
        raise DataError(
            f"{data} has no {pattern}. It must hold the published files of {corpus.source}, "
            "unpacked"
        )
    return found


def _split(section: str, datasets: dict[str, Path], split: str) -> list[str]:
    """Overrides that name a split: in the dataset of train, or the only one of another dataset."""
    if split in datasets:
        return [f"{section}.path={datasets[split]}", f"{section}.split=train"]
    return [f"{section}.split={split}"]


def _train(config: Path, settings: list[str], *, on: str, ranks: int) -> None:
    from txl_dist.cli.train import train

    _say("train", config, *settings, "--on", on, "--ranks", ranks)
    train(config, settings, on=on, ranks=str(ranks))


def _evaluate(
    experiment: "Experiment", run: Path, datasets: dict[str, Path], *, on: str, ranks: int
) -> "EvaluationResult":
    """The score of the newest checkpoint on the test split, with the paper's lengths."""
    from txl_dist.cli.work_progress import TOKENS, work_progress
    from txl_dist.cli.workers import open_workers, stoppable
    from txl_dist.evaluation.distributed import evaluate_on_workers, plan_job
    from txl_dist.evaluation.job import evaluation_job

    data, split = (datasets["test"], "train") if "test" in datasets else (datasets["train"], "test")
    lengths = experiment.tgt_len, experiment.mem_len, experiment.clamp_len
    options = zip(("--tgt-len", "--mem-len", "--clamp-len"), lengths, strict=True)
    given = [word for pair in options if pair[1] is not None for word in pair]
    _say("eval", run, data, "--split", split, *given, "--same-length", "--on", on)
    job = evaluation_job(
        run,
        data,
        split=split,
        tgt_len=experiment.tgt_len,
        mem_len=experiment.mem_len,
        clamp_len=experiment.clamp_len,
        same_length=True,
        batch=8,
    )
    planned = plan_job(job, run / "evaluations", resume=True)
    advice = "run the same command to continue with the unfinished chunks"
    with (
        stoppable(advice),
        open_workers(on, ranks, use_gpus=True) as pool,
        work_progress(TOKENS, pool) as progress,
    ):
        return evaluate_on_workers([planned], pool, progress=progress)[0]


def _comparison(
    name: str, experiment: "Experiment", result: "EvaluationResult", overrides: list[str]
) -> dict[str, Any]:
    """The content of the result file. A token of enwik8 and text8 is a character of the paper."""
    sums = result.sums
    is_perplexity = experiment.metric == "perplexity"
    return {
        "experiment": name,
        "metric": experiment.metric,
        "score": sums.perplexity if is_perplexity else sums.bits_per_token,
        "published": experiment.published,
        "source": f"arXiv:1901.02860, {experiment.table}" if experiment.table else None,
        "overrides": overrides,
        "evaluation": result.to_json(),
    }


def _print_comparison(comparison: dict[str, Any]) -> None:
    published = comparison["published"]
    print(f"{comparison['experiment']}, test, {comparison['metric'].replace('_', ' ')}")
    print(f"  this run   {comparison['score']:.4f}")
    print(f"  the paper  {published if published is not None else 'no result'}"
          f"{' (' + comparison['source'] + ')' if comparison['source'] else ''}")  # fmt: skip
    if comparison["overrides"]:
        print(f"  not the paper's settings: {' '.join(comparison['overrides'])}")


def _print_list() -> None:
    from txl_dist.reproduction.experiments import EXPERIMENTS

    for name, experiment in EXPERIMENTS.items():
        published = "-" if experiment.published is None else f"{experiment.published:g}"
        metric = experiment.metric.replace("_", " ")
        print(f"{name:14}{metric:20}{published:>6}   {experiment.corpus.source}")


def _say(*words: Any) -> None:
    """Print the command that does the same, on standard error."""
    print(f"$ txl {shlex.join(map(str, words))}", file=sys.stderr, flush=True)
