"""`txl`: registers the commands, and turns errors into a message and an exit code."""

from importlib import metadata
from typing import Annotated

import typer

from txl_dist.cli import (
    bench,
    context,
    data,
    evaluate,
    generate,
    job,
    models,
    preflight,
    prepare,
    reproduce,
    runs,
    train,
)
from txl_dist.errors import TxlError, print_error

app = typer.Typer(
    name="txl",
    no_args_is_help=True,
    rich_markup_mode=None,  # Importing rich takes a third of the time of `txl --help`.
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},  # every command inherits them
)
app.command("prepare")(prepare.prepare)
app.add_typer(data.app, name="data")
app.add_typer(preflight.app, name="config")
app.command("estimate")(preflight.estimate)
app.command("train")(train.train)
app.command("eval")(evaluate.evaluate)
app.command("recl")(context.recl)
app.command("attention")(context.attention)
app.command("generate")(generate.generate)
app.command("report")(runs.report)
app.command("status")(runs.status)
app.command("reproduce")(reproduce.reproduce)
app.add_typer(models.app, name="checkpoint")
app.add_typer(runs.track_app, name="track")
app.add_typer(job.app, name="job")
app.add_typer(bench.app, name="bench")
app.command("doctor")(preflight.doctor)
app.command("import")(models.import_)
app.command("export")(models.export)


def _print_version(is_wanted: bool) -> None:
    if is_wanted:
        print(f"txl {metadata.version('txl-dist')}")
        raise typer.Exit


@app.callback()
def txl(
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version.", callback=_print_version, is_eager=True
        ),
    ] = False,
) -> None:
    """Train, evaluate and run Transformer-XL language models on one or many machines."""


def main() -> None:
    """Run `txl`. Exit codes are listed in `txl_dist/errors.py`."""
    try:
        # The name must be given for `python -m txl_dist`.
        app(prog_name="txl")
    except TxlError as error:
        print_error(error)
        raise SystemExit(error.exit_code) from None
