"""`txl bench`: run the project's benchmarks and compare each figure with its limit."""

import json
from collections.abc import Iterable
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from txl_dist.cli import bench_eval_speed, bench_gpu, bench_recall
from txl_dist.cli.options import AsJson

if TYPE_CHECKING:
    from txl_dist.bench.rounds import Figure

app = typer.Typer(help="Measure speed and size on this machine.", no_args_is_help=True)
app.command("eval-speed")(bench_eval_speed.eval_speed)
app.command("gpu")(bench_gpu.gpu)
app.command("recall")(bench_recall.recall)


@app.command()
def model(
    *,
    rounds: Annotated[
        int, typer.Option(min=1, help="Rounds; each one times every measured function once.")
    ] = 10,
    as_json: AsJson = False,
) -> None:
    """MFU of training and evaluation, memory, and speed of generation.

    Example: txl bench model --rounds 20
    """
    from txl_dist.bench.model import bench_model

    _print_figures(bench_model(rounds=rounds), as_json=as_json)


@app.command()
def data(
    *,
    megabytes: Annotated[
        float,
        typer.Option(min=6, help="MB of text to prepare: Python files of this installation."),
    ] = 100,
    as_json: AsJson = False,
) -> None:
    """Speed of preparation, loading and resume; size of shards; detection of damage.

    Example: txl bench data --megabytes 200
    """
    from txl_dist.bench.data import bench_data

    _print_figures(bench_data(megabytes=megabytes), as_json=as_json)


@app.command()
def train(
    *,
    rounds: Annotated[
        int, typer.Option(min=1, help="Rounds; each one trains every candidate once.")
    ] = 3,
    steps: Annotated[int, typer.Option(min=20, help="Steps of every run.")] = 100,
    as_json: AsJson = False,
) -> None:
    """Data wait, tracking with a server that never answers, and weak scaling to two ranks.

    Example: txl bench train --rounds 5
    """
    from txl_dist.bench.train import bench_train

    _print_figures(bench_train(rounds=rounds, num_steps=steps), as_json=as_json)


@app.command()
def start(
    *,
    rounds: Annotated[int, typer.Option(min=1, help="Starts; the median counts.")] = 3,
    as_json: AsJson = False,
) -> None:
    """Seconds from `txl train` to the first step, by part.

    Example: txl bench start --rounds 5
    """
    from txl_dist.bench.start import bench_start

    _print_figures(bench_start(rounds=rounds), as_json=as_json)


@app.command()
def generate(
    *,
    rounds: Annotated[
        int, typer.Option(min=1, help="Rounds; each one draws 16 tokens at every length.")
    ] = 20,
    as_json: AsJson = False,
) -> None:
    """Time per token of generation after 1,024 to 65,536 tokens of text, and in a batch.

    Example: txl bench generate --rounds 40
    """
    from txl_dist.bench.generate import bench_generate

    _print_figures(bench_generate(rounds=rounds), as_json=as_json)


def _print_figures(figures: Iterable["Figure"], *, as_json: bool) -> None:
    """Print each figure when it is measured, or all figures as one JSON object."""
    if as_json:
        rows = [{**asdict(figure), "holds": figure.holds} for figure in figures]
        print(json.dumps({"figures": rows}))
        return
    print(f"{'figure':<62} {'measured':>9} {'limit':>11}")
    for figure in figures:
        sign = "<=" if figure.at_most else ">="
        limit = "" if figure.limit is None else f"{sign} {figure.limit:g}"
        verdict = {True: "holds", False: "MISSED", None: ""}[figure.holds]
        print(
            f"{figure.name:<62} {figure.value:>9.3g} {limit:>11}  {figure.unit}  {verdict}"
            f"{'  (' + figure.note + ')' if figure.note else ''}",
            flush=True,
        )
