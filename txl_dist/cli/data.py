"""`txl data`: checking prepared datasets, looking inside, making a lost manifest again."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from data_pipeline.errors import DataError, UnreadError, printable
from txl_dist.cli.options import AsJson, NumWorkers, On
from txl_dist.cli.paths import local_path_parser
from txl_dist.cli.progress import progress_in_bytes
from txl_dist.cli.workers import open_workers

if TYPE_CHECKING:
    from data_pipeline.shards.manifest import ShardManifest
    from data_pipeline.shards.verify import Verified
    from data_pipeline.storage.remote_path import DatasetPath

app = typer.Typer(help="Check prepared datasets and look inside.", no_args_is_help=True)

Dataset = Annotated[
    str, typer.Argument(metavar="DIR", help="Directory that `txl prepare` wrote, or its URL.")
]
Directory = Annotated[
    Path,
    typer.Argument(
        metavar="DIR", help="Directory that `txl prepare` wrote.", parser=local_path_parser()
    ),
]


@app.command()
def verify(
    dataset: Dataset,
    *,
    fast: Annotated[
        bool, typer.Option("--fast", help="Names, sizes and indexes only; shards are not read.")
    ] = False,
    workers: NumWorkers = 1,
    on: On = "local",
    as_json: AsJson = False,
) -> None:
    """Read everything again and list all that is not as it was written; then exit code 3.

    What could not be read now, by a disk or a network, is listed apart; exit code 1 if it is all.

    Example: txl data verify data/books
    """
    from data_pipeline.shards.verify import verify_dataset
    from data_pipeline.storage.remote_path import dataset_path

    directory = dataset_path(dataset)
    with open_workers(on, workers) as pool, progress_in_bytes() as progress:
        found = verify_dataset(directory, fast=fast, workers=pool, progress=progress)
    if as_json:
        result = {
            "ok": not found.problems and not found.unread,
            "problems": found.problems,
            "unread": found.unread,
            "bytes": found.num_bytes,
        }
        print(json.dumps({**result, **totals(directory, found.manifest)}))
    elif not found.problems and not found.unread:
        what = "names, sizes and indexes" if fast else f"all of {found.num_bytes:,} bytes"
        print(f"{printable(str(directory))}: {what} are as written")
        print_totals(found.manifest)
    _raise_verdict(directory, found)


def _raise_verdict(directory: "DatasetPath", found: "Verified") -> None:
    from data_pipeline.shards.shard_index import what_to_check
    from data_pipeline.storage.remote_path import RemotePath

    unread = f"{len(found.unread)} could not be read now:{_listed(found.unread)}"
    again = f"Check {what_to_check(directory)}, then run this again."
    if found.problems:
        repair = (
            "Remove these files there and send them again from a sound copy: "
            f"txl data push DIR {directory}"
            if isinstance(directory, RemotePath)
            else f"Restore these files from a copy, or remove {directory} and run txl prepare "
            "again: the same corpus and options give the same bytes."
        )
        raise DataError(
            f"{directory}: {len(found.problems)} problems:{_listed(found.problems)}\n"
            f"Do not train on it. {repair}" + (f"\n{unread}\n{again}" if found.unread else "")
        )
    if found.unread:
        raise UnreadError(f"{directory}: {unread}\nNothing that was read is damaged. {again}")


def _listed(problems: list[str]) -> str:
    return "".join(f"\n  {problem}" for problem in problems)


@app.command()
def rebuild(
    directory: Directory, *, workers: NumWorkers = 1, on: On = "local", as_json: AsJson = False
) -> None:
    """Make a lost or damaged manifest.json again from shards, indexes and tokenizer.json.

    The result is the lost one, with the same digest. Every shard is read and checked first; what
    is missing or damaged among them cannot be rebuilt here, only by txl prepare.

    Example: txl data rebuild data/books
    """
    from data_pipeline.shards.rebuild import rebuild_manifest

    with open_workers(on, workers) as pool, progress_in_bytes() as progress:
        done = rebuild_manifest(directory, workers=pool, progress=progress)
    status = "already complete" if done.was_sound else "rebuilt"
    if as_json:
        print(json.dumps({"status": status, **totals(directory, done.manifest)}))
        return
    print(f"{printable(str(directory))}: the manifest is {status}, digest {done.manifest.digest}")
    print_totals(done.manifest)


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

    from data_pipeline.shards.inspection import excerpts, summarize
    from data_pipeline.shards.manifest import load_manifest
    from data_pipeline.storage.remote_path import dataset_path

    directory = dataset_path(dataset)
    manifest = load_manifest(directory)
    shown = excerpts(directory, documents=documents)
    if as_json:
        content = totals(directory, manifest)
        for summary in summarize(manifest):
            ratio = summary.text_bytes_per_compressed_byte
            content["splits"][summary.name]["text_bytes_per_compressed_byte"] = ratio
        print(json.dumps({**content, "documents": [asdict(excerpt) for excerpt in shown]}))
        return
    print(f"{printable(str(directory))}: digest {manifest.digest}")
    print(
        f"tokenizer {manifest.settings.tokenizer}: {manifest.vocab_size} ids as {manifest.dtype}, "
        f"end of document {manifest.end_of_document}, digest {manifest.tokenizer_digest}"
    )
    print_totals(manifest)
    for excerpt in shown:
        print(f"\n[{excerpt.split}] {excerpt.document_id} ({excerpt.tokens:,} tokens)")
        print(f"  {excerpt.text}")


@app.command()
def push(
    directory: Directory,
    url: Annotated[str, typer.Argument(metavar="URL", help="s3:// or gs:// to copy it to.")],
    *,
    as_json: AsJson = False,
) -> None:
    """Copy a dataset to object storage, its manifest last. Another dataset is never overwritten.

    Example: txl data push data/books s3://bucket/books
    """
    from data_pipeline.shards.push import push_dataset
    from data_pipeline.storage.remote_path import dataset_path

    with progress_in_bytes() as progress:
        manifest = push_dataset(directory, url, progress=progress)
    if as_json:
        print(json.dumps({"status": "complete", **totals(dataset_path(url), manifest)}))
        return
    print(f"{printable(str(dataset_path(url)))}: complete")
    print_totals(manifest)


def totals(directory: "DatasetPath", manifest: "ShardManifest") -> dict[str, Any]:
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


def print_totals(manifest: "ShardManifest") -> None:
    from data_pipeline.shards.inspection import summarize

    for split in summarize(manifest):
        print(
            f"  {split.name:<8} {split.documents:>10,} documents {split.tokens:>15,} tokens "
            f"{split.compressed_bytes:>13,} bytes in {split.shards} shards "
            f"({split.text_bytes_per_compressed_byte:.2f} bytes of text in one)"
        )
    source = manifest.input
    left_out = f"{source.empty} empty, {source.rejected} rejected, {source.duplicates} repeated"
    print(f"  from {source.files:,} files; left out: {left_out}")
