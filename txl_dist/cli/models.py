"""Models that are stored: `txl checkpoint`, `txl import` and `txl export`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from data_pipeline.errors import counted
from txl_dist.cli.options import AsJson, Run, SavedCheckpoint, path_argument, print_result
from txl_dist.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from txl_dist.model.transformer_xl import TransformerXL

app = typer.Typer(help="List and verify checkpoints.", no_args_is_help=True)


@app.command("list")
def list_(run: Run, as_json: AsJson = False) -> None:
    """List the complete checkpoints of a run, oldest first.

    Example: txl checkpoint list runs/quickstart
    """
    from txl_dist.checkpoint.directory import CheckpointDirectory
    from txl_dist.checkpoint.manifest import load_checkpoint_manifest
    from txl_dist.training.scores import ScoreTable
    from txl_dist.training.state import load_state

    directory = CheckpointDirectory(run)
    if not directory.path.is_dir():
        raise CheckpointError(f"{run} has no checkpoints directory; give a run directory")
    pointers = directory.pointers_by_step()
    scores, rows = ScoreTable(directory, is_due=lambda step: False), []
    for step in directory.steps():
        path = directory.at(step)
        row: dict[str, Any] = {"step": step, "path": str(path), "pointers": pointers.get(step, [])}
        try:
            manifest = load_checkpoint_manifest(path)
            score = scores.get(step)
            row |= {
                "bytes": sum(entry.bytes for entry in manifest.files.values()),
                "tokens": load_state(path, manifest).tokens,
                "num_ranks": manifest.num_ranks,
                "nats_per_token": score and score.nats_per_token,
            }
        except CheckpointError as error:  # One damaged checkpoint must not hide the others.
            row["damage"] = str(error)
        rows.append(row)
    content = {"run": str(run), "checkpoints": rows}
    text = "\n".join(map(_line, rows)) or f"{run} has no complete checkpoint yet"
    print_result(content, text, as_json=as_json)


def _line(row: dict[str, Any]) -> str:
    nats = row.get("nats_per_token")
    summary = row.get("damage") or (
        f"{row['bytes']:>14,} bytes  {row['tokens']:>14,} tokens  "
        + counted(row["num_ranks"], "rank")
        + ("" if nats is None else f"  validation loss {nats:.4f}")
    )
    return "  ".join([f"{row['path']}  {summary}", *row["pointers"]])


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
    content = {"path": str(path), "step": manifest.step, "bytes": size}
    text = f"{path}: complete, {len(manifest.files)} files, {size:,} bytes, all hashes match"
    print_result(content, text, as_json=as_json)


Out = Annotated[
    Path,
    typer.Option(help="New or empty directory to write.", parser=path_argument),
]


def import_(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="SOURCE",
            help="A TransfoXL directory of transformers, or a state dict of the paper's code as "
            ".npz, with its constructor arguments as config_json.",
            parser=path_argument,
        ),
    ],
    out: Out,
    as_json: AsJson = False,
) -> None:
    """Convert weights of other systems.

    Writes model.safetensors and config.json. No code in the source is executed.

    Example: txl import downloads/transfo-xl-wt103 --out models/wt103
    """
    from txl_dist.convert import require_source

    require_source(source)  # before torch is imported
    from txl_dist.convert.other_programs import read_model
    from txl_dist.convert.stored_model import write_exported

    model, kind = read_model(source)
    write_exported(out, model, tokenizer=None)
    _print_model({"source": str(source), "format": kind}, out, model, as_json=as_json)


def export(
    checkpoint: SavedCheckpoint,
    out: Out,
    format_: Annotated[
        Literal["txl", "hf"],
        typer.Option(
            "--format",
            help="`txl`: weights, config and tokenizer. `hf`: also a model card and one Python "
            "file that runs the model with torch alone, as model hubs expect.",
        ),
    ] = "txl",
    scores: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE",
            help="With `hf`: a result of txl eval --json for the card; can be repeated. Default: "
            "all results of these weights that txl eval has kept in the run.",
            parser=path_argument,
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write the model of a checkpoint, for txl or for others.

    The files are model.safetensors, config.json and tokenizer.json. If the run averaged its weights
    (optimizer.averaging), the average is written.

    Example: txl export runs/quickstart --out models/quickstart
    """
    if scores and format_ != "hf":
        raise ConfigError("--scores is for the model card of --format hf; add it")
    from txl_dist.checkpoint.directory import resolve_checkpoint
    from txl_dist.checkpoint.reader import load_model
    from txl_dist.convert.stored_model import Reading, write_exported

    path = resolve_checkpoint(checkpoint)
    model, tokenizer, manifest = load_model(path)
    # How the model read its training text: txl eval and txl generate take it as their default.
    reading = Reading(tgt_len=manifest.segment_len, reset=manifest.run["data.reset"])
    if format_ == "hf":
        from txl_dist.analysis.model_card import card
        from txl_dist.convert.hub import write_for_hub

        text = card(path, manifest, model, tokenizer, scores=scores or ())
        write_for_hub(out, model, tokenizer, reading, card=text)
    else:
        write_exported(out, model, tokenizer, reading)
    _print_model({"source": str(path), "format": "checkpoint"}, out, model, as_json=as_json)


def _print_model(
    origin: dict[str, str], out: Path, model: "TransformerXL", *, as_json: bool
) -> None:
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    text = f"{out}: {num_parameters:,} parameters, from {origin['source']} ({origin['format']})"
    content = {**origin, "out": str(out), "parameters": num_parameters}
    print_result(content, text, as_json=as_json)
