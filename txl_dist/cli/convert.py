"""`txl import` and `txl export`: models from elsewhere, and models to hand on."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from txl_dist.cli.paths import SEND, local_path_parser

if TYPE_CHECKING:
    from txl_dist.model.transformer_xl import TransformerXL

Out = Annotated[
    Path, typer.Option(help="Directory to write, new or empty.", parser=local_path_parser(SEND))
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


def import_(
    source: Annotated[
        Path,
        typer.Argument(
            help="A TransfoXL directory of transformers, the original's state dict as .npz "
            "(its constructor's arguments inside as config_json, or beside it as .json), or what "
            "txl export wrote.",
            parser=local_path_parser(),
        ),
    ],
    out: Out,
    as_json: AsJson = False,
) -> None:
    """Read foreign weights; write model.safetensors and config.json. Runs no code it finds.

    Example: txl import downloads/transfo-xl-wt103 --out models/wt103
    """
    from txl_dist.convert.formats import read_model
    from txl_dist.convert.single_file import UNKNOWN_READING, describe_exported, write_exported

    model, tokenizer, kind = read_model(source)
    reading = describe_exported(source).reading if kind == "exported" else UNKNOWN_READING
    write_exported(out, model, tokenizer, reading)
    _tell({"source": str(source), "format": kind}, out, model, as_json=as_json)


def export(
    checkpoint: Annotated[
        Path, typer.Argument(help="A checkpoint, or a run: its newest.", parser=local_path_parser())
    ],
    out: Out,
    as_json: AsJson = False,
) -> None:
    """Write a checkpoint's model.safetensors, config.json and tokenizer.json, and no more.

    Example: txl export runs/quickstart --out models/quickstart
    """
    from txl_dist.checkpoint.directory import resolve_checkpoint
    from txl_dist.checkpoint.reader import load_model
    from txl_dist.convert.single_file import Reading, write_exported

    path = resolve_checkpoint(checkpoint)
    model, tokenizer, manifest = load_model(path)
    reading = Reading(tgt_len=manifest.run["data.tgt_len"], reset=manifest.run["data.reset"])
    write_exported(out, model, tokenizer, reading)
    _tell({"source": str(path), "format": "checkpoint"}, out, model, as_json=as_json)


def _tell(origin: dict[str, str], out: Path, model: "TransformerXL", *, as_json: bool) -> None:
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    if as_json:
        print(json.dumps(origin | {"out": str(out), "parameters": num_parameters}))
    else:
        print(f"{out}: {num_parameters:,} parameters, from {origin['source']} ({origin['format']})")
