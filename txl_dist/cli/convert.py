"""`txl import` and `txl export`: convert models from and to other formats."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from txl_dist.cli.options import COPY_TO_URL, AsJson, SavedCheckpoint, local_path_parser

if TYPE_CHECKING:
    from txl_dist.model.transformer_xl import TransformerXL

Out = Annotated[
    Path,
    typer.Option(help="New or empty directory to write.", parser=local_path_parser(COPY_TO_URL)),
]


def import_(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="SOURCE",
            help="A TransfoXL directory of transformers; a state dict of the paper's code as .npz "
            "(its constructor arguments in it as config_json, or next to it as .json); or a "
            "directory that txl export wrote.",
            parser=local_path_parser(),
        ),
    ],
    out: Out,
    as_json: AsJson = False,
) -> None:
    """Convert weights of other systems: write model.safetensors and config.json.

    No code in the source is executed.

    Example: txl import downloads/transfo-xl-wt103 --out models/wt103
    """
    from txl_dist.convert import require_source

    require_source(source)  # before torch is imported
    from txl_dist.convert.other_programs import read_model

    model, tokenizer, kind = read_model(source)
    from txl_dist.convert.stored_model import DEFAULT_READING, describe_exported, write_exported

    reading = describe_exported(source).reading if kind == "exported" else DEFAULT_READING
    write_exported(out, model, tokenizer, reading)
    _print_result({"source": str(source), "format": kind}, out, model, as_json=as_json)


def export(checkpoint: SavedCheckpoint, out: Out, as_json: AsJson = False) -> None:
    """Write model.safetensors, config.json and tokenizer.json of a checkpoint, and nothing else.

    If the run averaged its weights (optimizer.averaging), the average is written.

    Example: txl export runs/quickstart --out models/quickstart
    """
    from txl_dist.checkpoint.directory import resolve_checkpoint
    from txl_dist.checkpoint.reader import load_model
    from txl_dist.convert.stored_model import Reading, write_exported

    path = resolve_checkpoint(checkpoint)
    model, tokenizer, manifest = load_model(path)
    # How the model read its training text: txl eval and txl generate take it as their default.
    reading = Reading(tgt_len=manifest.run["data.tgt_len"], reset=manifest.run["data.reset"])
    write_exported(out, model, tokenizer, reading)
    _print_result({"source": str(path), "format": "checkpoint"}, out, model, as_json=as_json)


def _print_result(
    origin: dict[str, str], out: Path, model: "TransformerXL", *, as_json: bool
) -> None:
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    if as_json:
        print(json.dumps(origin | {"out": str(out), "parameters": num_parameters}))
    else:
        print(f"{out}: {num_parameters:,} parameters, from {origin['source']} ({origin['format']})")
