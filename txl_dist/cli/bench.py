"""`txl bench`: the project's benchmarks, each figure beside the limit it is to reach."""

import json
from collections.abc import Iterable
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from txl_dist.bench.rounds import Figure

app = typer.Typer(help="Measure speed and size on this machine.", no_args_is_help=True)

AsJson = Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")]


@app.command()
def model(
    *,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds in which all take turns.")] = 10,
    as_json: AsJson = False,
) -> None:
    """Utilisation in training and evaluation, memory, and generation against its limits.

    Example: txl bench model --rounds 20
    """
    from txl_dist.bench.model import bench_model

    show(bench_model(rounds=rounds), as_json=as_json)


@app.command()
def data(
    *,
    megabytes: Annotated[
        float, typer.Option(min=6, help="Text to prepare, from this Python.")
    ] = 100,
    as_json: AsJson = False,
) -> None:
    """Preparation, loading, resume, size, damage and planning against their limits.

    Example: txl bench data --megabytes 200
    """
    from txl_dist.bench.data import bench_data

    show(bench_data(megabytes=megabytes), as_json=as_json)


def show(figures: Iterable["Figure"], *, as_json: bool) -> None:
    """Print every figure as soon as it is there, or all of them as one object."""
    if as_json:
        rows = [{**asdict(figure), "holds": figure.holds} for figure in figures]
        print(json.dumps({"figures": rows}))
        return
    print(f"{'figure':<62} {'reached':>9} {'limit':>11}")
    for figure in figures:
        sign = "<=" if figure.at_most else ">="
        limit = "" if figure.limit is None else f"{sign} {figure.limit:g}"
        verdict = {True: "holds", False: "MISSED", None: ""}[figure.holds]
        print(
            f"{figure.name:<62} {figure.value:>9.3g} {limit:>11}  {figure.unit}  {verdict}"
            f"{'  (' + figure.note + ')' if figure.note else ''}",
            flush=True,
        )
