"""`txl prepare` and `txl data`: corpora to shards, and looking at them afterwards."""

import contextlib
import json
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from data_pipeline.errors import ConfigError, DataError
from txl_dist.errors import PreemptedError

if TYPE_CHECKING:
    from data_pipeline.manifest import PrepareSettings, ShardManifest
    from data_pipeline.workers import Workers

app = typer.Typer(help="Check prepared datasets and look inside.", no_args_is_help=True)

Directory = Annotated[
    Path, typer.Argument(metavar="DIR", help="Directory that `txl prepare` wrote.")
]
NumWorkers = Annotated[int, typer.Option(min=1, help="Processes, or Ray tasks, that work at once.")]
On = Annotated[
    str,
    typer.Option(
        metavar="local|ADDRESS",
        help="Where workers run: local processes; ray: a Ray of its own; or a running cluster, "
        "whose nodes must all see the input and the output directory.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")]
_MIB = 2**20
_SECONDS_BETWEEN_LINES = 5.0


def prepare(
    inputs: Annotated[
        list[Path],
        typer.Argument(metavar="INPUT...", help="Text files, .jsonl files, or folders of them."),
    ],
    out: Annotated[Path, typer.Option(metavar="DIR", help="New or empty directory to write.")],
    *,
    format: Annotated[
        str, typer.Option(help="auto (by suffix), text (a file is a document) or jsonl.")
    ] = "auto",
    text_key: Annotated[str, typer.Option(help="Key of the text in a JSON line.")] = "text",
    tokenizer: Annotated[str, typer.Option(help="byte: 256 bytes and end-of-document.")] = "byte",
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
        float, typer.Option(help="Fraction of records that may be unusable; they are listed.")
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
    settings = _settings(
        format=format,
        text_key=text_key,
        tokenizer=tokenizer,
        split=_fractions(split),
        shuffle=shuffle,
        dedup=dedup,
        shard_bytes=shard_size * _MIB,
    )
    if not 0 <= max_reject_rate <= 1:
        raise ConfigError(f"--max-reject-rate {max_reject_rate} must lie in [0, 1]")
    from data_pipeline.prepare import prepare_dataset

    with _stoppable(out), _workers(on, workers) as pool, _progress() as progress:
        done = prepare_dataset(
            inputs if on == "local" else [path.absolute() for path in inputs],
            out,
            settings,
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
            "ignored": done.ignored,
        }
        print(json.dumps({**facts, **_totals(out, done.manifest)}))
        return
    reused = f", {done.reused_units} of {done.units} parts reused" if done.reused_units else ""
    print(
        f"{out}: {status} in {done.seconds:,.1f} s{reused}; "
        f"at most {done.peak_memory_bytes / _MIB:,.0f} MiB a process"
    )
    _print_totals(done.manifest)
    if done.ignored:
        counts = ", ".join(f"{count} {suffix}" for suffix, count in sorted(done.ignored.items()))
        print(f"ignored, not text by their suffix: {counts}", file=sys.stderr)
    if done.manifest.input.rejected:
        print(
            f"{done.manifest.input.rejected} records could not be used: {out / 'rejects.jsonl'}",
            file=sys.stderr,
        )


@app.command()
def verify(
    directory: Directory,
    *,
    fast: Annotated[
        bool, typer.Option("--fast", help="Names, sizes and indexes only; shards are not read.")
    ] = False,
    workers: NumWorkers = 1,
    on: On = "local",
    as_json: AsJson = False,
) -> None:
    """Read everything again and list all that is not as it was written; then exit code 3.

    Example: txl data verify data/books
    """
    from data_pipeline.verify import verify_dataset

    with _workers(on, workers) as pool, _progress() as progress:
        found = verify_dataset(directory, fast=fast, workers=pool, progress=progress)
    if as_json:
        result = {"ok": not found.problems, "problems": found.problems, "bytes": found.num_bytes}
        print(json.dumps({**result, **_totals(directory, found.manifest)}))
    elif not found.problems:
        what = "names, sizes and indexes" if fast else f"all of {found.num_bytes:,} bytes"
        print(f"{directory}: {what} are as written")
        _print_totals(found.manifest)
    if found.problems:
        listed = "".join(f"\n  {problem}" for problem in found.problems)
        raise DataError(
            f"{directory}: {len(found.problems)} problems:{listed}\nDo not train on it. Restore "
            f"these files from a copy, or remove {directory} and run txl prepare again: the same "
            "corpus and options give the same bytes."
        )


@app.command()
def rebuild(
    directory: Directory, *, workers: NumWorkers = 1, on: On = "local", as_json: AsJson = False
) -> None:
    """Make a lost or damaged manifest.json again from shards, indexes and tokenizer.json.

    The result is the lost one, with the same digest. Every shard is read and checked first; what
    is missing or damaged among them cannot be rebuilt here, only by txl prepare.

    Example: txl data rebuild data/books
    """
    from data_pipeline.rebuild import rebuild_manifest

    with _workers(on, workers) as pool, _progress() as progress:
        done = rebuild_manifest(directory, workers=pool, progress=progress)
    status = "already complete" if done.was_sound else "rebuilt"
    if as_json:
        print(json.dumps({"status": status, **_totals(directory, done.manifest)}))
        return
    print(f"{directory}: the manifest is {status}, digest {done.manifest.digest}")
    _print_totals(done.manifest)


@app.command()
def inspect(
    directory: Directory,
    *,
    documents: Annotated[
        int, typer.Option(min=0, help="Documents of every split to show the beginning of.")
    ] = 2,
    as_json: AsJson = False,
) -> None:
    """Show totals per split, the tokenizer, and documents decoded back to text.

    Example: txl data inspect data/books --documents 5
    """
    from dataclasses import asdict

    from data_pipeline.inspection import excerpts, summarize
    from data_pipeline.manifest import load_manifest

    manifest = load_manifest(directory)
    shown = excerpts(directory, documents=documents)
    if as_json:
        content = _totals(directory, manifest)
        for summary in summarize(manifest):
            ratio = summary.text_bytes_per_compressed_byte
            content["splits"][summary.name]["text_bytes_per_compressed_byte"] = ratio
        print(json.dumps({**content, "documents": [asdict(excerpt) for excerpt in shown]}))
        return
    print(f"{directory}: digest {manifest.digest}")
    print(
        f"tokenizer {manifest.settings.tokenizer}: {manifest.vocab_size} ids as {manifest.dtype}, "
        f"end of document {manifest.end_of_document}, digest {manifest.tokenizer_digest}"
    )
    _print_totals(manifest)
    for excerpt in shown:
        print(f"\n[{excerpt.split}] {excerpt.document_id} ({excerpt.tokens:,} tokens)")
        print(f"  {excerpt.text}")


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


def _settings(**values: Any) -> "PrepareSettings":
    from pydantic import ValidationError

    from data_pipeline.manifest import PrepareSettings

    try:
        return PrepareSettings(**values)
    except ValidationError as error:
        first = error.errors()[0]
        option = str(first["loc"][0]) if first["loc"] else "split"
        options = {"shard_bytes": "shard-size", "text_key": "text-key"}
        raise ConfigError(
            f"--{options.get(option, option)} {values[option]!r}: {first['msg']}. "
            "See txl prepare --help for what is supported."
        ) from None


def _totals(directory: Path, manifest: "ShardManifest") -> dict[str, Any]:
    """The part of `--json` that every command here shares."""
    return {
        "directory": str(directory),
        "digest": manifest.digest,
        "vocab_size": manifest.vocab_size,
        "end_of_document": manifest.end_of_document,
        "dtype": manifest.dtype,
        "tokenizer": manifest.settings.tokenizer,
        "tokenizer_digest": manifest.tokenizer_digest,
        "input": manifest.input.model_dump(),
        "splits": {
            name: {
                "shards": len(entry.shards),
                "documents": entry.documents,
                "blocks": entry.blocks,
                "tokens": entry.tokens,
                "text_bytes": entry.text_bytes,
                "bytes": sum(shard.bytes for shard in entry.shards),
            }
            for name, entry in manifest.splits.items()
        },
    }


def _print_totals(manifest: "ShardManifest") -> None:
    from data_pipeline.inspection import summarize

    for split in summarize(manifest):
        print(
            f"  {split.name:<8} {split.documents:>10,} documents {split.tokens:>15,} tokens "
            f"{split.compressed_bytes:>13,} bytes in {split.shards} shards "
            f"({split.text_bytes_per_compressed_byte:.2f} bytes of text in one)"
        )
    source = manifest.input
    left_out = f"{source.empty} empty, {source.rejected} rejected, {source.duplicates} repeated"
    print(f"  from {source.files:,} files; left out: {left_out}")


@contextlib.contextmanager
def _workers(on: str, num_workers: int) -> "Iterator[Workers]":
    from data_pipeline.workers import InProcess, ProcessWorkers

    if on != "local":
        from txl_dist.launchers import find_launcher

        with find_launcher(on).workers(num_workers) as pool, _sigterm_interrupts():
            yield pool
    elif num_workers == 1:
        yield InProcess()
    else:
        with ProcessWorkers(num_workers) as pool:
            yield pool


@contextlib.contextmanager
def _stoppable(out: Path) -> Iterator[None]:
    """Ends with PreemptedError on SIGTERM and Ctrl-C, after everything inside was cleaned up."""
    try:
        with _sigterm_interrupts():
            yield
    except (KeyboardInterrupt, SystemExit):  # Ray exits for a SIGTERM while it starts
        raise PreemptedError(
            f"stopped on request; no dataset was written. What was finished is kept in {out}: the "
            "same command goes on from there"
        ) from None


@contextlib.contextmanager
def _sigterm_interrupts() -> Iterator[None]:
    """SIGTERM does what Ctrl-C does. Entered again behind ray.init, which takes it for itself."""

    def stop(number: int, _frame: object) -> None:
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[str, int, int], None]]:
    """progress(what, done, total) in bytes, on standard error: a bar on a terminal, else lines."""
    if not sys.stderr.isatty():
        yield _lines()
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    columns = (
        *(TextColumn("{task.description}"), BarColumn(), DownloadColumn()),
        *(TransferSpeedColumn(), TimeRemainingColumn()),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task, phase = bar.add_task(""), ""

        def show(what: str, done: int, total: int) -> None:
            nonlocal phase
            if what != phase:
                bar.reset(task)  # rate and time left are of one phase
                phase = what
            bar.update(task, description=what, completed=done, total=total)

        yield show


def _lines() -> Callable[[str, int, int], None]:
    phase, began, last = "", 0.0, time.monotonic()

    def show(what: str, done: int, total: int) -> None:
        nonlocal phase, began, last
        now = time.monotonic()
        if what != phase:
            phase, began = what, now
        if now - last < _SECONDS_BETWEEN_LINES or not total:
            return
        last = now
        rate = done / _MIB / max(now - began, 1e-9)
        left = f", {(total - done) / _MIB / rate:,.0f} s left" if rate else ""
        print(
            f"{what}: {done / _MIB:,.1f} of {total / _MIB:,.1f} MiB ({done / total:.0%}), "
            f"{rate:,.1f} MiB/s{left}",
            file=sys.stderr,
        )

    return show
