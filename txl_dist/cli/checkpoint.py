"""`txl checkpoint list` and `verify`: what a run has saved, and whether it is as it was written."""

import json
from pathlib import Path
from typing import Annotated

import typer

from txl_dist.cli.paths import local_path_parser

app = typer.Typer(help="List and verify checkpoints.", no_args_is_help=True)


@app.command("list")
def list_(
    run: Annotated[Path, typer.Argument(help="A run directory.", parser=local_path_parser())],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Complete checkpoints of a run, oldest first.

    Example: txl checkpoint list runs/quickstart
    """
    from txl_dist.checkpoint.directory import CheckpointDirectory
    from txl_dist.checkpoint.manifest import load_checkpoint_manifest
    from txl_dist.errors import CheckpointError
    from txl_dist.training.state import load_state

    directory = CheckpointDirectory(run)
    if not directory.path.is_dir():
        raise CheckpointError(f"{run} has no checkpoints directory; give a run directory")
    rows = []
    for step in directory.steps():
        row: dict[str, object] = {"step": step, "path": str(directory.at(step))}
        try:
            manifest = load_checkpoint_manifest(directory.at(step))
            state = load_state(directory.at(step), manifest)
            row |= {
                "bytes": sum(entry.bytes for entry in manifest.files.values()),
                "tokens": state.tokens,
                "num_ranks": manifest.num_ranks,
                "best_so_far": state.best is not None and state.best.step == step,
            }
        except CheckpointError as error:
            row["damage"] = str(error)
        rows.append(row)
    if as_json:
        print(json.dumps({"run": str(run), "checkpoints": rows}))
        return
    for row in rows:
        told = row.get("damage") or (
            f"{row['bytes']:>14,} bytes  {row['tokens']:>14,} tokens  {row['num_ranks']} ranks"
            f"{'  best so far' if row['best_so_far'] else ''}"
        )
        print(f"{row['path']}  {told}")
    if not rows:
        print(f"{run} has no complete checkpoint yet")


@app.command()
def verify(
    path: Annotated[
        Path, typer.Argument(help="A checkpoint, or a run: its newest.", parser=local_path_parser())
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Hash every file against the manifest; exit code 4 names all that is damaged.

    Example: txl checkpoint verify runs/quickstart
    """
    from txl_dist.checkpoint.directory import resolve_checkpoint
    from txl_dist.checkpoint.reader import verify_checkpoint

    directory = resolve_checkpoint(path)
    manifest = verify_checkpoint(directory)
    size = sum(entry.bytes for entry in manifest.files.values())
    if as_json:
        print(json.dumps({"path": str(directory), "step": manifest.step, "bytes": size}))
    else:
        print(f"{directory}: whole, {len(manifest.files)} files, {size:,} bytes")
