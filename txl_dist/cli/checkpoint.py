"""`txl checkpoint`: list the checkpoints of a run, and check their files against their hashes."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from txl_dist.cli.options import AsJson, SavedCheckpoint, local_path_parser

app = typer.Typer(help="List and verify checkpoints.", no_args_is_help=True)


@app.command("list")
def list_(
    run: Annotated[
        Path, typer.Argument(metavar="RUN", help="A run directory.", parser=local_path_parser())
    ],
    as_json: AsJson = False,
) -> None:
    """List the complete checkpoints of a run, oldest first, and which are LATEST and BEST.

    Example: txl checkpoint list runs/quickstart
    """
    from txl_dist.checkpoint.directory import CheckpointDirectory
    from txl_dist.checkpoint.manifest import load_checkpoint_manifest
    from txl_dist.errors import CheckpointError
    from txl_dist.training.scores import ScoreTable
    from txl_dist.training.state import load_state

    directory = CheckpointDirectory(run)
    if not directory.path.is_dir():
        raise CheckpointError(f"{run} has no checkpoints directory; give a run directory")
    pointed_at = {name: directory.pointer(name) for name in ("LATEST", "BEST")}
    scores, rows = ScoreTable(directory, is_due=lambda step: False), []
    for step in directory.steps():
        row: dict[str, Any] = {"step": step, "path": str(directory.at(step))}
        row["pointers"] = [name for name, target in pointed_at.items() if target == step]
        try:
            manifest = load_checkpoint_manifest(directory.at(step))
            state = load_state(directory.at(step), manifest)
            score = scores.get(step)
            row |= {
                "bytes": sum(entry.bytes for entry in manifest.files.values()),
                "tokens": state.tokens,
                "num_ranks": manifest.num_ranks,
                "nats_per_token": score and score.nats_per_token,
            }
        except CheckpointError as error:  # One damaged checkpoint must not hide the others.
            row["damage"] = str(error)
        rows.append(row)
    if as_json:
        print(json.dumps({"run": str(run), "checkpoints": rows}))
        return
    for row in rows:
        summary = row.get("damage") or (
            f"{row['bytes']:>14,} bytes  {row['tokens']:>14,} tokens  {row['num_ranks']} ranks"
            f"{_score_text(row['nats_per_token'])}"
        )
        print("  ".join([f"{row['path']}  {summary}", *row["pointers"]]))
    if not rows:
        print(f"{run} has no complete checkpoint yet")


def _score_text(nats_per_token: float | None) -> str:
    return "" if nats_per_token is None else f"  validation loss {nats_per_token:.4f}"


@app.command()
def verify(checkpoint: SavedCheckpoint, as_json: AsJson = False) -> None:
    """Hash every file and compare it with the manifest. Damage is listed; exit code 4.

    Example: txl checkpoint verify runs/quickstart
    """
    from txl_dist.checkpoint.directory import resolve_checkpoint
    from txl_dist.checkpoint.reader import verify_checkpoint

    path = resolve_checkpoint(checkpoint)
    manifest = verify_checkpoint(path)
    size = sum(entry.bytes for entry in manifest.files.values())
    if as_json:
        print(json.dumps({"path": str(path), "step": manifest.step, "bytes": size}))
    else:
        print(f"{path}: complete, {len(manifest.files)} files, {size:,} bytes, all hashes match")
