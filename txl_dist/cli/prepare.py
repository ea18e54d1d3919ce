"""`txl prepare`: a corpus to shards."""

import contextlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from data_pipeline.errors import ConfigError, printable
from data_pipeline.readers import FORMATS
from data_pipeline.storage.urls import local_path
from txl_dist.cli.data import print_totals, totals
from txl_dist.cli.options import AsJson, NumWorkers, On
from txl_dist.cli.paths import local_path_parser, require_local
from txl_dist.cli.progress import progress_in_bytes
from txl_dist.cli.workers import open_workers, sigterm_interrupts
from txl_dist.errors import PreemptedError

if TYPE_CHECKING:
    from data_pipeline.preparation.settings import PrepareSettings

_MIB = 2**20
_DEFAULT_BPE = 32768
_PUSH = (
    "Write to a local directory, and copy that there when it is complete: txl prepare INPUT "
    "--out DIR, then txl data push DIR {url}"
)


def prepare(
    inputs: Annotated[
        list[str],
        typer.Argument(
            metavar="INPUT...",
            help="Files, folders, patterns ('data/**/*.jsonl'), and URLs (s3, gs, http, https).",
        ),
    ],
    out: Annotated[
        Path,
        typer.Option(
            metavar="DIR",
            help="New or empty directory to write.",
            parser=local_path_parser(_PUSH),
        ),
    ],
    *,
    format: Annotated[
        str,
        typer.Option(
            help="auto (each file by its suffix; .json must hold JSON lines), or one of "
            f"{', '.join(FORMATS)}."
        ),
    ] = "auto",
    text_key: Annotated[
        str, typer.Option(help="Key of the text in a JSON line, or column in Parquet.")
    ] = "text",
    tokenizer: Annotated[
        str,
        typer.Option(
            metavar="byte|char|word|bpe|PATH",
            help="Tokens; PATH is a tokenizer.json, also of a dataset or checkpoint.",
        ),
    ] = "byte",
    recipe: Annotated[
        str | None,
        typer.Option(
            help="One of the paper's corpora: wt103, wt2, ptb, lm1b (words), or enwik8, text8 (one "
            "document that has its own valid and test)."
        ),
    ] = None,
    vocab_size: Annotated[
        int | None, typer.Option(help="Most ids; bpe: 32768 if not given, else no limit.")
    ] = None,
    min_freq: Annotated[
        int | None, typer.Option(help="Occurrences that give a symbol, or a merge, an id.")
    ] = None,
    split: Annotated[
        str,
        typer.Option(
            metavar="NAME=FRACTION,...",
            help="Documents to hold out, such as valid=0.01,test=0.01; without it all is train.",
        ),
    ] = "",
    shuffle: Annotated[
        int | None, typer.Option(metavar="SEED", help="Shuffle the documents by this seed.")
    ] = None,
    max_reject_rate: Annotated[
        float,
        typer.Option(help="Fraction of records that may be unusable; 1: broken files too."),
    ] = 0.001,
    dedup: Annotated[
        str, typer.Option(help="exact: of documents with the same text keep the first. Or none.")
    ] = "none",
    shard_size: Annotated[
        int, typer.Option(metavar="MIB", help="MiB of text in a shard, at most.")
    ] = 64,
    workers: NumWorkers = 1,
    on: On = "local",
    as_json: AsJson = False,
) -> None:
    """Turn a corpus into checksummed shards. The same input and options give the same bytes,
    for any number of workers. What is finished when it is stopped is kept: run it again.

    Example: txl prepare books/ --out data/books --split valid=0.01,test=0.01 --shuffle 1
    """
    file = _tokenizer_file(tokenizer)
    settings = _settings(
        format=format,
        text_key=text_key,
        tokenizer=tokenizer if file is None else "file",
        recipe=recipe,
        vocab_size=_DEFAULT_BPE if tokenizer == "bpe" and vocab_size is None else vocab_size,
        min_freq=min_freq,
        split=_fractions(split),
        shuffle=shuffle,
        dedup=dedup,
        shard_bytes=shard_size * _MIB,
    )
    if not 0 <= max_reject_rate <= 1:
        raise ConfigError(f"--max-reject-rate {max_reject_rate} must lie in [0, 1]")
    from data_pipeline.preparation.prepare import list_read_as, prepare_dataset

    with _stoppable(out), open_workers(on, workers) as pool, progress_in_bytes() as progress:
        done = prepare_dataset(
            inputs if on == "local" else [_absolute(given) for given in inputs],
            out,
            settings,
            tokenizer_file=file,
            max_reject_rate=max_reject_rate,
            workers=pool,
            progress=progress,
            note=lambda line: print(line, file=sys.stderr),
        )
    status = "already complete" if done.already_complete else "complete"
    if as_json:
        facts = {
            "status": status,
            "workers": done.workers,
            "units": done.units,
            "reused_units": done.reused_units,
            "peak_memory_bytes": done.peak_memory_bytes,
            "seconds": done.seconds,
            "formats": {kind: sum(of.values()) for kind, of in done.read_as.items()},
            "read_as": done.read_as,
            "ignored": done.ignored,
        }
        print(json.dumps({**facts, **totals(out, done.manifest)}))
        return
    reused = f", {done.reused_units} of {done.units} parts reused" if done.reused_units else ""
    print(
        f"{printable(str(out))}: {status} in {done.seconds:,.1f} s{reused}; "
        f"at most {done.peak_memory_bytes / _MIB:,.0f} MiB a process"
    )
    print_totals(done.manifest)
    print(f"  read {list_read_as(done.read_as)}")
    if done.ignored:
        counts = ", ".join(f"{n} {printable(suffix)}" for suffix, n in sorted(done.ignored.items()))
        print(f"ignored, not text by their suffix: {counts}", file=sys.stderr)
    if done.manifest.input.rejected:
        print(
            f"{done.manifest.input.rejected} records could not be used: "
            f"{printable(str(out / 'rejects.jsonl'))}",
            file=sys.stderr,
        )


def _fractions(split: str) -> dict[str, float]:
    """`valid=0.01,test=0.01` as a dict."""
    fractions: dict[str, float] = {}
    for part in filter(None, split.split(",")):
        name, _, number = part.partition("=")
        name = name.strip()
        try:
            fraction = float(number)
        except ValueError:
            raise ConfigError(
                f"--split {split!r}: {part!r} is not NAME=FRACTION; write valid=0.01,test=0.01"
            ) from None
        if name in fractions:
            raise ConfigError(f"--split {split!r} gives {name!r} twice")
        fractions[name] = fraction
    return fractions


def _tokenizer_file(tokenizer: str) -> Path | None:
    """The file that `--tokenizer` names, or None for a kind."""
    if tokenizer in ("byte", "char", "word", "bpe"):
        return None
    if not Path(require_local(tokenizer)).is_file():
        raise ConfigError(
            f"--tokenizer {tokenizer!r} is neither byte, char, word or bpe nor a file. Give one of "
            "these, or the path of a tokenizer.json."
        )
    return Path(tokenizer)


def _settings(**values: Any) -> "PrepareSettings":
    from pydantic import ValidationError

    from data_pipeline.preparation.settings import PrepareSettings

    try:
        return PrepareSettings(**values)
    except ValidationError as error:
        first = error.errors()[0]
        told = first["msg"].removeprefix("Value error, ")
        field, _, rest = told.partition(": ")
        if first["loc"]:
            field, rest = str(first["loc"][0]), told
        elif field not in values:
            field, rest = "split", told
        option = {"shard_bytes": "shard-size"}.get(field, field.replace("_", "-"))
        given = "" if values[field] is None else f" {values[field]!r}"
        raise ConfigError(
            f"--{option}{given}: {rest}. See txl prepare --help for what is supported."
        ) from None


def _absolute(given: str) -> str:
    """An input as other machines find it, whatever their working directory."""
    local = local_path(given)
    return given if local is None else str(Path(local).absolute())


@contextlib.contextmanager
def _stoppable(out: Path) -> Iterator[None]:
    """Ends with PreemptedError on SIGTERM and Ctrl-C, after everything inside was cleaned up."""
    try:
        with sigterm_interrupts():
            yield
    except (KeyboardInterrupt, SystemExit):  # Ray exits for a SIGTERM while it starts
        raise PreemptedError(
            f"stopped on request; no dataset was written. What was finished is kept in {out}: the "
            "same command goes on from there"
        ) from None
