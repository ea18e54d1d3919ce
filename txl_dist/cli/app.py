"""`txl`: registers the commands, and turns errors into a message and an exit code."""

import errno
import sys
import textwrap
from collections.abc import Sequence
from importlib import metadata
from typing import Annotated

import typer
from typer.exceptions import TyperException

from txl_dist.cli import (
    data,
    evaluate,
    measure,
    models,
    preflight,
    prepare,
    reproduce,
    runs,
    train,
)
from txl_dist.config.removed import COMMANDS, PAGE
from txl_dist.errors import ConfigError, TxlError, error_of_files, print_error

# Help breaks lines at spaces only: an option such as --max-tokens stays one word.
textwrap.TextWrapper.wordsep_re = textwrap.TextWrapper.wordsep_simple_re

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
app.command("recl")(measure.recl)
app.command("attention")(measure.attention)
app.command("generate")(models.generate)
app.command("report")(runs.report)
app.command("status")(runs.status)
app.command("reproduce")(reproduce.reproduce)
app.add_typer(runs.checkpoint_app, name="checkpoint")
app.add_typer(runs.track_app, name="track")
app.add_typer(runs.job_app, name="job")
app.add_typer(measure.bench_app, name="bench")
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
        code = app(prog_name="txl", standalone_mode=False)
        print(end="", flush=True)  # here, a full disk is an error like any other
        raise SystemExit(code)
    except TyperException as error:
        problem = _usage_error(error)
    except TxlError as error:
        problem = error
    except OSError as error:
        if error.filename is None:
            sys.stdout = sys.stderr  # else the interpreter flushes it again, and fails again
        if error.errno == errno.EPIPE:
            raise SystemExit(1) from None
        if (of_files := error_of_files(error)) is None:
            raise
        problem = of_files
    print_error(problem)
    raise SystemExit(problem.exit_code)


def _usage_error(error: TyperException) -> TxlError:
    """The error of a command line that typer has refused."""
    for name, instead in COMMANDS.items():
        if _has_words(sys.argv[1:], name):
            return ConfigError(f"txl {name} was removed; {instead} ({PAGE})")
    message = error.format_message().replace("Value error, ", "").rstrip(".")
    context = getattr(error, "ctx", None)
    if context is None:  # an option without its value
        return ConfigError(f"{message} (see txl COMMAND -h)")
    if message == context.get_help().rstrip("."):  # no words at all
        print(error.format_message(), file=sys.stderr)
        raise SystemExit(error.exit_code)
    if find_errors := getattr(error.__cause__, "errors", None):  # pydantic's ValidationError
        message += f", found {find_errors()[0]['input']}"
    return ConfigError(f"{message} (see {context.command_path} -h)")


def _has_words(words: Sequence[str], name: str) -> bool:
    """Whether a command line has the words of a removed command, or an option of it anywhere."""
    *command, last = name.split()
    rest = [word.partition("=")[0] for word in words[len(command) :]]
    return list(words[: len(command)]) == command and last in (
        rest if last.startswith("-") else rest[:1]
    )
