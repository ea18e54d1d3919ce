"""`txl data`: verify, inspect, push and mix prepared datasets."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from data_pipeline.errors import DataError, ReadFailureError, counted, printable
from txl_dist.cli.options import (
    MIB,
    AsJson,
    ConfigPath,
    NumWorkers,
    On,
    Overrides,
    open_workers,
    path_argument,
    work_progress,
)

if TYPE_CHECKING:
    from data_pipeline.shards.data_commands import Verified
    from data_pipeline.shards.manifest import ShardManifest
    from data_pipeline.system.remote_path import DatasetPath

app = typer.Typer(help="Verify, inspect and copy prepared datasets.", no_args_is_help=True)

Dataset = Annotated[
    str, typer.Argument(metavar="DIR", help="Directory that `txl prepare` wrote, or its URL.")
]


@app.command()
def verify(
    dataset: Dataset, *, workers: NumWorkers = 1, on: On = "processes", as_json: AsJson = False
) -> None:
    """Hash every file again; list damaged, missing and extra ones.

    Exit code 3 if there are any. Files that a disk or network error kept from being read are listed
    separately; exit code 1 if these are the only ones.

    Example: txl data verify data/books
    """
    from data_pipeline.shards.data_commands import verify_dataset
    from data_pipeline.system.remote_path import dataset_path

    directory = dataset_path(dataset)
    with open_workers(on, workers) as pool, work_progress(MIB, pool) as progress:
        verified = verify_dataset(directory, workers=pool, progress=progress)
    if as_json:
        result = {
            "ok": not verified.problems and not verified.unread,
            "problems": verified.problems,
            "unread": verified.unread,
            "bytes": verified.num_bytes,
        }
        print(json.dumps({**result, **totals(directory, verified.manifest)}))
    elif not verified.problems and not verified.unread:
        checked = f"all of {verified.num_bytes:,} bytes match the manifest"
        print(f"{printable(str(directory))}: {checked}")
        print_totals(verified.manifest)
    _raise_problems(directory, verified)


def _raise_problems(directory: "DatasetPath", verified: "Verified") -> None:
    from data_pipeline.shards.shard_files import what_to_check
    from data_pipeline.system.remote_path import RemotePath

    problems = "".join(f"\n  {problem}" for problem in verified.problems)
    unread = "".join(f"\n  {file}" for file in verified.unread)
    unread = f"{len(verified.unread)} could not be read now:{unread}"
    retry = f"Check {what_to_check(directory)}, then run this again."
    if verified.problems:
        repair = (
            "Remove these files there and send them again from an intact copy: "
            f"txl data push DIR {directory}"
            if isinstance(directory, RemotePath)
            else f"Restore these files from a copy, or remove {directory} and run txl prepare "
            "again: the same corpus and options give the same bytes."
        )
        raise DataError(
            f"{directory}: {counted(len(verified.problems), 'problem')}:{problems}\n"
            f"Do not train on it. {repair}" + (f"\n{unread}\n{retry}" if verified.unread else "")
        )
    if verified.unread:
        raise ReadFailureError(
            f"{directory}: {unread}\nNo damage in the files that were read. {retry}"
        )


@app.command()
def inspect(
    dataset: Dataset,
    *,
    documents: Annotated[
        int, typer.Option(min=0, help="Documents per split whose beginning is shown.")
    ] = 2,
    as_json: AsJson = False,
) -> None:
    """Show totals per split, the tokenizer, and documents as text.

    Example: txl data inspect data/books --documents 5
    """
    from data_pipeline.shards import require_manifest

    require_manifest(dataset)  # before numpy is imported
    from data_pipeline.shards.data_commands import excerpts
    from data_pipeline.shards.manifest import load_manifest
    from data_pipeline.system.remote_path import dataset_path

    directory = dataset_path(dataset)
    manifest = load_manifest(directory)
    shown = excerpts(directory, documents=documents)
    if as_json:
        rows = [asdict(excerpt) for excerpt in shown]
        print(json.dumps({**totals(directory, manifest), "documents": rows}))
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
    directory: Annotated[
        Path,
        typer.Argument(
            metavar="DIR", help="Directory that `txl prepare` wrote.", parser=path_argument
        ),
    ],
    url: Annotated[str, typer.Argument(metavar="URL", help="s3:// or gs:// URL to copy it to.")],
) -> None:
    """Copy a dataset to object storage, manifest last. Never overwrites another dataset.

    Example: txl data push data/books s3://bucket/books
    """
    from data_pipeline.shards.data_commands import push_dataset
    from data_pipeline.system.remote_path import dataset_path

    with work_progress(MIB) as progress:
        manifest = push_dataset(directory, url, progress=progress)
    print(f"{printable(str(dataset_path(url)))}: complete")
    print_totals(manifest)


@app.command()
def mix(config: ConfigPath, overrides: Overrides = None, *, as_json: AsJson = False) -> None:
    """Show how often one epoch reads each corpus of a mixture.

    Example: txl data mix run.yaml data.mixture.web.weight=3
    """
    from txl_dist.config.config_file import load_run_config
    from txl_dist.training.data import first_phase, open_corpora
    from txl_dist.training.phases import realised_shares

    data = load_run_config(config, overrides or []).data
    phase = first_phase(open_corpora(data), num_lanes=data.num_lanes)
    shares = realised_shares(phase)
    if as_json:
        corpora = {share.name: asdict(share) for share in shares}
        print(json.dumps({"tokens_per_epoch": phase.num_tokens, "corpora": corpora}))
        return
    print(f"one epoch reads {phase.num_tokens:,} tokens of split 'train'")
    for share in shares:
        print(f"  {share}")


def totals(directory: "DatasetPath", manifest: "ShardManifest") -> dict[str, Any]:
    """The part of `--json` that all commands on datasets have in common."""
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
                "text_bytes": entry.text_bytes if manifest.has_text else None,
                "bytes": entry.compressed_bytes,
                "text_bytes_per_compressed_byte": entry.text_bytes_per_compressed_byte
                if manifest.has_text
                else None,
            }
            for name, entry in manifest.splits.items()
        },
    }


def print_totals(manifest: "ShardManifest") -> None:
    for name, split in manifest.train_first():
        ratio = f" ({split.text_bytes_per_compressed_byte:.2f} bytes of text per byte)"
        print(
            f"  {name:<8} {counted(split.documents, 'document'):>20} {split.tokens:>15,} tokens "
            f"{split.compressed_bytes:>13,} bytes in {counted(len(split.shards), 'shard')}"
            f"{ratio if manifest.has_text else ''}"
        )
    source = manifest.input
    skipped = f"{source.empty} empty, {source.rejected} rejected, {source.duplicates} duplicates"
    print(f"  from {counted(source.files, 'file')}; skipped documents: {skipped}")
