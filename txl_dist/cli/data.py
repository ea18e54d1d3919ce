"""`txl prepare` and `txl data`: corpora to shards, and looking at them afterwards."""

import contextlib
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from data_pipeline.errors import ConfigError, DataError
from data_pipeline.readers import FORMATS

if TYPE_CHECKING:
    from data_pipeline.manifest import PrepareSettings, ShardManifest
    from data_pipeline.remote import DatasetPath

app = typer.Typer(help="Check prepared datasets and look inside.", no_args_is_help=True)

Dataset = Annotated[
    str, typer.Argument(metavar="DIR", help="Directory that `txl prepare` wrote, or its URL.")
]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")]
_MIB = 2**20
_DEFAULT_BPE = 32768
_SECONDS_BETWEEN_LINES = 5.0


def prepare(
    inputs: Annotated[
        list[str],
        typer.Argument(
            metavar="INPUT...",
            help="Files, folders, patterns ('data/**/*.jsonl'), and URLs (s3, gs, http, https).",
        ),
    ],
    out: Annotated[Path, typer.Option(metavar="DIR", help="New or empty directory to write.")],
    *,
    format: Annotated[
        str,
        typer.Option(help=f"auto (each file by its suffix), or one of {', '.join(FORMATS)}."),
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
        typer.Option(help="One of the paper's corpora: wt103, wt2, ptb, lm1b, enwik8, text8."),
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
        float, typer.Option(help="Fraction of records that may be unusable; they are listed.")
    ] = 0.001,
    shard_size: Annotated[
        int, typer.Option(metavar="MIB", help="MiB of raw tokens after which a shard ends.")
    ] = 256,
    as_json: AsJson = False,
) -> None:
    """Turn a corpus into checksummed shards. The same input and options give the same bytes.

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
        shard_bytes=shard_size * _MIB,
    )
    if not 0 <= max_reject_rate <= 1:
        raise ConfigError(f"--max-reject-rate {max_reject_rate} must lie in [0, 1]")
    from data_pipeline.prepare import prepare_dataset

    with _progress() as progress:
        done = prepare_dataset(
            inputs,
            out,
            settings,
            tokenizer_file=file,
            max_reject_rate=max_reject_rate,
            progress=progress,
        )
    status = "already complete" if done.already_complete else "complete"
    if as_json:
        about = {"status": status, "ignored": done.ignored, "formats": done.kinds}
        print(json.dumps({**about, **_totals(out, done.manifest)}))
        return
    print(f"{out}: {status}")
    _print_totals(done.manifest)
    print("  read as " + ", ".join(f"{kind}: {n:,} files" for kind, n in done.kinds.items()))
    if done.ignored:
        counts = ", ".join(f"{count} {suffix}" for suffix, count in sorted(done.ignored.items()))
        print(f"ignored, not text by their suffix: {counts}", file=sys.stderr)
    if done.manifest.input.rejected:
        print(
            f"{done.manifest.input.rejected} records could not be used: {out / 'rejects.jsonl'}",
            file=sys.stderr,
        )


@app.command()
def verify(dataset: Dataset, *, as_json: AsJson = False) -> None:
    """Read everything again and list all that is not as it was written; then exit code 3.

    Example: txl data verify data/books
    """
    from data_pipeline.remote import dataset_path
    from data_pipeline.verify import verify_dataset

    directory = dataset_path(dataset)
    with _progress() as progress:
        found = verify_dataset(directory, progress=progress)
    if as_json:
        result = {"ok": not found.problems, "problems": found.problems, "bytes": found.num_bytes}
        print(json.dumps({**result, **_totals(directory, found.manifest)}))
    elif not found.problems:
        print(f"{directory}: all of {found.num_bytes:,} bytes are as written")
        _print_totals(found.manifest)
    if found.problems:
        listed = "".join(f"\n  {problem}" for problem in found.problems)
        raise DataError(
            f"{directory}: {len(found.problems)} problems:{listed}\nDo not train on it. Restore "
            f"these files from a copy, or remove {directory} and run txl prepare again: the same "
            "corpus and options give the same bytes."
        )


@app.command()
def inspect(
    dataset: Dataset,
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
    from data_pipeline.remote import dataset_path

    directory = dataset_path(dataset)
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


@app.command()
def push(
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", help="Directory that `txl prepare` wrote.")
    ],
    url: Annotated[str, typer.Argument(metavar="URL", help="s3:// or gs:// to copy it to.")],
    *,
    as_json: AsJson = False,
) -> None:
    """Copy a dataset to object storage, its manifest last. Another dataset is never overwritten.

    Example: txl data push data/books s3://bucket/books
    """
    from data_pipeline.push import push_dataset
    from data_pipeline.remote import dataset_path

    with _progress() as progress:
        manifest = push_dataset(directory, url, progress=progress)
    if as_json:
        print(json.dumps({"status": "complete", **_totals(dataset_path(url), manifest)}))
        return
    print(f"{dataset_path(url)}: complete")
    _print_totals(manifest)


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
    if not Path(tokenizer).is_file():
        raise ConfigError(
            f"--tokenizer {tokenizer!r} is neither byte, char, word or bpe nor a file. Give one of "
            "these, or the path of a tokenizer.json."
        )
    return Path(tokenizer)


def _settings(**values: Any) -> "PrepareSettings":
    from pydantic import ValidationError

    from data_pipeline.manifest import PrepareSettings

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


def _totals(directory: "DatasetPath", manifest: "ShardManifest") -> dict[str, Any]:
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
    print(f"  from {source.files:,} files; {source.empty} empty, {source.rejected} rejected")


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[str, int, int], None]]:
    """progress(what, done, total) in bytes, on standard error: a bar on a terminal, else lines."""
    if not sys.stderr.isatty():
        yield _lines()
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("")
        yield lambda what, done, total: bar.update(
            task, description=what, completed=done, total=total
        )


def _lines() -> Callable[[str, int, int], None]:
    last = time.monotonic()

    def show(what: str, done: int, total: int) -> None:
        nonlocal last
        if time.monotonic() - last >= _SECONDS_BETWEEN_LINES:
            last = time.monotonic()
            share = done / total if total else 1.0
            print(
                f"{what}: {done / _MIB:,.1f} of {total / _MIB:,.1f} MiB ({share:.0%})",
                file=sys.stderr,
            )

    return show
